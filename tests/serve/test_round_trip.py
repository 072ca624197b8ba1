"""Rule: what a server wrote, it reads. The message of any answer goes back as an endpoint's own clients send it back,
and of what the model wrote nothing is missing in the next prompt.

The gate tries a few answers of each kind. `python -m tests.serve.test_round_trip 2000` tries as many as it says.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest
import tiny_tokenizers as tiny
from openai.lib.streaming.chat import ChatCompletionStreamState

from minivllm.engine.output import Kind, OutputProcessor
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.plan import Delta
from minivllm.request import sequence_ids
from minivllm.serve.reasoning import REASONING_PARSERS
from minivllm.serve.response_store import ResponseStore
from minivllm.serve.tools import TOOL_PARSERS
from tests.serve.conftest import FakeEngine, LetterTokenizer, serving

EACH = "{% for m in messages %}<{{ m.role }}>"
WITH_TOOLS = "{% if tools %}{{ tools | length }} tools{% endif %}" + EACH + "{{ m.content or '' }}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
BY_NAME = "{% for k, v in c.function.arguments.items() %}{{ k }}: {{ v | tojson }}, {% endfor %}"
TEMPLATES = {
    "as JSON": WITH_TOOLS + CALLS + "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
    "each by its name": WITH_TOOLS + CALLS + BY_NAME + "{% endfor %}{% endfor %}",
    "as text": WITH_TOOLS + CALLS + "{{ '' + c.function.arguments }}{% endfor %}{% endfor %}",
    "in words": EACH + "{{ m.content }}{% endfor %}",
    "in words, in turns": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
}
PARAMETERS = {"type": "object", "properties": {"port": {"type": "string"}}}
NAMES = ("tide", "moon")
STOP = "stopword"
THOUGHTS = ("", "<think>\npondering ebb\n</think>\n\n", "<think></think>")
TEXTS = ("", "Seven oclock.", " \n", 'A "quoted" <b> \\ text\n\nwith lines ', "日本 😀 \u2028")
OBJECTS = ('{"port": "Brest"}', "{}", '{"port": "Saint \\"Malo\\"\\n日本", "deep": {"list": [1, null]}}')
ODD = ("[1]", "null", '"{}"', '{"port": "Brest"', "")  # what models write that are told of objects
ENDS = ("stop", "length", "length", STOP)


class Case(NamedTuple):
    """An answer: what the model writes, why it ends, and how it is asked for."""

    text: str
    reason: str
    choice: str  # auto, required or a tool's name
    has_tools: bool
    stream: bool
    n: int
    answered: bool  # the calls' results come back too
    template: str


def draw(rng: random.Random) -> Case:
    choice, has_tools = rng.choice(["auto", "required", "tide"]), rng.random() < 0.9
    calls = [(rng.choice(NAMES), rng.choice(OBJECTS)) for _ in range(rng.choice([0, 1, 1, 2, 3]))] if has_tools else []
    if choice == "tide" and has_tools:
        said = rng.choice(OBJECTS)
    elif choice == "required" and has_tools:
        said = ", ".join(f'{{"name": "{name}", "parameters": {given}}}' for name, given in calls or [("tide", "{}")])
        said = f"[{said}]"
    else:
        calls = [(name, rng.choice(ODD) if rng.random() < 0.2 else given) for name, given in calls]
        written = [f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in calls]
        said = rng.choice(TEXTS) + "\n".join(written) + (rng.choice(TEXTS) if rng.random() < 0.2 else "")
    text, reason = rng.choice(THOUGHTS) + said, rng.choice(ENDS)
    if reason == "length":
        text = text[: rng.randrange(len(text) + 1)]
    elif reason == STOP:
        text += f" {STOP} behind"
    shape = rng.random() < 0.5, rng.choice([1, 1, 2]), rng.random() < 0.5, rng.choice(sorted(TEMPLATES))
    return Case(text, reason, choice, has_tools, *shape)


# -------------------------------------------------------------------------------------------------------- the server


class Letters(LetterTokenizer):
    """One token a letter, and real chat templates."""

    has_bytes, strips_first_space = True, False

    def __init__(self) -> None:
        self.templates = {
            name: TextTokenizer(tiny.byte_level()._tokenizer, {}, {"default": source}, ())
            for name, source in TEMPLATES.items()
        }
        self.template = "as JSON"

    def apply_chat_template(self, messages: Any, **given: Any) -> str:  # type: ignore[override]
        return self.templates[self.template].apply_chat_template(messages, **given)


class ScriptedEngine(FakeEngine):
    """Writes `case.text`, and keeps the prompts that it is asked with."""

    max_model_len = 100_000
    case: Case
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Any = Letters()
        self.prompts: list[str] = []

    async def generate(  # type: ignore[override]
        self, prompt, params, request_id, *, output_kind: Kind = "cumulative", find_answer=None,
        on_start=lambda metrics: None, **_,
    ):  # fmt: skip
        self.prompts.append(self.tokenizer.decode(prompt["prompt_token_ids"]))
        processor = OutputProcessor(self.tokenizer)
        ids, letters = sequence_ids(request_id, params.num_sequences), list(map(ord, self.case.text))
        processor.add(request_id, None, prompt["prompt_token_ids"], params, ids, 1.0, output_kind, find_answer)
        on_start(processor.metrics_of(request_id))
        reason = "length" if self.case.reason == "length" else "stop"
        for i in range(0, max(1, len(letters)), 5):
            last = i + 5 >= len(letters)
            tokens = letters[i : i + 5] + ([0] if last and reason == "stop" else [])
            tokens = tokens or [ord("\u200b")]  # a step brings a token
            deltas = [Delta(id, tokens, reason if last else None, arrival_time=1.0) for id in ids]
            for output in processor.process(deltas, 2.0)[0]:
                yield output
                if output.finished:
                    return


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedEngine]:
    with Server() as engine:
        yield engine


class Server(ExitStack):
    def __init__(self, **options: Any):
        super().__init__()
        self.options = {"reasoning_parser": REASONING_PARSERS.get("qwen3"), **options}

    def __enter__(self) -> ScriptedEngine:  # type: ignore[override]
        super().__enter__()
        engine = ScriptedEngine()
        folder = Path(self.enter_context(TemporaryDirectory()))
        self.options["response_store"] = ResponseStore(folder / "responses", 0.0)
        engine.url = self.enter_context(serving(engine, **self.options))
        return engine


# ------------------------------------------------------------------------------------------------------- the clients

Said = tuple[list[Any], str, list[tuple[str, str, str]]]  # what goes back, its text, its calls: (id, name, arguments)


class Chat:
    def __init__(self, url: str):
        self.client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30)

    def begin(self) -> list[Any]:
        return [{"role": "user", "content": "First."}]

    def ask(self, case: Case, conversation: list[Any], rng: random.Random) -> list[Said]:
        functions = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES]
        fields: dict[str, Any] = {"model": "fake", "messages": conversation, "stop": [STOP], "n": case.n}
        if case.has_tools:
            named = {"type": "function", "function": {"name": "tide"}}
            fields |= {"tools": functions, "tool_choice": named if case.choice == "tide" else case.choice}
        if not case.stream:
            answer = self.client.chat.completions.create(**fields)
            shape = rng.choice(["dump", "unset", "object"])
            return [self.said(choice.message, choice.message, shape) for choice in answer.choices]
        chunks = list(self.client.chat.completions.create(**fields, stream=True))
        if rng.random() < 0.5:
            state = ChatCompletionStreamState()
            for chunk in chunks:
                state.handle_chunk(chunk)
            final = state.current_completion_snapshot.choices
            return [self.said(choice.message, choice.message, rng.choice(["dump", "unset"])) for choice in final]
        return [self.gathered(chunks, i) for i in range(case.n)]

    def said(self, message: Any, back: Any, shape: str) -> Said:
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        made = {"dump": back.model_dump, "unset": lambda: back.model_dump(exclude_unset=True), "object": lambda: back}
        return [made[shape]()], message.content or "", calls

    def gathered(self, chunks: list[Any], index: int) -> Said:
        """As clients of many servers put a stream together, every field that they know of in it."""
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == index]
        content = "".join(delta.content or "" for delta in deltas)
        calls: dict[int, dict[str, Any]] = {}
        for part in (part for delta in deltas for part in delta.tool_calls or ()):
            call = calls.setdefault(part.index, {"function": {"name": None, "arguments": ""}, "type": "function"})
            call["id"] = part.id or call["id"]
            call["function"]["name"] = part.function.name or call["function"]["name"]
            call["function"]["arguments"] += part.function.arguments or ""
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        message = {
            "role": "assistant", "content": content or None, "tool_calls": list(calls.values()) or None, "audio": None,
            "function_call": None, "refusal": None, "annotations": [], "reasoning_content": thought or None,
            "provider_specific_fields": {"refusal": None}, "images": [], "thinking_blocks": None,
        }  # fmt: skip
        told = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls.values()]
        return [message], content, told

    def results(self, calls: list[tuple[str, str, str]]) -> list[Any]:
        return [{"role": "tool", "tool_call_id": id, "content": f"result{i}"} for i, (id, _, _) in enumerate(calls)]

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]


class Responses:
    def __init__(self, url: str):
        self.client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30)

    def begin(self) -> list[Any]:
        return [{"role": "user", "content": "First."}]

    def ask(self, case: Case, conversation: list[Any], rng: random.Random) -> list[Said]:
        fields: dict[str, Any] = {"model": "fake", "input": conversation, "extra_body": {"stop": [STOP]}}
        custom = rng.random() < 0.3
        if case.has_tools:
            fields["tools"] = [{"type": "function", "name": n, "parameters": PARAMETERS, "strict": None} for n in NAMES]
            if custom:
                fields["tools"][0] = {"type": "custom", "name": "tide"}
            kind = "custom" if custom else "function"
            fields["tool_choice"] = {"type": kind, "name": "tide"} if case.choice == "tide" else case.choice
        if case.stream:
            *_, last = self.client.responses.create(**fields, stream=True)
            answer = last.response
        else:
            answer = self.client.responses.create(**fields)
        shape = rng.choice(["dump", "unset", "object"])
        text, calls = "", []
        for item in answer.output:
            if item.type == "message":
                text += "".join(part.text for part in item.content) + "\n"
            elif item.type in ("function_call", "custom_tool_call"):
                given = item.arguments if item.type == "function_call" else item.input
                calls.append((item.call_id, item.name, given))
        self.last = answer.id
        self.custom = {item.call_id for item in answer.output if item.type == "custom_tool_call"}
        made = {"dump": lambda i: i.model_dump(), "unset": lambda i: i.model_dump(exclude_unset=True)}
        return [([made.get(shape, lambda i: i)(item) for item in answer.output], text, calls)]

    def results(self, calls: list[tuple[str, str, str]]) -> list[Any]:
        kinds = {True: "custom_tool_call_output", False: "function_call_output"}
        return [
            {"type": kinds[id in self.custom], "call_id": id, "output": f"result{i}"}
            for i, (id, _, _) in enumerate(calls)
        ]

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]


class Kept(Responses):
    """Goes on from the response that the server keeps, or from the items that it lists."""

    def ask(self, case: Case, conversation: list[Any], rng: random.Random) -> list[Said]:
        created = self.client.responses.create
        if isinstance(conversation[0], str):
            before, *rest = conversation
            if rng.random() < 0.5:
                self.client.responses.create = lambda **fields: created(**fields, previous_response_id=before)
            else:
                items = [*self.client.responses.input_items.list(before, order="asc")]
                rest = [*items, *self.client.responses.retrieve(before).output, *rest]
            conversation = rest
        try:
            said = super().ask(case, conversation, rng)
        finally:
            self.client.responses.create = created
        return [([self.last], text, calls) for _, text, calls in said]


class Messages:
    def __init__(self, url: str):
        self.client: Any = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0, timeout=30)

    def begin(self) -> list[Any]:
        return [{"role": "user", "content": "First."}]

    def ask(self, case: Case, conversation: list[Any], rng: random.Random) -> list[Said]:
        fields: dict[str, Any] = {"model": "fake", "messages": conversation, "max_tokens": 9999}
        fields["stop_sequences"] = [STOP]
        if case.has_tools:
            fields["tools"] = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
            choices = {"auto": {"type": "auto"}, "required": {"type": "any"}, "tide": {"type": "tool", "name": "tide"}}
            fields["tool_choice"] = choices[case.choice]
        if case.stream:
            with self.client.messages.stream(**fields) as stream:
                answer = stream.get_final_message()
        else:
            answer = self.client.messages.create(**fields)
        text = "\n".join(block.text for block in answer.content if block.type == "text")
        calls = [
            (block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            for block in answer.content
            if block.type == "tool_use"
        ]
        shape = rng.choice(["dump", "unset", "object"])
        made = {"dump": lambda b: b.model_dump(), "unset": lambda b: b.model_dump(exclude_unset=True)}
        content = [made.get(shape, lambda b: b)(block) for block in answer.content]
        return [([{"role": "assistant", "content": content}], text, calls)]

    def results(self, calls: list[tuple[str, str, str]]) -> list[Any]:
        blocks = [
            {"type": "tool_result", "tool_use_id": id, "content": f"result{i}"} for i, (id, *_) in enumerate(calls)
        ]
        return [{"role": "user", "content": blocks}] if blocks else []

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]


class Ollama:
    """As its Python client has it: messages with every field, calls without ids."""

    def __init__(self, url: str):
        self.url = f"{url}/api/chat"

    def begin(self) -> list[Any]:
        return [{"role": "user", "content": "First."}]

    def ask(self, case: Case, conversation: list[Any], rng: random.Random) -> list[Said]:
        body: dict[str, Any] = {"model": "fake", "messages": conversation, "stream": case.stream, "think": True}
        body["options"] = {"stop": [STOP]}
        if case.has_tools:
            body["tools"] = [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in NAMES]
        reply = httpx.post(self.url, json=body, timeout=30)
        assert reply.status_code == 200, reply.text
        message: dict[str, Any] = dict.fromkeys(["content", "thinking", "images", "tool_name", "tool_calls"])
        message["role"], with_ids = "assistant", rng.random() < 0.5
        for part in (json.loads(line)["message"] for line in reply.text.split("\n") if line):
            for name in ("content", "thinking"):
                message[name] = ((message[name] or "") + (part.get(name) or "")) or None
            for call in part.get("tool_calls") or ():
                kept = call if with_ids else {"function": {key: call["function"][key] for key in ("name", "arguments")}}
                message["tool_calls"] = [*(message["tool_calls"] or ()), kept]
        calls = [
            (call.get("id"), call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
            for call in message["tool_calls"] or ()
        ]
        if rng.random() < 0.5:
            message = {name: value for name, value in message.items() if value is not None}
        return [([message], message.get("content") or "", calls)]

    def results(self, calls: list[tuple[str, str, str]]) -> list[Any]:
        return [
            {"role": "tool", "content": f"result{i}", "tool_name": name} | ({"tool_call_id": id} if id else {})
            for i, (id, name, _) in enumerate(calls)
        ]

    def user(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]


CLIENTS = {"chat": Chat, "responses": Responses, "kept": Kept, "messages": Messages, "ollama": Ollama}


# ---------------------------------------------------------------------------------------------------------- the rule


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.replace("\\n", " ")))


def check(engine: ScriptedEngine, client: Any, seed: int) -> None:
    rng = random.Random(seed)
    case = draw(rng)
    engine.case, engine.tokenizer.template = case, case.template
    begun = client.begin()
    for back, text, calls in client.ask(case, begun, rng):
        turns = [*back, *(client.results(calls) if case.answered else ()), *client.user("Second.")]
        client.ask(case, turns if isinstance(client, Kept) else [*begun, *turns], rng)
        prompt = engine.prompts[-1].partition("First.")[2]
        for written in (text, *(f"{name} {arguments}" for _, name, arguments in calls)):
            assert not words(written) - words(prompt), (seed, case, written, prompt)
        assert prompt.count("Second.") == 1 and prompt.count("result") == len(calls) * case.answered, (seed, prompt)
    engine.prompts.clear()


@pytest.mark.parametrize("name", CLIENTS)
def test_what_an_endpoint_has_written_it_reads(scripted, name):
    client = CLIENTS[name](scripted.url)
    for seed in range(30):
        check(scripted, client, seed)


# ------------------------------------------------------------------------------------------- by hand, and by one family

HAND = [
    {"role": "assistant", "content": None, "refusal": "no harbour here", "audio": None, "function_call": None},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no harbour here"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "no"}, {"type": "refusal", "refusal": "harbour here"}]},
    {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": None, "name": None},
    {"role": "assistant", "content": [], "tool_calls": []},
    {"role": "assistant"},
]


@pytest.mark.parametrize("message", HAND)
def test_a_refusal_and_nothing_at_all_are_messages(scripted, message):
    scripted.case = draw(random.Random(0))._replace(text="Fine.", reason="stop")
    for scripted.tokenizer.template in TEMPLATES:
        turns = [{"role": "user", "content": "First."}, message, {"role": "user", "content": "Second."}]
        reply = httpx.post(f"{scripted.url}/v1/chat/completions", json={"messages": turns}, timeout=30)
        assert reply.status_code == 200, reply.text
        assert ("harbour here" in scripted.prompts[-1]) == ("harbour" in str(message))


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_of_ollamas_is_read_as_it_was_written(scripted, stream):
    scripted.case = draw(random.Random(0))._replace(text="<think>ebb</think>Seven.", reason="stop")
    body: dict[str, Any] = {"model": "fake", "prompt": "First.", "stream": stream}
    for prompt, before in (("First.", None), ("Second.", "Seven."), ("Third.", "Second.")):
        reply = httpx.post(f"{scripted.url}/api/generate", json=body | {"prompt": prompt}, timeout=30)
        assert reply.status_code == 200, reply.text
        body["context"] = json.loads(reply.text.split("\n")[-2 if stream else 0])["context"]
        assert before is None or before in scripted.prompts[-1]


NINE = TEMPLATES["as JSON"] + (
    "{% for m in messages %}{% for id in (m.tool_calls or []) | map(attribute='id') %}{% if id | length != 9 %}"
    "{{ raise_exception('nine letters and digits') }}{% endif %}{% endfor %}{% endfor %}[TOOL_CALLS]"
)


@pytest.mark.parametrize("choice", ["auto", "required", "tide"])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_call_has_such_an_id_as_the_models_template_reads(nine, name, choice):
    choice = "auto" if name == "ollama" else choice  # which has no other
    calls = {
        "auto": '[TOOL_CALLS]tide{"port": "Brest"}',
        "required": '[{"name": "tide", "parameters": {}}]',
        "tide": "{}",
    }
    nine.case = Case(calls[choice], "stop", choice, True, False, 1, True, "as JSON")
    for seed in range(4):
        client, rng = CLIENTS[name](nine.url), random.Random(seed)
        ((back, _, called),) = client.ask(nine.case, client.begin(), rng)
        begun = [] if name == "kept" else client.begin()
        client.ask(nine.case, [*begun, *back, *client.results(called), *client.user("Second.")], rng)
        assert called and "result0" in nine.prompts[-1]


@pytest.fixture(scope="module")
def nine() -> Iterator[ScriptedEngine]:
    with Server(tool_parser=TOOL_PARSERS.get("mistral")) as engine:
        engine.tokenizer.templates["as JSON"].use_chat_template(NINE)
        yield engine


@pytest.fixture(scope="module")
def strict() -> Iterator[ScriptedEngine]:
    with Server(refuse_unknown=True) as engine:
        yield engine


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "chat"])
@pytest.mark.parametrize(
    "text", ["<think>ebb</think>Seven.", '<think>ebb</think>A<tool_call>{"name": "tide"}</tool_call>']
)
def test_no_field_that_is_written_is_unknown(strict, path, text):
    """As JSON, without a client between, where unknown fields are refused."""
    strict.case = draw(random.Random(0))._replace(text=text, reason="stop")
    url = f"{strict.url}/{'api' if path == 'chat' else 'v1'}/{path}"
    begun, asks = [{"role": "user", "content": "First."}], {"model": "fake", "stream": False}
    asks |= {"max_tokens": 999} if path == "messages" else {}
    given = "input" if path == "responses" else "messages"
    reply = httpx.post(url, json=asks | {given: begun}, timeout=30)
    assert reply.status_code == 200, reply.text
    match reply.json():
        case {"choices": [{"message": message}]} | {"message": message}:
            back = [message]
        case {"output": items}:
            back = items
        case answer:
            back = [{"role": "assistant", "content": answer["content"]}]
    reply = httpx.post(url, json=asks | {given: [*begun, *back, {"role": "user", "content": "Second."}]}, timeout=30)
    assert reply.status_code == 200, reply.text


if __name__ == "__main__":
    with Server() as engine:
        for name, kind in CLIENTS.items():
            client = kind(engine.url)
            for seed in range(int(sys.argv[1])):
                check(engine, client, seed)
            print(name)
