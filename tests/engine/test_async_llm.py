import asyncio

import pytest
from eventually import eventually
from steps import before_each_step, slow_down

from minivllm import AsyncLLM, SamplingParams
from minivllm.errors import BadRequest, EngineDead, NeverFits

SMALL = {"kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1, "model.dtype": "float32"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def engine():
    engine = AsyncLLM("dummy:tiny", overrides=SMALL)
    yield engine
    engine.close()


async def settled(engine):
    await asyncio.to_thread(eventually, lambda: engine._core.is_settled and not engine._core.has_work)


async def at_work(engine):
    """Once it has begun what it was asked."""
    await asyncio.to_thread(eventually, lambda: engine.stats.generation_tokens)


async def collect(engine, request_id, params=GREEDY, prompt=(1, 2, 3), **kwargs):
    return [output async for output in engine.generate(list(prompt), params, request_id, **kwargs)]


def test_deltas_concatenate_to_the_final_text(engine):
    async def run():
        return await asyncio.gather(
            *(collect(engine, kind, output_kind=kind) for kind in ("delta", "cumulative", "final"))
        )

    delta, cumulative, final = asyncio.run(run())
    assert len(final) == 1 and final[0].finished
    assert "".join(o.outputs[0].text for o in delta) == cumulative[-1].outputs[0].text == final[0].outputs[0].text
    assert sum((o.outputs[0].token_ids for o in delta), []) == final[0].outputs[0].token_ids
    assert len(delta) > 3


def test_all_sequences_of_a_prompt_cross_in_one_command(engine, monkeypatch):
    sent, send = [], engine._link.send
    monkeypatch.setattr(engine._link, "send", lambda command: (sent.append(command), send(command)))
    params = SamplingParams(n=5, max_tokens=2, seed=1, allowed_token_ids=[3, 4, 5] * 1000)
    (output,) = asyncio.run(collect(engine, "r", params, output_kind="final"))
    assert len(output.outputs) == 5 and {t for out in output.outputs for t in out.token_ids} <= {3, 4, 5}
    (command,) = sent
    assert len(command.siblings) == 4 and command.request.params.allowed_token_ids == (3, 4, 5)


def test_leaving_the_iterator_aborts_the_request(engine):
    async def run():
        stream = engine.generate([1, 2], GREEDY.replace(max_tokens=300), "a")
        async for _ in stream:
            break
        await stream.aclose()
        await settled(engine)
        return engine.stats.num_free_blocks

    assert asyncio.run(run()) == 60


@pytest.mark.parametrize("core", ["inproc", "process"])
def test_an_id_that_is_used_again_at_once_gets_no_token_of_the_one_before(core):
    """A step of the one that was left may still run, or what it gave be on its way to the front end."""

    async def read(engine, request_id, prompt, num_read):
        tokens = []
        stream = engine.generate(prompt, GREEDY, request_id, output_kind="delta")
        async for output in stream:
            tokens += output.outputs[0].token_ids
            if len(tokens) >= num_read:
                break
        await stream.aclose()
        return tokens

    async def again_and_again(engine, request_id):
        found = []
        for _ in range(8):
            await read(engine, request_id, [1, 2, 3], 4)
            found.append(await read(engine, request_id, [50, 60], 12))
        return found

    async def run(engine):
        alone = await read(engine, "alone", [50, 60], 12)
        return alone, await asyncio.gather(*(again_and_again(engine, str(i)) for i in range(6)))

    engine = AsyncLLM("dummy:tiny", overrides={**SMALL, "engine.core": core})
    alone, found = asyncio.run(run(engine))
    engine.close()
    assert all(tokens == alone for each in found for tokens in each)


def test_cancelling_a_task_aborts_its_request(engine):
    async def run():
        tasks = [asyncio.create_task(collect(engine, str(i), GREEDY.replace(max_tokens=300))) for i in range(5)]
        await at_work(engine)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settled(engine)
        assert not len(engine._front.processor)
        return engine.stats.num_free_blocks

    assert asyncio.run(run()) == 60


def test_abort_ends_the_stream_with_its_reason(engine):
    async def run():
        task = asyncio.create_task(collect(engine, "a", GREEDY.replace(max_tokens=400)))
        await at_work(engine)
        await engine.abort("a")
        await engine.abort("nobody")
        return (await task)[-1]

    with before_each_step(engine, slow_down):
        output = asyncio.run(run())
    assert output.finished and output.outputs[0].finish_reason == "abort"


def test_bad_requests_raise_before_the_first_item(engine):
    async def run():
        with pytest.raises(NeverFits):
            await collect(engine, "long", prompt=[1] * 9999)
        with pytest.raises(BadRequest):
            await collect(engine, "empty", prompt=[])
        first = asyncio.create_task(collect(engine, "same"))
        await asyncio.sleep(0)
        with pytest.raises(BadRequest, match="in use"):
            await collect(engine, "same")
        return await first

    assert asyncio.run(run())[-1].finished


def test_a_stop_string_ends_the_text_and_frees_the_request(engine):
    async def run():
        text = (await collect(engine, "whole", GREEDY.replace(max_tokens=40)))[-1].outputs[0].text
        stop = text[len(text) // 2 :][:3]
        output = (await collect(engine, "cut", GREEDY.replace(max_tokens=400, stop=(stop,))))[-1].outputs[0]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.text == text[: text.index(stop)]
        await settled(engine)

    asyncio.run(run())


def test_shutdown_tells_open_streams_and_later_calls(engine):
    async def run():
        task = asyncio.create_task(collect(engine, "a", GREEDY.replace(max_tokens=400)))
        await at_work(engine)
        await engine.shutdown()
        with pytest.raises(EngineDead):
            await task
        with pytest.raises(EngineDead):
            await collect(engine, "b")

    with before_each_step(engine, slow_down):
        asyncio.run(run())
    assert not engine.is_running


def test_a_dead_step_loop_is_told_to_everyone(engine):
    async def run():
        engine._core.scheduler.schedule = lambda now: 1 / 0
        with pytest.raises(EngineDead, match="ZeroDivisionError"):
            await collect(engine, "a")

    asyncio.run(run())
    assert not engine.is_running
