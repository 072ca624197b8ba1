"""kill -9 of the engine core under load: everybody is told at once, nobody waits, and the server serves again."""

from __future__ import annotations

import asyncio
import time

import httpx
from fire.wire import LONG, Answer, ask, eventually, served

WITHIN = 2.0  # seconds
BEFORE, WHILE = 64, 40  # clients whose request was there already, and that come in the next two seconds
GREEDY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


async def timed(port: int, body: dict) -> tuple[Answer, float]:
    """The answer, and when it had come."""
    answer = await ask(port, body)
    return answer, time.monotonic()


async def kill_under_load(server) -> None:
    early = [asyncio.create_task(timed(server.port, LONG | {"stream": i % 2 == 0})) for i in range(BEFORE)]
    while await asyncio.to_thread(server.metric, "num_requests_waiting") < 40:
        await asyncio.sleep(0.05)
    killed = time.monotonic()
    server.core().kill()
    late = []
    for _ in range(WHILE):
        late.append((asyncio.create_task(timed(server.port, GREEDY)), time.monotonic()))
        await asyncio.sleep(WITHIN / WHILE)
    for task in early:
        answer, when = await asyncio.wait_for(task, 10)
        assert when - killed < WITHIN, f"told after {when - killed:.1f} s"
        assert answer.whole and answer.error is not None, answer
        assert answer.status in (200, 429, 503)  # a stream that had begun, no place, the rest
        assert answer.status == 429 or answer.error["code"] == "engine_dead"
    for task, since in late:
        answer, when = await asyncio.wait_for(task, 10)
        assert when - since < WITHIN and answer.whole
        assert answer.status in (429, 503) or answer.error is None, answer  # the new core may be there already


def test_everybody_is_told_within_two_seconds_and_the_server_serves_again():
    options = ["--set", "engine.core=process", "--max-num-seqs", "8", "--max-waiting", "40", "--debug-endpoints"]
    with served(*options) as server:
        right = server.post(**GREEDY).json()["choices"]
        before = server.state()
        for _ in range(2):
            core = server.core().pid
            asyncio.run(kill_under_load(server))
            eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200, 60)
            assert server.core().pid != core
            reply = server.post(**GREEDY)  # the queue of the dead core is nobody's: no 429
            assert (reply.status_code, reply.json()["choices"]) == (200, right)
        eventually(lambda: server.state() == before)
