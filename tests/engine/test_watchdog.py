"""A step that hangs is told of once, with what it does, before it ends; then all is well again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import httpx
import pytest
from eventually import PATIENCE
from eventually import eventually as wait_for
from fakes import FakeEngine

from minivllm import LLM, AsyncLLM, SamplingParams
from minivllm.engine.messages import Call, Close, Report, Resumed, Returned, Stalled
from minivllm.engine.step_loop import StepLoop
from minivllm.engine.watchdog import Watchdog
from minivllm.plan import StepPlan, StepStats

TINY = {"kv.num_blocks": 60, "kv.block_size": 8, "executor.num_threads": 1}


@pytest.fixture
def told():
    return []


@pytest.fixture
def dogs():
    made = []

    def make(timeout, told, plans=()):
        plans = list(plans)
        made.append(Watchdog(timeout, lambda: plans.pop(0) if plans else None, lambda *what: told.append(what)))
        return made[-1]

    yield make
    for dog in made:
        dog.close()


def test_a_step_is_told_of_once_and_the_next_one_again(dogs, told, caplog):
    plan = StepPlan(7, {"a": 3, "b": 90}, {"a": 5, "b": 0}, stats=StepStats(num_waiting=2, num_free_blocks=11))
    dog = dogs(0.05, told, [None, plan, None, plan])
    for i in range(2):
        begin = time.monotonic()
        dog.begin()
        wait_for(lambda i=i: len(told) > i)
        time.sleep(0.1)  # for it to be told of again
        dog.end()
        assert 0.05 <= told[-1][0] < time.monotonic() - begin
    assert len(told) == 2
    what = told[0][1]
    for part in ("step 7", "2 requests", "93 tokens", "b: 90 after 0; a: 3 after 5", "2 waiting", "11 blocks free"):
        assert part in what
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 2 and what in errors[0].getMessage()
    assert errors[0].fields["tokens"] == 93 and errors[0].fields["largest"] == {"b": 90, "a": 3}
    assert sum("has ended after" in r.getMessage() for r in caplog.records) == 2


def test_a_step_without_a_plan_is_said_to_be_planned(dogs, told):
    dog = dogs(0.02, told)
    dog.begin()
    wait_for(lambda: told)
    assert "planned" in told[0][1]


def test_with_no_limit_nobody_watches(dogs, told):
    dog = dogs(0.0, told)
    dog.begin()
    assert not dog._thread.is_alive()


def test_the_step_loop_says_that_a_step_hangs_before_it_says_what_it_gave():
    engine, messages, hang = FakeEngine(), [], threading.Event()
    engine.add("a", [1, 2, 3], max_tokens=3)
    execute, hung = engine.worker.execute, []

    def slow(plan):
        if not hung:
            hung.append(plan.step)
            hang.wait(PATIENCE)
        return execute(plan)

    engine.worker.execute = slow
    commands = iter([None, None, None, None, None, Close()])
    loop = StepLoop(engine.core, {}, lambda block: next(commands), messages.append, step_timeout=0.05)
    thread = threading.Thread(target=loop.run)
    thread.start()
    wait_for(lambda: messages)
    (stalled,) = messages
    assert isinstance(stalled, Stalled) and "a: 3 after 0" in stalled.plan
    hang.set()
    thread.join(PATIENCE)
    assert [type(m) for m in messages[:4]] == [Stalled, Resumed, Report, Report]
    assert sum(isinstance(m, Stalled) for m in messages) == 1 == engine.core.stats.num_stalled
    assert not loop._watchdog._thread.is_alive() or loop._watchdog._closing.is_set()


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_hangs_is_told_of_by_its_name_until_it_ends(fails):
    engine, messages, hang = FakeEngine(), [], threading.Event()

    def slow():
        hang.wait(PATIENCE)
        assert not fails

    commands = iter([Call(1, "load_lora", []), Close()])
    loop = StepLoop(engine.core, {"load_lora": slow}, lambda block: next(commands), messages.append, step_timeout=0.05)
    thread = threading.Thread(target=loop.run)
    thread.start()
    wait_for(lambda: messages)
    assert isinstance(messages[0], Stalled) and messages[0].plan == "load_lora"
    hang.set()
    thread.join(PATIENCE)
    assert [type(message) for message in messages[1:3]] == [Resumed, Returned]


class Body:
    def __init__(self):
        self.beats, self.why = 0, []

    def beat(self):
        self.beats += 1

    def give_up(self, why):
        self.why.append(why)


@pytest.fixture
def watched(told):
    """A watchdog over a clock that the test sets, its body, and a function that lets a time pass and a look happen."""
    now, body = [0.0], Body()
    dog = Watchdog(0.01, lambda: None, lambda *what: told.append(what), body, lambda: now[0])

    def passes(seconds):
        now[0] += seconds
        beats = body.beats
        wait_for(lambda: body.beats > beats + 1)

    yield dog, body, passes
    dog.close()


def test_quick_steps_and_idle_time_are_not_told_of(watched, told):
    dog, _, passes = watched
    for _ in range(20):
        dog.begin()
        passes(0.009)
        dog.end()
    passes(500.0)
    assert not told


def test_what_is_told_of_and_does_not_end_is_given_up_once(watched, told):
    dog, body, passes = watched
    dog.begin("load_lora")
    passes(0.5)
    assert len(told) == 1 and body.why == []
    passes(5.0)
    passes(5.0)
    assert len(told) == len(body.why) == 1 and "load_lora" in body.why[0]


def test_what_has_ended_is_not_given_up(watched, told):
    dog, body, passes = watched
    dog.begin()
    passes(0.5)
    assert dog.end()
    passes(500.0)
    assert len(told) == 1 and body.why == []


def test_a_core_that_does_nothing_beats(watched, told):
    _, body, passes = watched
    passes(0.0)
    assert body.beats and not told


def test_health_and_metrics_say_that_a_step_hangs_and_that_it_is_over():
    from minivllm.engine.metrics import Metrics
    from minivllm.serve.app import create_app

    engine = AsyncLLM("dummy:tiny", overrides={**TINY, "engine.step_timeout": 0.05})
    app, hang = create_app(engine, Metrics("tiny"), ["tiny"]), threading.Event()
    submit = engine._core.executor.submit

    def slow(plan):
        hang.wait(PATIENCE)
        return submit(plan)

    engine._core.executor.submit = slow

    async def talk():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as http:
            app.state.closing = asyncio.get_running_loop().create_future()

            async def health():
                reply = await http.get("/health")
                return reply.status_code, reply.json()["status"]

            assert await health() == (200, "ok")
            body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
            answer = asyncio.create_task(http.post("/v1/completions", json=body))
            while await health() != (503, "stalled"):
                await asyncio.sleep(0.01)
            assert 'num_stalled_steps_total{engine="0",model_name="tiny"} 1.0' in (await http.get("/metrics")).text
            hang.set()
            assert (await answer).status_code == 200
            assert await health() == (200, "ok")
            assert 'num_stalled_steps_total{engine="0",model_name="tiny"} 1.0' in (await http.get("/metrics")).text

    try:
        asyncio.run(asyncio.wait_for(talk(), PATIENCE))
    finally:
        hang.set()
        engine.close()


def test_a_core_in_a_process_of_its_own_is_watched_there():
    """Every step of more than a tenth of a millisecond is too long: two threads there write to one socket."""
    overrides = {**TINY, "engine.core": "process", "engine.step_timeout": 1e-4}
    with LLM("dummy:tiny", overrides=overrides) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        outputs = llm.generate([[1, 2, 3], [4] * 200], params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [100, 100]
        assert llm.stats.num_stalled > 0
