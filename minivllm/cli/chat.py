"""The `chat` command: a conversation in the terminal, with an engine in this process or with a server (`--url`).

A model to talk to is anything with `answer(messages)`, an iterator of text pieces: closing it stops the answer and
frees what it held.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from minivllm.config import DEFAULT_MODEL
from minivllm.errors import BadRequest, UserError
from minivllm.request import SamplingParams
from minivllm.terminal import Parser, add_engine_options, engine_options, interrupts_end_at_once

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
Messages = list[dict[str, str]]
HELP = """/reset  forget the conversation      /quit  leave (as Ctrl-D does)
/help   this text                     Ctrl-C stops an answer; at the prompt it leaves"""


class Model(Protocol):
    name: str

    def answer(self, messages: Messages) -> Iterator[str]: ...
    def close(self) -> None: ...


class LocalModel:
    def __init__(self, params: SamplingParams, **options: Any):
        self.name = options.get("model", DEFAULT_MODEL)
        print(f"Loading {self.name} ...", flush=True)
        with interrupts_end_at_once():
            from minivllm.engine.async_llm import AsyncLLM

            self._engine = AsyncLLM(**options)
        self._params = params
        self._runner = asyncio.Runner()
        self._ids = itertools.count()

    def answer(self, messages: Messages) -> Iterator[str]:
        tokenizer = self._engine.tokenizer
        tokens = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        prompt = {"prompt_token_ids": tokens}
        stream = self._engine.generate(prompt, self._params, f"chat-{next(self._ids)}", output_kind="delta")
        try:
            while (output := self._runner.run(_next(stream))) is not None:
                if output.error:
                    raise BadRequest(output.error)
                yield output.outputs[0].text
        finally:
            self._runner.run(stream.aclose())

    def close(self) -> None:
        self._runner.run(self._engine.shutdown())
        self._runner.close()


async def _next(stream: AsyncIterator[T]) -> T | None:
    return await anext(stream, None)


class RemoteModel:
    """Any OpenAI-compatible server."""

    def __init__(self, url: str, params: dict[str, Any], model: str | None, key: str | None):
        import httpx

        url = (url if "//" in url else f"http://{url}").rstrip("/")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        base = url if url.endswith("/v1") else f"{url}/v1"
        self._client = httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(10, read=None))
        self._params = params
        with self._open("GET", "/models") as response:
            self.name = model or response.json()["data"][0]["id"]

    def answer(self, messages: Messages) -> Iterator[str]:
        body = {"model": self.name, "messages": messages, "stream": True, **self._params}
        with self._open("POST", "/chat/completions", body) as response:
            for line in _lines(response):
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise BadRequest(event["error"]["message"])
                yield from (choice["delta"].get("content") or "" for choice in event["choices"])

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _open(self, method: str, path: str, body: Any = None) -> Iterator[httpx.Response]:
        import httpx

        try:
            with self._client.stream(method, path, json=body) as response:
                if response.status_code != 200:
                    raise BadRequest(_error_text(response))
                if method == "GET":
                    response.read()
                yield response
        except httpx.TransportError as error:
            raise UserError(f"no server at {self._client.base_url}: {error}. Start one: make serve") from None


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """httpx's iter_lines also ends a line at U+2028 and others, which may be in a text."""
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _error_text(response: httpx.Response) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return json.loads(response.read())["error"]["message"]
    return f"{response.status_code} {response.reason_phrase}"


def main(argv: Sequence[str], prog: str = "python -m minivllm chat") -> int:
    args = parser(prog).parse_args(argv)
    model = open_model(args)
    with closing(model):
        converse(model, args.system)
    return 0


def parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Talk to a model in this terminal.", epilog=HELP)
    group = parser.add_argument_group("chat")
    group.add_argument("--url", help="talk to a server, such as http://127.0.0.1:8000/v1, instead of loading a model")
    group.add_argument("--api-key", metavar="KEY", help="of that server")
    group.add_argument("--system", metavar="TEXT", help="a system message (the chat template's own)")
    group.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0: always the likeliest (0.7)")
    group.add_argument("--top-p", type=float, default=0.9, metavar="P", help="(0.9)")
    group.add_argument("--max-tokens", type=int, metavar="N", help="of one answer (what the context has room for)")
    add_engine_options(parser, model_argument=True)
    return parser


def open_model(args: argparse.Namespace) -> Model:
    params = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    sampling = SamplingParams(**params)  # a wrong value is told before the model is loaded
    options = engine_options(args)
    if args.url is None:
        return LocalModel(sampling, **options)
    return RemoteModel(args.url, {k: v for k, v in params.items() if v is not None}, options.get("model"), args.api_key)


def converse(model: Model, system: str | None) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 (gives input() its line editing)
    beginning: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    print(f"Talking to {model.name}. /help lists the commands.")
    while (text := ask()) is not None:
        command = text.strip()
        if command == "/reset":
            messages = list(beginning)
            print("The conversation is forgotten.")
        elif command.startswith("/"):
            print(HELP)
        elif command:
            messages.append({"role": "user", "content": text})
            take_turn(model, messages)


def ask() -> str | None:
    """A line; None to leave."""
    try:
        text = input("\n> ")
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if text.strip() in ("/quit", "/exit", "/bye") else text


def take_turn(model: Model, messages: Messages) -> None:
    """Print the answer and append it. A question that could not be answered is taken back."""
    pieces: list[str] = []
    begin = time.perf_counter()
    try:
        with closing(model.answer(messages)) as answer:
            for piece in answer:
                pieces.append(piece)
                print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except BadRequest as error:
        print(f"error: {error}" + (" /reset begins anew." if len(messages) > 2 else ""))
    if pieces:
        messages.append({"role": "assistant", "content": "".join(pieces)})
        if sys.stdout.isatty():
            print(f"\033[2m[{len(pieces) / (time.perf_counter() - begin):.0f} tokens/s]\033[0m")
    else:
        messages.pop()
