"""Threads for clients' work: nobody has them all, and who has had least is next. Work waits until it is let go."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from eventually import PATIENCE, eventually

from minivllm import wanted
from minivllm.serve import off_loop
from minivllm.serve.fair_threads import FairThreads


class Held:
    """Work that says when it has begun, and waits."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.may_end.wait(20)


def in_turn(threads, jobs):
    """The names of jobs (client, size, name), in the order in which one thread does them; the other one is held."""
    held, gate, done = Held(), Held(), []
    futures = [threads.submit("holder", 0, held), threads.submit("gate", 0, gate)]
    assert held.begun.wait(20) and gate.begun.wait(20)
    futures += [threads.submit(client, size, lambda name=name: done.append(name)) for client, size, name in jobs]
    gate.may_end.set()
    for future in futures[1:]:
        future.result(20)
    held.may_end.set()
    futures[0].result(20)
    return done


def test_a_client_leaves_a_thread_to_others_however_much_it_sends():
    threads, first = FairThreads(2, "test"), Held()
    flood = [threads.submit("a", 1, first), *(threads.submit("a", 1, lambda: "later") for _ in range(100))]
    assert first.begun.wait(20)
    assert threads.submit("b", 1, lambda: "at once").result(20) == "at once"
    assert not any(future.done() for future in flood), "though a thread was free, none of a's has begun"
    first.may_end.set()
    assert [future.result(20) for future in flood[1:]] == ["later"] * 100


def test_who_has_had_least_is_next_by_size():
    jobs = [("a", 100, f"a{i}") for i in range(4)] + [("b", 10, f"b{i}") for i in range(12)]
    assert in_turn(FairThreads(2, "test"), jobs)[:12] == ["b0", "a0", *(f"b{i}" for i in range(1, 11))]


def test_who_comes_anew_is_level_with_who_has_had_least_and_first():
    done, threads, held, gate = [], FairThreads(2, "test"), Held(), Held()

    def comes():
        done.append("a1")
        threads.submit("c", 100, lambda: done.append("c0"))

    futures = [threads.submit("holder", 0, held), threads.submit("a", 100, gate)]
    assert gate.begun.wait(20)
    futures += [threads.submit("a", 100, comes)]
    futures += [threads.submit("b", 100, lambda i=i: done.append(f"b{i}")) for i in range(3)]
    gate.may_end.set()
    for future in futures[1:]:
        future.result(20)
    held.may_end.set()
    futures[0].result(20)
    assert done == ["b0", "b1", "a1", "c0", "b2"]


def test_what_nobody_waits_for_any_more_is_not_done_and_errors_are_told():
    threads, held = FairThreads(2, "test"), Held()
    threads.submit("a", 1, held)
    done = []
    left, stays = threads.submit("a", 1, lambda: done.append("left")), threads.submit("a", 1, lambda: 1 / 0)
    assert left.cancel()
    held.may_end.set()
    with pytest.raises(ZeroDivisionError):
        stays.result(20)
    assert not done
    threads.submit("b", 1, lambda: None).result(20)
    assert threads._lines.keys() <= {"b"}, "who has no work is forgotten"


def test_a_longer_body_of_one_key_is_read_beside_anothers_flood_of_them(fake_engine, serving, eventually, monkeypatch):
    """a's first body is being worked out, and so would be all others: b's is not behind them."""
    monkeypatch.setattr(off_loop, "_threads", FairThreads(2, "test"))
    held, encode, gated = Held(), fake_engine.tokenizer.encode, "x" * 20_000
    fake_engine.max_model_len = 100_000

    def slow(text, add_special_tokens=True):
        if text == gated:
            held()
        return encode(text)

    fake_engine.tokenizer.encode = slow
    body = {"max_tokens": 1, "prompt": gated}
    with serving(fake_engine, api_keys=["a", "b"]) as url, ThreadPoolExecutor(8) as pool:

        def ask(key, prompt):
            return httpx.post(
                f"{url}/v1/completions", json=body | {"prompt": prompt}, headers={"x-api-key": key}, timeout=20
            )

        flood = [pool.submit(ask, "a", gated) for _ in range(5)]
        assert held.begun.wait(20)
        assert ask("b", "y" * 20_000).status_code == 200
        assert not any(reply.done() for reply in flood)
        held.may_end.set()
        assert [reply.result().status_code for reply in flood] == [200] * 5


NEVER_ENDS = """
import atexit, threading
from minivllm.serve import off_loop
begun = threading.Event()
off_loop._threads.submit("a", 1, lambda: (begun.set(), threading.Event().wait()))
begun.wait()
atexit.register(off_loop.leave, 7)
"""


def test_a_process_ends_though_a_thread_is_at_work():
    done = subprocess.run([sys.executable, "-c", NEVER_ENDS], timeout=PATIENCE)
    assert done.returncode == 7


def test_work_whose_owner_was_cancelled_is_unwanted_from_then_on():
    begun, found = threading.Event(), []

    def work():
        begun.set()
        eventually(lambda: not wanted.is_wanted())
        found.append("unwanted")

    async def left():
        task = asyncio.create_task(off_loop.by_size(off_loop.SHORT + 1, work, "a"))
        await asyncio.to_thread(begun.wait, PATIENCE)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(left())
    eventually(lambda: found)
