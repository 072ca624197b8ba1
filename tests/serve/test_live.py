"""/debug/live over HTTP: from an engine in this process and in its own, behind the keys, of each key's own requests;
and from several replicas, of which none holds up the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from types import SimpleNamespace

import httpx
import pytest

from minivllm.engine.live import Look
from minivllm.errors import EngineDead, ReplicaDead
from minivllm.serve import live

TINY = {"kv.num_blocks": 250, "kv.block_size": 8, "executor.num_threads": 1}
pytestmark = pytest.mark.timeout(120)  # a stream without news is silent for ever
# Most of the pool, and all the model's length: on the fastest machine it runs through many looks.
LONG = {"prompt": "a secret", "max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(live, "EVERY_SECONDS", 0.05)


@pytest.fixture(scope="module", params=["inproc", "process"])
def server(request, serving):
    from minivllm.engine.async_llm import AsyncLLM

    engine = AsyncLLM("dummy:tiny", overrides={**TINY, "engine.core": request.param})
    with serving(engine, names=("tiny",), api_keys=["one", "two"]) as url:
        yield url


@contextlib.contextmanager
def looking(url, key="one"):
    """The looks of a stream, as they come."""
    with httpx.stream("GET", f"{url}/debug/live", headers={"x-api-key": key}, timeout=20) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        told = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))
        yield (event["look"] for event in told if (event["replica"], event["replicas"]) == (0, 1))


@contextlib.contextmanager
def running(url, key="one", body=LONG):
    """A request that runs until the end of the block. Gives its id."""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**body, "stream": True}, headers={"x-api-key": key}, timeout=20
    ) as reply:
        lines = reply.iter_lines()  # whose end would close the connection
        yield json.loads(next(lines)[6:])["id"]


def find(events, wanted, most=200):
    for _ in range(most):
        event = next(events)
        if wanted(event):
            return event
    raise AssertionError("no event shows it")


def test_a_request_is_seen_with_its_blocks_and_its_steps(server):
    with looking(server) as events:
        first = next(events)
        assert first["blocks"] == "f250" or "c" in first["blocks"]
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


def test_silence_has_no_events_and_an_idle_engine_is_no_news(server, monkeypatch):
    monkeypatch.setattr(live, "EVERY_SECONDS", 0.25)  # a pause that no busy machine takes by itself
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
    assert seen[1]["steps"] or seen[1]["running"] or seen[1]["waiting"]  # its first step may still be under way


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


def test_it_goes_with_the_page(fake_engine, serving):
    with serving(fake_engine, with_page=False) as url:
        assert httpx.get(f"{url}/debug/live").status_code == 404
        assert "/debug/live" not in httpx.get(f"{url}/openapi.json").json()["paths"]


# ---- replicas, whose looks a test dictates


class Replicas:
    """An engine whose replica i gives looks[i], one after the other, and the last for ever: looks, errors, waits."""

    def __init__(self, *looks):
        self.looks, self.asked = [list(each) for each in looks], []
        self.config = SimpleNamespace(engine=SimpleNamespace(replicas=len(looks)))

    async def look(self, after, replica):
        self.asked.append((replica, after))
        what = self.looks[replica][0]
        if len(self.looks[replica]) > 1:
            del self.looks[replica][0]
        if isinstance(what, Exception):
            raise what
        return what if isinstance(what, Look) else await what.wait()


def look_of(running, number=0):
    return Look(1.0, number, 64, 8, 16, running, 0, "f8", [], [])


async def collected(engine, most, **asked):
    """(replica, how many run there; None: it does not run) of the first events, and who else is left watching."""
    viewers, found = set(), []
    async with contextlib.aclosing(live.events(engine, viewers, "", **asked)) as stream:
        async for event in stream:
            told = json.loads(event[6:])
            found.append((told["replica"], told["look"] and told["look"]["running"]))
            if len(found) == most:
                break
    await asyncio.sleep(0)
    assert not viewers and len(asyncio.all_tasks()) == 1, "somebody looks on"
    return found


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    if "server" not in request.fixturenames:
        monkeypatch.setattr(live, "EVERY_SECONDS", 0.001)


def test_each_replica_tells_its_own_news_and_one_that_hangs_holds_up_no_other():
    engine = Replicas([asyncio.Event()], [look_of(1), look_of(1), look_of(2)])
    assert asyncio.run(collected(engine, 2, replicas=range(2))) == [(1, 1), (1, 2)]


def test_a_replica_that_has_died_is_told_of_once_and_seen_again_from_its_first_step():
    dead = ReplicaDead("gone")
    engine = Replicas([look_of(1, 7), dead, dead, look_of(3)])
    assert asyncio.run(collected(engine, 3)) == [(0, 1), (0, None), (0, 3)]
    assert [after for _, after in engine.asked[:4]] == [0, 7, 0, 0]


def test_the_end_of_the_engine_ends_the_stream():
    with pytest.raises(EngineDead):
        asyncio.run(collected(Replicas([look_of(1), EngineDead("all gone")], [asyncio.Event()]), 5, replicas=range(2)))


def test_one_replica_alone_can_be_asked_for_and_the_server_says_which_it_is(fake_engine, serving):
    fake_engine.config = SimpleNamespace(engine=SimpleNamespace(replicas=3), model=SimpleNamespace(path="fake"))
    fake_engine.look = Replicas(*[[look_of(i)] for i in range(3)]).look
    with serving(fake_engine, place=live.Place(1, 4)) as url:
        for query, wanted in (("?replica=2", {2}), ("", {0, 1, 2})):
            with httpx.stream("GET", f"{url}/debug/live{query}", timeout=20) as reply:
                lines = (line for line in reply.iter_lines() if line.startswith("data: "))
                told = [json.loads(next(lines)[6:]) for _ in wanted]
            assert {event["replica"] for event in told} == {event["look"]["running"] for event in told} == wanted
            assert {(event["server"], event["servers"], event["replicas"]) for event in told} == {(1, 4, 3)}
        assert httpx.get(f"{url}/debug/live?replica=3").status_code == 400
