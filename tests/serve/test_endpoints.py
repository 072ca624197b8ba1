"""Rule: what an endpoint of the table declares is what it does: who asks, what it may take, who counts."""

from __future__ import annotations

import asyncio
import sys
from types import FrameType
from typing import Any

import pytest

from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.metrics import Metrics
from minivllm.serve.app import DEBUG_ENDPOINTS, ENDPOINTS, PAGE_ENDPOINTS, create_app

MOST_CALLS = 6_000  # of Python functions, for an answer that is looked up: some milliseconds
MOST_BYTES = 2**20  # of such an answer
ALL = ENDPOINTS + PAGE_ENDPOINTS + DEBUG_ENDPOINTS
LOOKS = sorted({e.path for e in ALL if e.method == "GET"} - {"/debug/live", "/debug/trace"})


def asked(app: Any, path: str) -> tuple[int, int, int]:
    """-> the status of a GET, the Python calls that it took in the event loop, and the bytes of its answer."""
    calls, sent, status = 0, 0, 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal sent, status
        sent, status = sent + len(message.get("body", b"")), message.get("status", status)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "query_string": b"",
    }
    scope |= {"raw_path": path.encode(), "root_path": "", "headers": [(b"host", b"localhost")], "app": app}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {}}

    async def answer() -> None:
        app.state.closing = asyncio.get_running_loop().create_future()
        sys.setprofile(count)
        try:
            await app(scope, receive, send)
        finally:
            sys.setprofile(None)

    asyncio.run(answer())
    return status, calls, sent


@pytest.fixture(scope="module")
def tiny_app():
    engine = AsyncLLM("dummy:tiny", overrides={"kv.num_blocks": 16}, max_model_len=64)
    yield create_app(engine, Metrics("tiny"), ("tiny",), debug_endpoints=True)
    asyncio.run(engine.shutdown())


@pytest.mark.parametrize("path", [*LOOKS, "/", "/page/tokens.js", "/nowhere", "/" + 60_000 * "a"])
def test_what_a_get_answers_is_there_before_it_is_asked_for(tiny_app, path):
    path = path.replace("{response_id}", "resp_1").replace("{model:path}", "tiny")
    asked(tiny_app, path)  # what is found out once, as a template's variables are
    status, calls, sent = asked(tiny_app, path)
    assert status and calls < MOST_CALLS and sent < MOST_BYTES


def test_the_count_sees_an_answer_that_is_made_anew(tiny_app, monkeypatch):
    from minivllm.serve import app, openapi

    async def anew(request: Any) -> Any:
        return app.reply(openapi.document(ALL))

    (route,) = (route for route in tiny_app.routes if route.path == "/openapi.json")
    monkeypatch.setattr(route, "app", app.Route("/openapi.json", anew).app)
    assert asked(tiny_app, "/openapi.json")[1] > MOST_CALLS
