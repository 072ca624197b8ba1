"""/debug/live over HTTP: from an engine in this process and in its own, behind the keys, of each key's own requests."""

from __future__ import annotations

import contextlib
import json
import threading

import httpx
import pytest

from minivllm.serve import live

TINY = {"kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1}
pytestmark = pytest.mark.timeout(60)  # a stream without news is silent for ever
LONG = {"prompt": "a secret", "max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module", params=["inproc", "process"])
def server(request, serving):
    from minivllm.engine.async_llm import AsyncLLM

    engine = AsyncLLM("dummy:tiny", overrides={**TINY, "engine.core": request.param})
    with serving(engine, names=("tiny",), api_keys=["one", "two"]) as url:
        yield url


@contextlib.contextmanager
def looking(url, key="one"):
    """The events of a stream, as they come."""
    with httpx.stream("GET", f"{url}/debug/live", headers={"x-api-key": key}, timeout=20) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))


@contextlib.contextmanager
def running(url, key="one", body=LONG):
    """A request that runs until the end of the block. Gives its id."""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**body, "stream": True}, headers={"x-api-key": key}, timeout=20
    ) as reply:
        lines = reply.iter_lines()  # whose end would close the connection
        yield json.loads(next(lines)[6:])["id"]


def find(events, wanted, most=40):
    for _ in range(most):
        event = next(events)
        if wanted(event):
            return event
    raise AssertionError("no event shows it")


def test_a_request_is_seen_with_its_blocks_and_its_steps(server):
    with looking(server) as events:
        first = next(events)
        assert first["blocks"] == "f60" or "c" in first["blocks"]
        with running(server) as request_id:
            event = find(events, lambda e: e["requests"] and e["requests"][0]["output"] > 3)
            (row,) = event["requests"]
            assert row["id"].startswith(request_id) and row["running"]
            held = sum(number for _, number in row["blocks"])
            assert held * 8 >= row["computed"] > 3 and "u" in event["blocks"]
        text = json.dumps(event)
        assert "secret" not in text and "salt" not in text
        gone = find(events, lambda e: not e["requests"] and not e["running"])
        assert "u" not in gone["blocks"]
    numbers = [step["number"] for step in event["steps"]]
    assert numbers == sorted(set(numbers)) and all(step["decode"] + step["prefill"] for step in event["steps"])


def test_it_needs_a_key_and_lists_a_keys_own_requests(server):
    assert httpx.get(f"{server}/debug/live").status_code == 401
    assert httpx.get(f"{server}/debug/live", headers={"x-api-key": "three"}).status_code == 401
    with running(server, "two") as request_id, looking(server, "one") as ones, looking(server, "two") as twos:
        mine = find(twos, lambda e: e["requests"])
        assert mine["requests"][0]["id"].startswith(request_id)
        theirs = find(ones, lambda e: e["running"] == 1)
        assert theirs["requests"] == [] and request_id not in json.dumps(theirs)


def test_silence_has_no_events_and_an_idle_engine_is_no_news(server):
    seen = []
    with looking(server) as events:
        seen.append(find(events, lambda e: not e["steps"] and not e["running"]))
        timer = threading.Timer(4 * live.EVERY_SECONDS, lambda: httpx.post(
            f"{server}/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers={"x-api-key": "one"}, timeout=20
        ))  # fmt: skip
        timer.start()
        seen.append(next(events))
        timer.join()
    assert seen[1]["now"] - seen[0]["now"] > 2 * live.EVERY_SECONDS
    assert seen[0]["steps"] != seen[1]["steps"]


def test_only_so_many_may_watch_and_who_leaves_makes_room(server, eventually):
    with contextlib.ExitStack() as stack:
        watching = [stack.enter_context(looking(server)) for _ in range(live.MAX_VIEWERS)]
        assert all(next(events)["blocks"] for events in watching)
        reply = httpx.get(f"{server}/debug/live", headers={"x-api-key": "one"}, timeout=20)
        assert reply.status_code == 429 and "watch the engine already" in reply.json()["error"]["message"]

    def may_look() -> bool:
        with httpx.stream("GET", f"{server}/debug/live", headers={"x-api-key": "one"}, timeout=20) as reply:
            return reply.status_code == 200

    eventually(may_look)


def test_an_engine_that_embeds_says_that_there_is_nothing_to_see(fake_engine, serving):
    fake_engine.task = "embed"
    with serving(fake_engine) as url:
        reply = httpx.get(f"{url}/debug/live")
        assert reply.status_code == 400 and "generates text" in reply.json()["error"]["message"]


def test_it_goes_with_the_page(fake_engine, serving):
    with serving(fake_engine, with_page=False) as url:
        assert httpx.get(f"{url}/debug/live").status_code == 404
        assert "/debug/live" not in httpx.get(f"{url}/openapi.json").json()["paths"]
