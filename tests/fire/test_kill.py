"""kill -9 of the engine core under load: everybody is told at once, nobody waits, and the server serves again."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx
import psutil
from eventually import PATIENCE, eventually
from fire.wire import LONG, Answer, ask, served

BEFORE, WHILE = 64, 20  # clients whose request was there already, and that come while there is no core
GREEDY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


async def answer_to(port: int, body: dict) -> Answer:
    return await asyncio.wait_for(ask(port, body), PATIENCE)


def stopped_core(server) -> psutil.Process:
    """The next one as soon as there is a process, which gets no further."""
    found = []

    def is_there() -> bool:
        with suppress(ValueError, psutil.NoSuchProcess):
            found.append(server.core())
        return bool(found)

    eventually(is_there)
    found[0].suspend()
    return found[0]


async def kill_under_load(server) -> None:
    early = [asyncio.create_task(answer_to(server.port, LONG | {"stream": i % 2 == 0})) for i in range(BEFORE)]
    await asyncio.to_thread(eventually, lambda: server.metric("num_requests_waiting") >= 40)
    doomed = server.core()
    doomed.kill()
    await asyncio.to_thread(doomed.wait)
    coming = await asyncio.to_thread(stopped_core, server)  # whoever waited for it would wait for ever
    try:
        for task in early:
            answer = await task
            assert answer.whole and answer.error is not None, answer
            assert answer.status in (200, 429, 503)  # a stream that had begun, no place, the rest
            assert answer.status == 429 or answer.error["code"] == "engine_dead"
        for answer in await asyncio.gather(*(answer_to(server.port, GREEDY) for _ in range(WHILE))):
            assert answer.whole and answer.status == 503, answer
    finally:
        coming.resume()


def test_everybody_is_told_before_there_is_another_core_and_the_server_serves_again():
    options = ["--set", "engine.core=process", "--max-num-seqs", "8", "--max-waiting", "40", "--debug-endpoints"]
    with served(*options) as server:
        right = server.post(**GREEDY).json()["choices"]
        before = server.state()
        for _ in range(2):
            core = server.core().pid
            asyncio.run(kill_under_load(server))
            eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200)
            assert server.core().pid != core
            reply = server.post(**GREEDY)  # the queue of the dead core is nobody's: no 429
            assert (reply.status_code, reply.json()["choices"]) == (200, right)
        eventually(lambda: server.state() == before)
