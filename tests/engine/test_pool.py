"""Rule: texts that come together run together, and none outlives who asked for it."""

from __future__ import annotations

import asyncio
import itertools
import threading

import numpy as np
import pytest
from eventually import PATIENCE
from pooling.tiny import TEXTS, write_bert
from steps import before_each_step

from minivllm.engine.async_llm import AsyncLLM
from minivllm.errors import BadRequest, EngineDead, MinivllmError, OutOfMemory
from minivllm.request import PoolingParams

NUM = 20
IDS = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    write_bert(folder)
    return str(folder)


@pytest.fixture(params=[1, 2], ids="overlap={}".format)
def engine(folder, request):
    options = {"executor.num_threads": 1, "engine.step_timeout": 0.05, "debug.check": True}
    engine = AsyncLLM(folder, overrides={**options, "engine.overlap": request.param})
    yield engine
    engine.close()


@pytest.fixture
def inproc(folder):
    """Whose worker can be got at."""
    engine = AsyncLLM(folder, overrides={"executor.num_threads": 1, "engine.step_timeout": 0.05})
    yield engine
    engine.close()


@pytest.fixture
def gated(inproc):
    """(engine, gate, started, batch sizes): no forward runs while the gate is closed."""
    gate, started, sizes = threading.Event(), threading.Event(), []

    def wait(plan):
        sizes.append(len(plan.num_tokens))
        started.set()
        assert gate.wait(PATIENCE)

    with before_each_step(inproc, wait):
        yield inproc, gate, started, sizes
        gate.set()


def texts(engine, n=NUM):
    return [engine.texts.text(TEXTS[i % len(TEXTS)]) for i in range(n)]


def pool(engine, found, **options):
    return engine.pool(found, f"pool-{next(IDS)}", **options)


def test_requests_at_once_give_what_each_gives_alone(engine):
    async def main():
        return [(await call)[0] for call in [pool(engine, [text]) for text in texts(engine)]]

    async def together():
        return [found[0] for found in await asyncio.gather(*(pool(engine, [text]) for text in texts(engine)))]

    np.testing.assert_allclose(asyncio.run(together()), asyncio.run(main()), rtol=0, atol=1e-6)


def test_twenty_requests_at_once_run_in_two_steps(gated):
    engine, gate, started, sizes = gated

    async def main():
        calls = [asyncio.create_task(pool(engine, [text])) for text in texts(engine)]
        while not (started.is_set() and engine._link._inbox.qsize() + sum(sizes) == NUM):
            await asyncio.sleep(0.005)
        gate.set()
        await asyncio.gather(*calls)

    asyncio.run(main())
    assert sum(sizes) == NUM and len(sizes) <= 2


def test_a_forward_that_hangs_is_told_of_until_it_ends(gated):
    engine, gate, _, _ = gated

    async def main():
        call = asyncio.create_task(pool(engine, texts(engine, 1)))
        while not engine.stalled:
            await asyncio.sleep(0.005)
        gate.set()
        await call
        while engine.stalled:
            await asyncio.sleep(0.005)
        assert engine.stats.num_stalled == 1

    asyncio.run(main())


def test_a_call_that_is_cancelled_takes_back_what_waits(gated):
    engine, gate, started, sizes = gated

    async def main():
        first = asyncio.create_task(pool(engine, texts(engine, 1)))
        while not started.is_set():
            await asyncio.sleep(0.005)
        second = asyncio.create_task(pool(engine, texts(engine, 5)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert second.cancelled()
        gate.set()
        await first
        await pool(engine, texts(engine, 1))

    asyncio.run(main())
    assert sizes == [1, 1] and engine.num_requests == 0 and not engine._streams


def test_a_text_that_fails_is_an_error_of_its_call_alone(inproc):
    good, bad = inproc.texts.text("the sea"), inproc.texts.text("a")
    assert len(bad.token_ids) == 3

    def fail(plan):
        if 3 in plan.num_tokens.values():
            raise RuntimeError("three")

    async def main():
        calls = pool(inproc, [good]), pool(inproc, [good, bad, good])
        return await asyncio.gather(*calls, return_exceptions=True)

    with before_each_step(inproc, fail):
        first, second = asyncio.run(main())
    assert len(first) == 1 and isinstance(second, MinivllmError) and "three" in str(second)
    assert inproc.num_requests == 0


def test_watchers_see_what_goes_in_and_what_each_step_did(engine):
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
    engine.watchers.append(watcher)
    asyncio.run(pool(engine, texts(engine, 3)))
    assert [req_id for joined, _ in watcher.reports for req_id in joined] == watcher.added
    assert sum(tokens for _, tokens in watcher.reports) == sum(len(text.token_ids) for text in texts(engine, 3))
    assert watcher.aborted == []


def test_dimensions_of_one_request_are_not_those_of_another(engine):
    async def main():
        return await asyncio.gather(
            *(pool(engine, texts(engine, 3), asked=PoolingParams(dimensions=d)) for d in (None, 5, 48))
        )

    whole, short, all_of_them = (np.array(found) for found in asyncio.run(main()))
    np.testing.assert_allclose(short, whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1)[:, None], atol=1e-6)
    np.testing.assert_allclose(all_of_them, whole, atol=1e-6)


def test_an_engine_that_is_closed_says_so(engine):
    engine.close()
    assert not engine.is_running
    with pytest.raises(EngineDead):
        asyncio.run(pool(engine, texts(engine, 1)))


def test_calls_that_are_open_when_it_closes_end(gated):
    engine, gate, started, _ = gated

    async def main():
        running = asyncio.create_task(pool(engine, texts(engine, 1)))
        while not started.is_set():
            await asyncio.sleep(0.005)
        waiting = [asyncio.create_task(pool(engine, texts(engine, 1))) for _ in range(2)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.shutdown())
        await asyncio.sleep(0)
        gate.set()
        await closing
        return await asyncio.gather(running, *waiting, return_exceptions=True)

    done, *ended = asyncio.run(main())
    assert len(done) == 1 and [type(result) for result in ended] == [EngineDead, EngineDead]


def test_a_text_without_memory_is_told_from_other_failures(inproc):
    def short_of_memory(plan):
        raise MemoryError

    with before_each_step(inproc, short_of_memory), pytest.raises(OutOfMemory):
        asyncio.run(pool(inproc, texts(inproc, 2)))


def test_a_model_that_embeds_streams_no_text(engine):
    from minivllm.request import SamplingParams

    async def main():
        async for _ in engine.generate("x", SamplingParams(), "stream"):
            pass

    with pytest.raises(BadRequest, match="generates nothing"):
        asyncio.run(main())
