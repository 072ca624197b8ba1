"""Rule: what an endpoint of the table declares is what it does: who asks, what it may take, who counts."""

from __future__ import annotations

import asyncio
import re
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import httpx
import pytest
from serve.conftest import FakeEngine

from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.metrics import Metrics
from minivllm.serve.app import DEBUG_ENDPOINTS, ENDPOINTS, PAGE_ENDPOINTS, create_app
from minivllm.serve.endpoint import LOOK
from minivllm.serve.rate_limit import RateLimit

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


# ------------------------------------------------------------------------------------------- each row of the table

PUBLIC = sorted({e.path for e in ALL if e.role == "anyone"} | {e.path for e in ALL if e.role == "metrics"})


def url_of(endpoint):
    return re.sub(r"{\w+(:\w+)?}", "x", endpoint.path)


def named(endpoint):
    return f"{endpoint.method} {endpoint.path}"


@pytest.fixture(scope="module")
def guarded(serving):
    """A server with keys of each role, and one that lets each client ask once."""
    keys = {"api_keys": ["use", "other"], "debug_endpoints": True}
    with (
        serving(FakeEngine(), **keys) as url,
        serving(FakeEngine(), **keys, rate_limit=RateLimit(1e-6, 1)) as limited,
        serving(FakeEngine(), **keys, max_body_bytes=64) as tight,
    ):
        yield SimpleNamespace(url=url, limited=limited, tight=tight)


def asking(url, endpoint, key=None):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    content = {} if endpoint.method != "POST" else {"json": {}}
    if endpoint.path == "/debug/live":
        headers |= {"sec-fetch-site": "cross-site"}  # it never ends by itself
    return httpx.request(endpoint.method, url + url_of(endpoint), headers=headers, timeout=30, **content)


@pytest.mark.parametrize("endpoint", ALL, ids=named)
def test_each_row_says_who_may_ask_what_it_may_cost_and_who_counts_it(endpoint):
    cost = endpoint.cost
    assert cost is not None and endpoint.role in ("anyone", "metrics", "use", "admin")
    assert (cost.body == 0) == (endpoint.method != "POST" or "{" in endpoint.path or endpoint.path == "/ping")
    assert cost.counted_by != "connections" or endpoint.method == "GET", "what makes work is counted by its client"
    assert endpoint.role != "anyone" or cost == LOOK, "before a key is shown, all is looked up"


@pytest.mark.parametrize("endpoint", ALL, ids=named)
def test_without_a_key_only_that_is_answered_which_says_so(guarded, endpoint):
    if endpoint.path == "/debug/live":
        assert httpx.get(f"{guarded.url}{endpoint.path}").status_code == 401
        return
    status = asking(guarded.url, endpoint).status_code
    assert (status == 401) == (endpoint.path not in PUBLIC or endpoint.method == "POST"), status


@pytest.mark.parametrize("endpoint", [e for e in ALL if e.role != "admin" and e.path != "/debug/live"], ids=named)
def test_who_counts_it_does(guarded, endpoint):
    """After a first request of any kind the client has none left."""
    httpx.post(f"{guarded.limited}/tokenize", json={"prompt": "x"}, headers={"authorization": "Bearer use"})
    status = asking(guarded.limited, endpoint, "use").status_code
    assert (status == 429) == (endpoint.cost.counted_by != "connections"), status


@pytest.mark.parametrize("endpoint", [e for e in ALL if e.method == "GET" and e.path in LOOKS], ids=named)
def test_a_get_takes_no_more_than_it_says(tiny_app, endpoint):
    path = endpoint.path.replace("{response_id}", "resp_1").replace("{model:path}", "tiny")
    asked(tiny_app, path)
    _, calls, sent = asked(tiny_app, path)
    assert calls <= endpoint.cost.calls and sent <= endpoint.cost.answer


@pytest.mark.parametrize("endpoint", [e for e in ALL if e.cost and e.cost.body is None], ids=named)
def test_no_endpoint_takes_a_body_beyond_the_limit(guarded, endpoint):
    content, headers = {"json": {"a": "b" * 99}}, {"authorization": "Bearer use"}
    if endpoint.takes_type != "application/json":
        content = {"files": {"file": b"x" * 99}}
    reply = httpx.post(guarded.tight + url_of(endpoint), headers=headers, **content)
    assert reply.status_code == 413 or "task" in reply.text or reply.json()["error"]["code"] == "role_not_allowed"
