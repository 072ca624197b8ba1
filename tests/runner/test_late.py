"""Rules: tokens that stay on the device are those of the synchronous engine, however late and in whatever order their
copies arrive; a step starts before the one before it has landed; no pinned buffer is written while it is in flight."""

import random
import threading
import time

import numpy as np
import pytest
import torch

from minivllm import LLM, SamplingParams, StructuredParams
from minivllm.config import EngineConfig
from minivllm.engine.build import build
from minivllm.engine.core import EngineCore
from minivllm.executor.background import BackgroundExecutor
from minivllm.executor.uni import UniExecutor
from minivllm.plan import Landing, StepOutput, StepPlan
from minivllm.request import BeamSearchParams, EngineRequest
from minivllm.runner import late
from minivllm.runner.late import PinnedRing
from minivllm.runner.runner import ModelRunner

TINY = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.block_size": 8, "executor.num_threads": 1}
POISON = 77  # what a buffer holds until its copy arrives: a token, so that reading it early is no crash


class LateCopies:
    """A stream as unkind as one may be: a copy arrives when somebody waits for it, or by chance earlier, and in any
    order; it reads its source when it was asked to, as a device does behind its queue."""

    def __init__(self, seed: int):
        self._chance = random.Random(seed)
        self._in_flight: list[LateCopy] = []
        self.num_copies = self.most_in_flight = self.num_waits = self.num_pinned = 0

    def pinned(self, size, dtype):
        self.num_pinned += 1
        with torch.inference_mode(False):  # it is written outside of a step
            return torch.full((size,), POISON, dtype=dtype)

    def copy(self, sources, targets):
        written = {target.data_ptr() for copy in self._in_flight for target in copy.targets}
        for source, target in zip(sources, targets, strict=True):
            assert source.is_contiguous() and source.dtype == target.dtype and source.shape == target.shape
            assert target.data_ptr() not in written, "rewritten in flight"
            target.fill_(POISON)
        self._in_flight.append(LateCopy(self, [source.clone() for source in sources], targets))
        self.num_copies += 1
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        return self._in_flight[-1]

    def let_some_arrive(self):
        for copy in self._chance.sample(self._in_flight, len(self._in_flight)):
            if self._chance.random() < 0.1:
                copy.arrive()


class LateCopy:
    def __init__(self, stream, sources, targets):
        self.stream, self.sources, self.targets = stream, sources, targets

    def arrive(self):
        for source, target in zip(self.sources, self.targets, strict=True):
            target.copy_(source)
        self.stream._in_flight.remove(self)

    def is_here(self):
        self.stream.let_some_arrive()
        return self not in self.stream._in_flight

    def wait(self):
        self.stream.num_waits += 1
        if self in self.stream._in_flight:
            self.arrive()


@pytest.fixture
def streams(monkeypatch):
    """An engine with an overlap has tokens that stay on its device; here are the streams of those that were built."""
    made = []

    def make(device):
        made.append(LateCopies(len(made)))
        return made[-1]

    monkeypatch.setattr(late, "make_copies", make)
    return made


def generate(kinds, **overrides):
    """(tokens and ends of every output, beams)"""
    prompts = [[i, 2 * i + 1, 3] * (1 + 5 * (i % 3)) for i in range(12)]
    of_each = [kinds[i % len(kinds)] for i in range(12)]
    params = [SamplingParams(max_tokens=6 + i + 15 * (k in PLAIN), seed=i, **k) for i, k in enumerate(of_each)]
    with LLM(overrides={**TINY, "kv.num_blocks": 90, "debug.check": True, **overrides}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        beams = llm.beam_search([[1, 2, 3], [4, 5]], BeamSearchParams(beam_width=3, max_tokens=6), use_tqdm=False)
    of_requests = [(o.text, list(o.token_ids), o.finish_reason) for out in outputs for o in out.outputs]
    return of_requests, [[list(o.token_ids) for o in out.outputs] for out in beams]


PLAIN = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.8, "stop": ["a", "e", " "]}]
MIXED = [  # some need the host between two steps; the others outlive them
    {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "n": 2, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1, "min_tokens": 7},
    {"temperature": 0.7, "structured": StructuredParams(regex="([a-z ]{2,5}[0-9]){2,9}")},
    *PLAIN,
]


@pytest.fixture(scope="module")
def wanted():
    return {"plain": generate(PLAIN), "mixed": generate(MIXED)}


@pytest.mark.parametrize("kinds", ["plain", "mixed"])
@pytest.mark.parametrize(
    "options",
    [
        {"runner.inputs": "gather"},
        {"runner.inputs": "persistent", "scheduler.max_num_batched_tokens": 9},
        {"runner.inputs": "rebuild", "debug.preempt_every": 3, "kv.num_blocks": 30},
        {"runner.inputs": "gather", "runner.graphs": "full+piecewise", "runner.attention": "reference"},
        {"runner.inputs": "gather", "scheduler.max_num_seqs": 5, "debug.evict_all": True},
    ],
    ids=["gather", "chunks", "preempt", "graphs", "few"],
)
def test_late_tokens_are_those_of_the_synchronous_engine(options, kinds, wanted, streams):
    got = generate({"plain": PLAIN, "mixed": MIXED}[kinds], **{"engine.overlap": 2, **options})
    assert got == wanted[kinds]
    stream = streams[0]
    assert stream.num_copies > 5 and not stream._in_flight
    assert stream.most_in_flight == 2, "no step was started before the one before it had landed"


def test_a_synchronous_engine_has_its_tokens_at_once(streams, wanted):
    assert generate(PLAIN) == wanted["plain"] and streams == []


def test_without_a_distribution_the_request_ends_and_the_others_go_on(streams, monkeypatch):
    from minivllm.models.llama import LlamaModel

    logits = LlamaModel.logits

    def broken(model, hidden):
        found = logits(model, hidden)
        if len(found) == 3:
            found[1] = torch.nan
        return found

    monkeypatch.setattr(LlamaModel, "logits", broken)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(overrides={**TINY, "kv.num_blocks": 30, "engine.overlap": 2}) as llm:
        outputs = llm.generate([[1, 2], [3, 4], [5, 6]], params, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert streams[0].num_copies > 0


# ---------------------------------------------------------------- aborts and failures while a step is in flight


def core_of(**overrides) -> EngineCore:
    overrides = {**TINY, "kv.num_blocks": 40, "debug.check": True, "runner.attention": "reference", **overrides}
    return build(EngineConfig.build("v1", overrides)).core


def requests(seed: int) -> list[EngineRequest]:
    """Prompts with equal beginnings, which a prefix cache finds."""
    rng = random.Random(seed)
    shared = [rng.randrange(200) for _ in range(20)]
    prompts = [shared[: rng.randrange(21)] + [rng.randrange(200)] for _ in range(24)]
    return [
        EngineRequest(
            str(i),
            prompt,
            SamplingParams(seed=i, max_tokens=rng.randrange(2, 16), eos_token_ids=(5, 9), **LONG[i % len(LONG)]),
        )
        for i, prompt in enumerate(prompts)
    ]


LONG = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}] * 5 + [
    {"temperature": 0.0, "repetition_penalty": 1.2}
]


def tokens_of(core: EngineCore, asked: list[EngineRequest], rng: random.Random | None = None) -> dict[str, list[int]]:
    """Of every request that came to its own end. With `rng` they arrive one by one, and some are aborted."""
    tokens: dict[str, list[int]] = {request.id: [] for request in asked}
    gone: set[str] = set()
    waiting = list(asked)
    while waiting or core.has_work:
        for _ in range(len(waiting) if rng is None else min(len(waiting), rng.randrange(3))):
            core.add(waiting.pop(0))
        if rng is not None and rng.random() < 0.1:
            victim = rng.choice(asked).id
            core.abort([victim])
            gone.add(victim)
        for delta in core.step():
            tokens[delta.req_id] += delta.token_ids
            if delta.finish_reason == "error":
                gone.add(delta.req_id)
    core.shutdown()
    return {req_id: found for req_id, found in tokens.items() if req_id not in gone}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("inputs, graphs", [("gather", "none"), ("persistent", "full+piecewise"), ("rebuild", "none")])
def test_aborts_and_failing_steps_leave_the_others_their_tokens(inputs, graphs, seed, streams, monkeypatch):
    """Steps fail before they begin, or behind their launch, when their tokens are on their way."""
    asked, rng = requests(seed), random.Random(seed)
    wanted = tokens_of(core_of(), asked)
    run_model, num_run, in_flight = ModelRunner.run_model, 0, []

    def failing(runner, batch):
        nonlocal num_run
        num_run += 1
        fails = num_run % (7 + seed) == 0
        hidden = run_model(runner, batch) if num_run % 2 or not fails else None
        if fails:
            in_flight.append(len(streams[0]._in_flight))
            raise ZeroDivisionError
        return hidden

    core = core_of(**{"engine.overlap": 2, "runner.inputs": inputs, "runner.graphs": graphs, "kv.num_blocks": 20})
    monkeypatch.setattr(ModelRunner, "run_model", failing)
    got = tokens_of(core, asked, rng)
    assert got == {req_id: wanted[req_id] for req_id in got}
    assert max(in_flight) == 1, "no step failed while another was in flight"
    assert len(asked) // 3 < len(got) < len(asked) and not streams[0]._in_flight
    core.scheduler.check()


# ---------------------------------------------------------------- the ring


def test_a_buffer_is_used_again_once_it_has_been_read():
    stream = LateCopies(0)
    ring = PinnedRing(stream, num_buffers=2, size=4)
    first, second = ring.send([torch.tensor([1, 2, 3])]), ring.send([torch.tensor([4])])
    assert second.open()[0].tolist() == [4]  # the order of landing is not the ring's business
    third = ring.send([torch.tensor([5])])  # in the first one's buffer, which is read before
    assert stream.num_waits == 2 and first.is_here() and not third._arrays
    assert first.open()[0].tolist() == [1, 2, 3] and stream.num_waits == 2
    fourth = ring.send([torch.tensor([6, 7, 8, 9])])
    assert [sent.open()[0].tolist() for sent in (first, second, third, fourth)] == [[1, 2, 3], [4], [5], [6, 7, 8, 9]]


def test_a_parcel_may_be_opened_again_and_does_not_give_its_buffer_back_twice():
    stream = LateCopies(0)
    ring = PinnedRing(stream, num_buffers=1)
    first = ring.send([torch.tensor([1, 2])])
    assert first.open() is first.open()
    second = ring.send([torch.tensor([3, 4])])
    first.open()
    third = ring.send([torch.tensor([5, 6])])  # the stream would say if it were written in flight
    assert [sent.open()[0].tolist() for sent in (first, second, third)] == [[1, 2], [3, 4], [5, 6]]


def test_tensors_of_any_number_shape_and_type_travel_and_pieces_grow_to_fit():
    stream = LateCopies(0)
    ring = PinnedRing(stream, num_buffers=2)
    generator, sent = torch.Generator().manual_seed(0), []
    for i, shapes in enumerate([[(3,)], [(2, 5), (2, 5)], [], [(7,), (2, 3), (1, 1)], [(1, 9), (2, 40)], [(4,)]]):
        dtypes = [torch.int64, torch.float32, torch.bool][i % 3 :] + [torch.float32] * 3
        tensors = [(torch.rand(s, generator=generator) * 9).to(d) for s, d in zip(shapes, dtypes, strict=False)]
        sent.append((ring.send(tensors), [t.clone() for t in tensors]))
    for parcel, wanted in sent:
        for array, tensor in zip(parcel.open(), wanted, strict=True):
            assert array.dtype == tensor.numpy().dtype and np.array_equal(array, tensor.numpy())
    num_pinned = stream.num_pinned
    for _ in range(4):
        ring.send([torch.zeros(4)])
    assert stream.num_pinned == num_pinned, "pieces that fit are kept"


# ---------------------------------------------------------------- the executor


class Slow:
    """A worker whose steps are on a device that ends each when it is told to."""

    def __init__(self):
        self.log: list[str] = []
        self.ended = threading.Semaphore(0)
        self._here: set[int] = set()

    def execute(self, plan):
        self.log.append(f"start {plan.step}")
        return Landing(lambda: self._is_here(plan.step), lambda: self._land(plan))

    def wait_for(self, line):
        deadline = time.monotonic() + 10
        while line not in self.log and time.monotonic() < deadline:
            time.sleep(1e-3)

    def _is_here(self, step):
        if step not in self._here and self.ended.acquire(blocking=False):
            self._here.add(step)
        return step in self._here

    def _land(self, plan):
        self.log.append(f"land {plan.step}")
        return StepOutput(tokens={"a": [plan.step]})


def test_the_next_step_is_started_before_the_one_before_has_landed_and_they_land_in_order():
    slow = Slow()
    executor = BackgroundExecutor(lambda: UniExecutor(lambda: slow))
    futures = [executor.submit(StepPlan(step=0)), executor.submit(StepPlan(step=1))]
    slow.wait_for("start 1")
    assert slow.log == ["start 0", "start 1"] and not futures[0].done()
    slow.ended.release()
    assert futures[0].result(10).tokens == {"a": [0]} and not futures[1].done()
    futures.append(executor.submit(StepPlan(step=2)))
    slow.wait_for("start 2")  # though the thread was waiting for step 1
    slow.ended.release(2)
    assert [future.result(10).tokens["a"][0] for future in futures] == [0, 1, 2]
    assert slow.log == ["start 0", "start 1", "land 0", "start 2", "land 1", "land 2"]
    executor.shutdown()


def test_without_a_thread_whoever_asks_waits():
    slow = Slow()
    future = UniExecutor(lambda: slow).submit(StepPlan(step=3))
    assert not future.done() and slow.log == ["start 3"]
    slow.ended.release()
    assert future.done() and future.result().tokens == {"a": [3]} and future.result() is future.result()


def test_a_placeholder_is_taken_from_its_own_row():
    """Of three requests in another order than their rows, with a prompt between."""

    class Inputs:
        def build(self, plan, key):
            return plan

    tokens = late.NewestTokens(Inputs(), 8, torch.device("cpu"))
    tokens.newest[:] = torch.arange(8) * 10
    batch = _Batch(
        token_ids=np.array([-1, 5, 6, -1, 0, 0]), query_start=np.array([0, 1, 3, 4]), rows=np.array([4, 7, 2])
    )
    assert tokens.build(batch, None).token_ids.tolist() == [40, 5, 6, 20, 0, 0]


class _Batch:
    def __init__(self, **arrays):
        self.__dict__.update(arrays)
