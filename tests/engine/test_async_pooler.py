"""Rule: requests that come together run together, and none outlives who asked for it."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from pooling.tiny import TEXTS, write_bert

from minivllm.engine.async_pooler import AsyncPooler
from minivllm.errors import EngineDead, MinivllmError

NUM = 20


@pytest.fixture
def pooler(tmp_path):
    write_bert(tmp_path)
    pooler = AsyncPooler(str(tmp_path), overrides={"executor.num_threads": 1})
    yield pooler
    pooler.close()


@pytest.fixture
def gated(pooler):
    """(pooler, gate, batch sizes): no forward runs while the gate is closed."""
    gate, started, sizes, run = threading.Event(), threading.Event(), [], pooler.engine.core.model.run

    def wait(texts):
        sizes.append(len(texts))
        started.set()
        assert gate.wait(20)
        return run(texts)

    pooler.engine.core.model.run = wait
    yield pooler, gate, started, sizes
    gate.set()


def texts(pooler, n=NUM):
    return [pooler.engine.text(TEXTS[i % len(TEXTS)]) for i in range(n)]


def test_twenty_requests_at_once_run_in_two_steps(gated):
    pooler, gate, started, sizes = gated

    async def main():
        calls = [asyncio.create_task(pooler.pool([text])) for text in texts(pooler)]
        while not (started.is_set() and pooler._commands.qsize() + sum(sizes) == NUM):
            await asyncio.sleep(0.005)
        gate.set()
        return [vectors[0] for vectors in await asyncio.gather(*calls)]

    together = asyncio.run(main())
    assert sum(sizes) == NUM and len(sizes) <= 2
    alone = [asyncio.run(pooler.pool([text]))[0] for text in texts(pooler)]
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)


def test_a_call_that_is_cancelled_takes_back_what_waits(gated):
    pooler, gate, started, sizes = gated

    async def main():
        first = asyncio.create_task(pooler.pool(texts(pooler, 1)))
        while not started.is_set():
            await asyncio.sleep(0.005)
        second = asyncio.create_task(pooler.pool(texts(pooler, 5)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert second.cancelled()
        gate.set()
        await first
        await pooler.pool(texts(pooler, 1))

    asyncio.run(main())
    assert sizes == [1, 1] and pooler._waiting == {}


def test_a_text_that_fails_is_an_error_of_its_call_alone(pooler):
    run = pooler.engine.core.model.run

    def fail_alone(found):
        if any(len(text.token_ids) == 3 for text in found):
            raise RuntimeError("three")
        return run(found)

    pooler.engine.core.model.run = fail_alone
    good, bad = pooler.engine.text("the sea"), pooler.engine.text("a")
    assert len(bad.token_ids) == 3

    async def main():
        return await asyncio.gather(pooler.pool([good]), pooler.pool([good, bad]), return_exceptions=True)

    first, second = asyncio.run(main())
    assert len(first) == 1 and isinstance(second, MinivllmError) and "three" in str(second)


def test_watchers_see_what_goes_in_and_what_each_step_did(pooler):
    class Watcher:
        def __init__(self):
            self.added, self.reports, self.aborted = [], [], []

        def on_add(self, request):
            self.added.append(request.id)

        def on_abort(self, req_ids):
            self.aborted += req_ids

        def on_report(self, report):
            self.reports.append((report.joined, report.total_tokens))

    watcher = Watcher()
    pooler.watchers.append(watcher)
    asyncio.run(pooler.pool(texts(pooler, 3)))
    assert [req_id for joined, _ in watcher.reports for req_id in joined] == watcher.added
    assert sum(tokens for _, tokens in watcher.reports) == sum(len(text.token_ids) for text in texts(pooler, 3))
    assert watcher.aborted == []


def test_an_engine_that_is_closed_says_so(pooler):
    pooler.close()
    assert not pooler.is_running
    with pytest.raises(EngineDead):
        asyncio.run(pooler.pool(texts(pooler, 1)))


def test_calls_that_are_open_when_it_closes_end(gated):
    pooler, gate, started, _ = gated

    async def main():
        running = asyncio.create_task(pooler.pool(texts(pooler, 1)))
        while not started.is_set():
            await asyncio.sleep(0.005)
        waiting = [asyncio.create_task(pooler.pool(texts(pooler, 1))) for _ in range(2)]
        await asyncio.sleep(0)
        pooler._commands.put(None)
        gate.set()
        return await asyncio.gather(running, *waiting, return_exceptions=True)

    done, *ended = asyncio.run(main())
    assert len(done) == 1 and [type(result) for result in ended] == [EngineDead, EngineDead]
