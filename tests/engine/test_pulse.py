"""A core that is stopped, spins or holds Python's lock: /health says so, requests get an error, another replaces it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import forked
import httpx
import pytest

from minivllm import AsyncLLM, SamplingParams, child
from minivllm.engine.metrics import Metrics
from minivllm.engine.pulse import Listener, Pulse
from minivllm.errors import EngineDead
from minivllm.serve.app import create_app

APART = {
    **{"kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1},
    **{"engine.core": "process", "engine.step_timeout": 1.0},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def listener(tmp_path, clock):
    return Listener(tmp_path, 10.0, clock=lambda: clock[0])


def look(listener, clock, seconds, times=1):
    for _ in range(times):
        clock[0] += seconds
        listener.look()
    return listener.is_lost


def test_a_pulse_that_stands_still_is_lost_before_the_timeout(listener, clock, tmp_path):
    pulse = Pulse(tmp_path)
    pulse.beat()
    assert not look(listener, clock, 0.2)
    assert look(listener, clock, 0.2, times=40)
    assert listener.silence < 10


def test_each_beat_ends_a_silence(listener, clock, tmp_path):
    pulse = Pulse(tmp_path)
    for _ in range(5):
        pulse.beat()
        assert not look(listener, clock, 0.2, times=25)


def test_the_first_core_that_is_being_built_has_no_pulse_to_lose(listener, clock, tmp_path):
    assert not look(listener, clock, 0.2, times=1000)


def test_a_later_one_is_given_the_time_of_three_and_of_a_step(clock, tmp_path):
    listener = Listener(tmp_path, 10.0, built_in=4.0, clock=lambda: clock[0])
    assert not look(listener, clock, 0.2, times=105)
    assert look(listener, clock, 0.2, times=10) and "has not been built" in f"has {listener.what}"


def test_one_that_has_been_built_late_is_no_silent_one(clock, tmp_path):
    listener = Listener(tmp_path, 10.0, built_in=4.0, clock=lambda: clock[0])
    look(listener, clock, 0.2, times=105)
    Pulse(tmp_path).beat()
    assert not look(listener, clock, 0.2, times=20)


def test_the_pulse_of_a_process_before_is_nobodys(listener, clock, tmp_path):
    Pulse(tmp_path).beat()
    assert not look(Listener(tmp_path, 10.0, clock=lambda: clock[0]), clock, 0.2, times=1000)


def test_a_machine_that_slept_loses_no_core(listener, clock, tmp_path):
    Pulse(tmp_path).beat()
    look(listener, clock, 0.2)
    assert not look(listener, clock, 3600.0)
    assert not look(listener, clock, 0.2, times=10)


def test_without_a_limit_no_silence_is_too_long(clock, tmp_path):
    listener = Listener(tmp_path, 0.0, built_in=1.0, clock=lambda: clock[0])
    Pulse(tmp_path).beat()
    assert not look(listener, clock, 100.0, times=1000)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    with open(tmp_path_factory.mktemp("cores") / "log", "w+") as file:
        yield file


@pytest.fixture(scope="module")
def engine(log):
    with pytest.MonkeyPatch.context() as monkeypatch:

        def start(module, *args):
            assert module == "minivllm.engine.process"
            env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}
            return forked.Process(
                ["-m", "hanging_core", *args], env=env, blocked=list(child.INTERRUPT), stderr=log.fileno()
            )

        monkeypatch.setattr(child, "start", start)
        engine = AsyncLLM("dummy:tiny", overrides=APART)
        yield engine
        engine.close()


def hangs_when_built(engine):
    """The second one is never ready; the third is."""
    (engine._link.folder / "hang").touch()
    os.kill(engine._link.pid, signal.SIGKILL)


def stop(engine):
    os.kill(engine._link.pid, signal.SIGSTOP)


@pytest.mark.skipif(sys.platform != "linux", reason="cores are forked for it")
@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("hold", "no sign of life"),
        ("spin", "has run for"),
        (stop, "no sign of life"),
        (hangs_when_built, "by signal 9"),
    ],
)
def test_a_core_that_hangs_is_replaced_and_its_requests_get_an_error(engine, log, does, words):
    app = create_app(engine, Metrics("tiny"), ["tiny"])

    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as http:

            async def until(*wanted):
                while (reply := await http.get("/health")).json()["status"] not in wanted:
                    await asyncio.sleep(0.01)
                return reply.status_code

            pid = engine._link.pid
            call = asyncio.create_task(engine._call(does)) if isinstance(does, str) else stop(engine)
            await asyncio.sleep(0)  # sent; or stopped: a core that is killed answers nothing before
            running = asyncio.create_task(drain(engine))
            await asyncio.sleep(0)
            if not isinstance(does, str):
                does(engine)
            assert await until("stalled", "dead") == 503
            with pytest.raises(EngineDead, match=words):
                await running
            with contextlib.suppress(EngineDead):
                await (call or asyncio.sleep(0))
            assert await until("ok") == 200
            assert engine._link.pid != pid
            where = does if isinstance(does, str) else does.__name__
            assert does is stop or f" in {where}\n" in Path(log.name).read_text(), "where it hung"
            assert await drain(engine) == 12

    asyncio.run(asyncio.wait_for(main(), 100))


async def drain(engine):
    outputs = [output async for output in engine.generate([1, 2, 3], GREEDY, "a")]
    return len(outputs[-1].outputs[0].token_ids)
