"""Steps in flight change timing, never output: with an overlap the tokens are those of the synchronous engine, whatever
ends, fails, is preempted or aborted meanwhile."""

import asyncio
import random
import threading

import pytest
from conformance.test_fake_model import workload
from fakes import EOS, FakeEngine, beam_oracle, next_token, oracle

from minivllm import LLM, AsyncLLM, SamplingParams
from minivllm.engine.core import EngineCore
from minivllm.errors import ConfigError, ModelError
from minivllm.executor.background import BackgroundExecutor, FailStop, StepLost
from minivllm.executor.uni import UniExecutor
from minivllm.plan import StepOutput, StepPlan
from minivllm.request import BeamSearchParams

TINY = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.block_size": 8, "executor.num_threads": 1}


def watch_publishing(engine: FakeEngine) -> list[int]:
    """From now on every block that a request has published must hold, in the fake model's KV, the request's own tokens.
    Returns a list that gets a number for each commit: how many were looked at."""
    commit, looked_at = engine.kv.commit, []

    def watched(req):
        commit(req)
        size, table = engine.kv.block_size, engine.kv.tables[req.id]
        for i, block in enumerate(table.blocks[: table.num_published]):
            held = engine.worker.kv[0, block * size : (block + 1) * size].tolist()
            assert held == req.token_ids[i * size : (i + 1) * size], f"{req.id} has published what is not there"
        looked_at.append(table.num_published)

    engine.kv.commit = watched
    return looked_at


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("overlap", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"debug.preempt_every": 3, "scheduler.max_num_batched_tokens": 9, "kv.prefix": "radix"},
        {"debug.evict_all": True, "runner.inputs": "gather", "scheduler.policy": "priority"},
        {"scheduler.kind": "phased", "scheduler.chunked_prefill": False, "kv.fork": "share"},
        {"scheduler.kind": "static", "scheduler.chunked_prefill": False, "scheduler.max_num_seqs": 5},
        {"spec_decode.method": "ngram", "spec_decode.k": 3},
        {"spec_decode.method": "draft", "debug.preempt_every": 3, "scheduler.max_num_batched_tokens": 9},
    ],
    ids=["v1", "preempt", "evict", "v0", "static", "drafts", "drafts-few"],
)
def test_an_overlap_changes_no_token_and_keeps_no_block(options, overlap, seed):
    for num_blocks in (20, 300):
        engine = FakeEngine(num_blocks, max_model_len=80, overlap=overlap, stream_seed=seed, **options)
        looked_at = watch_publishing(engine)
        wanted = workload(engine, seed)
        assert {req_id: engine.tokens[req_id] for req_id in wanted} == wanted
        assert engine.kv.usage.num_free == num_blocks and max(looked_at) > 0
        engine.core.step()
        assert not engine.worker.rows.of and not engine.scheduler.in_flight


def count_computed(engine: FakeEngine) -> list[int]:
    """Gets the number of tokens of every plan that runs."""
    execute, computed = engine.worker.execute, []

    def counted(plan):
        computed.append(plan.total_tokens)
        return execute(plan)

    engine.worker.execute = counted
    return computed


def prompt_that_ends() -> tuple[list[int], int]:
    """A prompt to which the fake model answers a few tokens and then the end, and how many in all."""
    for i in range(1000):
        answer = oracle([i], SamplingParams(max_tokens=9, eos_token_ids=(EOS,)))
        if answer[-1] == EOS and len(answer) > 3:
            return [i], len(answer)
    raise AssertionError("none found")


def test_an_end_that_nobody_could_foresee_costs_one_token_and_a_length_none():
    prompt, num_output = prompt_that_ends()
    for max_tokens, extra in ((50, 1), (num_output, 0), (num_output - 1, 0)):
        engine = FakeEngine(overlap=2)
        computed = count_computed(engine)
        params = engine.add("a", prompt, max_tokens=max_tokens)
        engine.run()
        assert engine.tokens["a"] == oracle(prompt, params)
        assert sum(computed) == len(engine.tokens["a"]) + extra  # the prompt's token, and all outputs but the last


def test_a_length_that_the_model_sets_is_foreseen_too():
    engine = FakeEngine(num_blocks=3, max_model_len=12, overlap=3)
    computed = count_computed(engine)
    params = engine.add("a", [5] * 4, max_tokens=None, ignore_eos=True, min_tokens=8)
    engine.run()
    assert engine.tokens["a"] == oracle([5] * 4, params, 12) and sum(computed) == 11


def test_an_id_that_is_used_again_gets_nothing_of_the_step_in_flight():
    engine = FakeEngine(overlap=2)
    engine.add("a", [1, 2, 3], max_tokens=9, min_tokens=9)
    engine.step(), engine.step(), engine.step()
    engine.core.abort(["a"])
    params = engine.add("a", [4, 5], max_tokens=9, min_tokens=9)
    engine.run()
    assert engine.tokens["a"] == oracle([4, 5], params)


def test_the_loop_is_one_step_ahead():
    engine = FakeEngine(overlap=2)
    computed = count_computed(engine)
    engine.add("a", [1, 2, 3], max_tokens=3, min_tokens=3)
    assert engine.step() == [] and computed == [] and engine.core.has_work
    (delta,) = engine.step()
    assert delta.token_ids == [next_token([1, 2, 3])] and computed == [3]  # and the second step waits
    engine.run()
    engine.step()
    assert engine.core.is_settled


def test_a_failing_step_takes_the_next_one_back_and_ends_only_its_own():
    engine = FakeEngine(num_blocks=40, overlap=3, **{"scheduler.max_num_batched_tokens": 8})
    watch_publishing(engine)
    wanted = {}
    for name in "abc":
        prompt = [ord(name) % 50] * 7
        wanted[name] = oracle(prompt, engine.add(name, prompt, max_tokens=12, min_tokens=12))
        engine.step()
    engine.add("bad", [9] * 6, max_tokens=9, min_tokens=9)
    execute, failed = engine.worker.execute, []

    def failing(plan):
        if "bad" in plan.num_tokens:
            failed.append(plan)
            raise ZeroDivisionError("before anything of it was done")
        return execute(plan)

    engine.worker.execute = failing
    late = engine.add("late", [3, 3], max_tokens=5)  # joins behind the step that fails
    wanted["late"] = oracle([3, 3], late)
    ended: set[str] = set()
    while engine.core.has_work:
        take(engine.core.step(), engine.tokens, ended)
    assert ended == {"bad"} and len(failed[0].num_tokens) > 1 and len(failed[-1].num_tokens) == 1
    assert wanted == {name: engine.tokens[name] for name in wanted}
    assert engine.kv.usage.num_free == 40 and not engine.scheduler.requests


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("overlap", [1, 2, 4])
@pytest.mark.parametrize("fork", ["share", "lookup"])
def test_whoever_was_not_in_a_failing_step_gets_its_own_tokens(seed, overlap, fork):
    """Steps fail before they begin or once they are done; prefixes are shared, and memory is short."""
    rng = random.Random(seed)
    options = {"scheduler.max_num_batched_tokens": 10, "scheduler.max_num_seqs": 6, "kv.fork": fork}
    engine = FakeEngine(24, max_model_len=40, overlap=overlap, stream_seed=seed, **options)
    watch_publishing(engine)
    execute, doomed, wanted, failed = engine.worker.execute, set(), {}, []

    def failing(plan):
        fails, late = rng.random() < 0.06, rng.random() < 0.5
        out = execute(plan) if late or not fails else None
        if fails:
            failed.append(plan)
            raise ZeroDivisionError
        return out

    engine.worker.execute = failing
    shared = [rng.randrange(50) for _ in range(12)]
    tokens = engine.tokens
    for i in range(40):
        name, beam = str(i), BeamSearchParams(beam_width=2, max_tokens=5)
        prompt = shared[: rng.randrange(1, 13)] + [i]
        if i % 8 == 7:
            wanted |= dict(zip(engine.add_beams(name, prompt, beam), beam_oracle(prompt, beam, 40), strict=True))
        else:
            params = engine.add(name, prompt, max_tokens=rng.choice((1, 4, 20)))
            wanted[name] = oracle(prompt, params, 40)
        for _ in range(rng.randrange(6)):
            take(engine.core.step(), tokens, doomed)
    while engine.core.has_work:
        take(engine.core.step(), tokens, doomed)
    assert {r: tokens[r] for r in wanted if r not in doomed} == {r: wanted[r] for r in wanted if r not in doomed}
    assert failed and len(doomed) < len(wanted) and engine.kv.usage.num_free == 24
    assert not engine.scheduler.requests and not engine.scheduler.in_flight


@pytest.mark.parametrize("overlap", [1, 2])
def test_a_fork_that_a_failing_step_should_have_let_in_enters_later(overlap):
    """Its row and the copy of its parent's last block were to be made by a step in which it computes nothing."""
    options = {"scheduler.policy": "priority", "scheduler.max_num_batched_tokens": 8, "kv.fork": "share"}
    engine = FakeEngine(overlap=overlap, **options)
    prompt, beam = list(range(14)), BeamSearchParams(beam_width=3, max_tokens=6)
    ids = engine.add_beams("g", prompt, beam)
    engine.step()
    engine.add("b", [9] * 60, priority=-1, max_tokens=2)  # once it runs it comes first, and takes all the budget
    execute, failed = engine.worker.execute, []

    def failing(plan):
        if not failed and plan.joins and not any(join.req_id in plan.num_tokens for join in plan.joins):
            assert plan.copies and list(plan.num_tokens) == ["b"]
            failed.append(plan)
            raise ZeroDivisionError
        return execute(plan)

    engine.worker.execute = failing
    ended: set[str] = set()
    while engine.core.has_work:
        take(engine.core.step(), engine.tokens, ended)
    assert failed and ended == {"b"}
    assert [engine.tokens[req_id] for req_id in ids] == beam_oracle(prompt, beam)


def take(deltas, tokens: dict[str, list[int]], doomed: set[str]) -> None:
    for delta in deltas:
        tokens[delta.req_id] += delta.token_ids
        if delta.error:
            doomed.add(delta.req_id)


class SlowWorker:
    """Executes when it is let."""

    def __init__(self, worker):
        self.inner, self.gate, self.calls = worker, threading.Semaphore(0), []

    def execute(self, plan):
        assert self.gate.acquire(timeout=10)
        self.calls.append(plan.step)
        return self.inner.execute(plan)

    def note(self):
        self.calls.append("note")
        return threading.current_thread().name


def test_the_background_executor_runs_steps_while_the_next_is_planned_and_calls_in_their_turn():
    engine = FakeEngine()
    slow = SlowWorker(engine.worker)
    executor = BackgroundExecutor(lambda: UniExecutor(lambda: slow))
    core = EngineCore(engine.core.scheduler, executor, overlap=2)
    engine.core = core
    params = engine.add("a", [1, 2], max_tokens=4, min_tokens=4)
    assert engine.step() == [] and slow.calls == []  # in flight, and this thread goes on
    slow.gate.release(20)
    engine.step()
    (name,) = executor.call("note")
    assert slow.calls == [0, 1, "note"] and name.startswith("minivllm-worker")
    engine.run()
    assert engine.tokens["a"] == oracle([1, 2], params)
    core.shutdown(), core.shutdown()


def test_what_a_worker_is_told_it_does_in_its_turn_and_nobody_waits_for_it(caplog):
    slow = SlowWorker(FakeEngine().worker)
    executor = BackgroundExecutor(lambda: UniExecutor(lambda: slow))
    step = executor.submit(StepPlan(0))
    executor.tell("note"), executor.tell("unknown"), executor.tell("note")
    assert slow.calls == []
    slow.gate.release()
    assert step.result() == StepOutput()
    executor.call("note")
    assert slow.calls == [0, "note", "note", "note"]
    assert "a worker could not do unknown" in caplog.text
    executor.shutdown()


class Telling:
    """A worker whose forwards begin and end when they are let, and fail where they are told to."""

    def __init__(self, fails=()):
        self.begins, self.ends = threading.Semaphore(0), threading.Semaphore(0)
        self.told, self.fails = threading.Semaphore(0), fails

    def tell_forwards(self, tell):
        self.tell = tell

    def execute(self, plan):
        if not plan.num_tokens:
            return StepOutput()
        assert self.begins.acquire(timeout=10)
        self.tell()
        self.told.release()
        assert self.ends.acquire(timeout=10)
        if plan.step in self.fails:
            raise ZeroDivisionError
        return StepOutput(tokens={"a": [plan.step]})


def holding(worker):
    executor = BackgroundExecutor(lambda: UniExecutor(lambda: worker))
    executor.hold_until_forwards()
    return executor


def steps(executor, *num_tokens):
    return [
        executor.submit(StepPlan(i, {"a": 1} if n else {}, {"a": i} if n else {}, num_in_flight=min(i, 1)))
        for i, n in enumerate(num_tokens)
    ]


def test_a_step_is_handed_out_when_the_next_ones_forward_begins_and_the_last_one_when_it_ends():
    worker = Telling()
    executor = holding(worker)
    first, second = steps(executor, 1, 1)
    worker.begins.release(), worker.ends.release()
    assert worker.told.acquire(timeout=10)  # the first one's forward has begun, it ends, and the next one may not begin
    assert not first.is_ready()
    worker.begins.release()
    assert first.result().tokens == {"a": [0]} and not second.is_ready()
    worker.ends.release()
    assert second.result().tokens == {"a": [1]}
    executor.shutdown()


def test_behind_a_step_that_fails_or_has_no_forward_nothing_is_held_back():
    worker = Telling(fails={0})
    worker.begins.release(9), worker.ends.release(9)
    executor = holding(worker)
    failed, lost = steps(executor, 1, 1)
    for output in (failed, lost):
        with pytest.raises((ZeroDivisionError, StepLost)):
            output.result()
    executor.shutdown()
    executor = holding(Telling())
    executor.inner.worker.begins.release(), executor.inner.worker.ends.release()
    first, empty = steps(executor, 1, 0)
    assert first.result().tokens == {"a": [0]} and empty.result().tokens == {}
    executor.shutdown()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"executor.kind": "naive", "kv.prefix": "none"},
        {"executor.kind": "simulated"},
        {"spec_decode.method": "ngram"},
    ],
    ids=["uni", "naive", "simulated", "ngram"],
)
def test_every_worker_says_once_a_step_that_its_device_is_at_work(options, monkeypatch):
    """Else its outputs would be held until the next step has ended."""
    computed, running, told = [], [], []  # steps
    hand_out, call = BackgroundExecutor._hand_out, FailStop.__call__

    def counted(executor):
        told.extend(running)
        hand_out(executor)

    def started(start, plan):
        computed.extend([plan.step] if plan.num_tokens else [])
        running.append(plan.step)
        try:
            return call(start, plan)
        finally:
            running.pop()

    monkeypatch.setattr(BackgroundExecutor, "_hand_out", counted)
    monkeypatch.setattr(FailStop, "__call__", started)
    with LLM(overrides={**TINY, "engine.overlap": 2, "kv.num_blocks": 30, **options}) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert told == computed and len(told) >= 2


def test_what_building_a_worker_raises_comes_out_of_the_thread():
    with pytest.raises(ModelError, match="no-such-model"):
        LLM(overrides={**TINY, "model.path": "./no-such-model", "engine.overlap": 2})


def test_what_cannot_overlap_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="overlap=2 cannot be combined"):
        LLM(overrides={**TINY, "kv.preemption": "swap", "engine.overlap": 2})
    with pytest.raises(ConfigError, match="engine.overlap must be at least 1 and at most 2"):
        LLM(overrides={**TINY, "engine.overlap": 3})


def generate(**overrides) -> tuple[list, list]:
    """Requests of many kinds: log-probabilities, penalties, stop strings, n > 1, beams beside each other."""
    prompts = [[i, 2 * i + 1, 3] * (1 + 5 * (i % 3)) for i in range(12)]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 1.0, "n": 2, "logprobs": 2},
        {"temperature": 0.0, "prompt_logprobs": 1, "min_tokens": 7},
        {"temperature": 0.8, "stop": ["a", "e", " "], "top_p": 0.9},
    ]
    params = [SamplingParams(max_tokens=14, seed=i, **kinds[i % len(kinds)]) for i in range(12)]
    with LLM(overrides={**TINY, "kv.num_blocks": 30, "debug.check": True, **overrides}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        beams = llm.beam_search([[1, 2, 3], [4, 5]], BeamSearchParams(beam_width=3, max_tokens=6), use_tqdm=False)
    of_requests = [(o.text, list(o.token_ids), o.finish_reason) for out in outputs for o in out.outputs]
    return of_requests, [[list(o.token_ids) for o in out.outputs] for out in beams]


def test_the_real_runner_gives_the_same_with_an_overlap():
    assert generate(**{"engine.overlap": 2}) == generate()


@pytest.mark.parametrize("core", ["inproc", "process"])
def test_a_server_s_engine_streams_the_same_with_an_overlap(core):
    async def collect(engine, i):
        params = SamplingParams(temperature=0.0, max_tokens=10 + i, ignore_eos=True)
        parts = [o.outputs[0].token_ids async for o in engine.generate([i, 2], params, str(i), output_kind="delta")]
        return sum(map(list, parts), [])

    async def run(engine):
        return await asyncio.gather(*(collect(engine, i) for i in range(4)))

    found = []
    for overlap in (1, 2):
        engine = AsyncLLM(overrides={**TINY, "kv.num_blocks": 60, "engine.core": core, "engine.overlap": overlap})
        found.append(asyncio.run(run(engine)))
        engine.close()
    assert found[0] == found[1] and [len(tokens) for tokens in found[0]] == [10, 11, 12, 13]
