"""Rule: what the dearest request of each POST takes in the event loop, and of memory, grows with its body, no faster,
and stays within what the endpoint's row declares. Python calls and bytes are counted; CPU time has a wide margin.

`make attack` has the full form: the same kinds of bodies, as long as they may be, beside a client that asks for little.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import pytest
from pooling.tiny import write_bert
from serve.conftest import FakeEngine
from serve.test_endpoints import named

from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.metrics import Metrics
from minivllm.serve import bodies
from minivllm.serve.app import ENDPOINTS, create_app
from minivllm.serve.request_limits import RequestLimits

USER = {"role": "user", "content": "Hi"}
BOUNDARY = "costs"
SMALL, LARGE = 100_000, 200_000  # bytes of a body, more or less
POSTS = [e for e in ENDPOINTS if e.method == "POST" and e.cost is not None and e.cost.body is None]


def text(n: int) -> str:
    return "word " * (n // 5)


def turns(n: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": "word"} for i in range(n // 40 | 1)]


def tools(n: int) -> list[dict[str, Any]]:
    """A thousand at most, so their descriptions grow."""
    function = {"name": "f", "description": text(n // 40), "parameters": {"type": "object"}}
    return [{"type": "function", "function": function | {"name": f"f{i}"}} for i in range(40)]


def unknown(n: int) -> dict[str, Any]:
    return {f"x{i}": i for i in range(n // 12)}


def texts(n: int) -> list[str]:
    return ["word word word word"] * (n // 1000)


def prompts(n: int) -> list[str]:
    """As many as a request may have sequences, at the most."""
    return ["word"] * (n // (LARGE // RequestLimits().sequences))


def chats(n: int) -> list[dict[str, Any]]:
    return [
        {"messages": turns(n)},
        {"messages": [USER | {"content": [{"type": "text", "text": "word"}] * (n // 32)}]},
        {"messages": [USER], "tools": tools(n)},
        {"messages": [USER], **unknown(n)},
    ]


def items(n: int) -> list[dict[str, Any]]:
    calls = [
        {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(min(5000, n // 80))
    ]
    return [{"input": turns(n)}, {"input": [USER, *calls, USER]}, {"input": "Hi", **unknown(n)}]


def anthropic(n: int) -> list[dict[str, Any]]:
    base = {"model": "fake", "messages": turns(n)}
    blocks = [{"type": "text", "text": "word"}] * (n // 32)
    return [base, base | {"messages": [USER | {"content": blocks}]}, base | {"messages": [USER], "system": text(n)}]


def ranked(n: int) -> list[dict[str, Any]]:
    return [{"query": text(n), "documents": ["a", "b"]}, {"query": "a", "documents": texts(n)}]


def scored(n: int) -> list[dict[str, Any]]:
    return [{"text_1": text(n), "text_2": ["a", "b"]}, {"text_1": "a", "text_2": texts(n)}]


def listed(name: str) -> Callable[[int], list[dict[str, Any]]]:
    return lambda n: [{name: text(n)}, {name: texts(n)}, {name: "a", **unknown(n)}]


COSTLY: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "/v1/chat/completions": chats,
    "/v1/completions": lambda n: [{"prompt": text(n)}, {"prompt": prompts(n)}, {"prompt": "a", **unknown(n)}],
    "/v1/responses": items,
    "/v1/responses/input_tokens": items,
    "/v1/messages": lambda n: [body | {"max_tokens": 5} for body in anthropic(n)],
    "/v1/messages/count_tokens": anthropic,
    "/v1/audio/transcriptions": lambda n: [{"model": "fake", "prompt": text(n)}],
    "/v1/audio/translations": lambda n: [{"model": "fake", "prompt": text(n)}],
    "/v1/embeddings": listed("input"),
    **dict.fromkeys(["/score", "/v1/score"], scored),
    **dict.fromkeys(["/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"], ranked),
    "/v2/embed": lambda n: [{"texts": texts(n), "model": "tiny", "input_type": "x", "embedding_types": ["float"]}],
    "/pooling": listed("input"),
    "/embed": listed("inputs"),
    "/similarity": lambda n: [{"inputs": {"source_sentence": text(n), "sentences": ["a"]}}],
    "/classify": listed("input"),
    "/predict": listed("inputs"),
    "/v1/load_lora_adapter": lambda n: [{"lora_name": text(n), "lora_path": text(n)}],
    "/v1/unload_lora_adapter": lambda n: [{"lora_name": text(n)}],
    "/tokenize": lambda n: [{"prompt": text(n)}, *chats(n)[:3]],
    "/detokenize": lambda n: [{"tokens": [65] * (n // 4)}],
    "/api/chat": lambda n: [body | {"stream": False} for body in chats(n)],
    "/api/generate": lambda n: [{"prompt": text(n), "stream": False}, {"prompt": "a", "context": [65] * (n // 4)}],
    "/api/show": lambda n: [{"model": "tiny", **unknown(n)}],
    "/api/embed": listed("input"),
    "/api/embeddings": lambda n: [{"prompt": text(n)}],
    "/completion": lambda n: [{"prompt": text(n)}, {"prompt": [65] * (n // 4)}],
    "/infill": lambda n: [{"input_prefix": text(n), "input_suffix": text(n)}],
    "/apply-template": lambda n: chats(n)[:3],
    "/invocations": chats,
}


class Took(NamedTuple):
    status: int
    calls: int
    seconds: float  # of the loop's thread
    peak: int  # bytes


class Served:
    """An app and its loop, in this thread."""

    def __init__(self, engine: Any):
        self.engine, self.runner = engine, asyncio.Runner()
        self.app: Any = self.runner.run(self._made())

    async def _made(self) -> Any:
        app = create_app(self.engine, Metrics("tiny"), ("tiny", "fake"), max_body_bytes=2**24)
        app.state.closing = asyncio.get_running_loop().create_future()
        return app

    def post(self, path: str, body: bytes, kind: str, counted: bool) -> Took:
        status, calls = 0, 0

        def count(frame: FrameType, event: str, arg: object) -> None:
            nonlocal calls
            calls += event == "call"

        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if pending:
                return pending.pop()
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)

        headers = [(b"host", b"localhost"), (b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
        scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"}
        scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
        scope |= {"app": self.app, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {}}
        tracemalloc.start() if counted else None
        begin = time.thread_time()
        sys.setprofile(count if counted else None)
        with suppress(asyncio.CancelledError):
            self.runner.run(self.app(scope, receive, send))
        sys.setprofile(None)
        seconds, peak = time.thread_time() - begin, tracemalloc.get_traced_memory()[1] if counted else 0
        tracemalloc.stop()
        return Took(status, calls, seconds, peak)


@pytest.fixture(scope="module")
def fake():
    engine = FakeEngine()
    engine.max_model_len = 4_000_000
    yield Served(engine)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    write_bert(folder)
    served = Served(AsyncLLM(str(folder), overrides={"executor.num_threads": 1}))
    yield served
    served.runner.run(served.engine.shutdown())


def as_body(endpoint: Any, body: dict[str, Any]) -> tuple[bytes, str]:
    if endpoint.takes_type == "application/json":
        return json.dumps(body).encode(), "application/json"
    parts = [f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in body.items()]
    return ("".join(parts) + f"--{BOUNDARY}--\r\n").encode(), f"multipart/form-data; boundary={BOUNDARY}"


def test_every_post_that_takes_a_body_has_its_dearest():
    assert {endpoint.path for endpoint in POSTS} == set(COSTLY)


@pytest.mark.parametrize("endpoint", POSTS, ids=named)
def test_the_dearest_request_takes_time_and_memory_in_proportion(request, endpoint):
    served = request.getfixturevalue("fake" if not endpoint.tasks or "generate" in endpoint.tasks else "embedder")
    small, large = COSTLY[endpoint.path](SMALL), COSTLY[endpoint.path](LARGE)
    for once, twice in zip(small, large, strict=True):
        (first, kind), (second, _) = as_body(endpoint, once), as_body(endpoint, twice)
        served.post(endpoint.path, first, kind, counted=False)  # what is found out once
        one, two = (served.post(endpoint.path, body, kind, counted=True) for body in (first, second))
        assert 0 < one.status < 500 and 0 < two.status < 500, (one, two)
        assert two.calls <= endpoint.cost.calls, "what the row declares"
        assert two.calls <= 2.5 * one.calls + 2000, "in the loop: in proportion to the body"
        assert two.peak <= 2.5 * one.peak + 2**20 and two.peak <= 120 * len(second) + 2**23, (one.peak, two.peak)
        assert any(is_linear(served, endpoint.path, first, second, kind) for _ in range(3)), "CPU time of the loop"


def is_linear(served: Served, path: str, first: bytes, second: bytes, kind: str) -> bool:
    one, two = (served.post(path, body, kind, counted=False).seconds for body in (first, second))
    return two <= 3 * one + 0.05


def test_the_counts_see_what_is_done_in_the_loop(fake, monkeypatch):
    """As before bodies were read beside it."""

    async def in_the_loop(size: int, work: Callable[[], Any], client: str = "") -> Any:
        return work()

    monkeypatch.setattr(bodies, "by_size", in_the_loop)
    body = json.dumps(chats(LARGE)[1]).encode()
    (endpoint,) = (endpoint for endpoint in POSTS if endpoint.path == "/v1/chat/completions")
    assert fake.post(endpoint.path, body, "application/json", counted=True).calls > 20_000
