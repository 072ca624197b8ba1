"""Rules: tokens that stay on the device are those of the synchronous engine, however slow and in whatever order their
copies arrive; a step starts before the one before it has ended; no pinned buffer is written while it is in flight."""

import random
import threading

import numpy as np
import pytest
import torch
from eventually import eventually
from slow_copies import PatientCopies, SlowCopies
from tolerances import ATTENTION

from minivllm import LLM, SamplingParams, StructuredParams
from minivllm.config import EngineConfig
from minivllm.engine.build import build
from minivllm.engine.core import EngineCore
from minivllm.executor.background import BackgroundExecutor
from minivllm.executor.uni import UniExecutor
from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.request import BeamSearchParams, EngineRequest
from minivllm.runner import async_sampling
from minivllm.runner.async_sampling import PinnedRing
from minivllm.runner.runner import ModelRunner
from minivllm.sampling.sampler import Sampler

TINY = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.block_size": 8, "executor.num_threads": 1}


@pytest.fixture
def streams(monkeypatch):
    """An engine with an overlap has tokens that stay on its device; here are the streams of those that were built: of
    each that of its tokens, then that of its prompts' log-probabilities."""
    return streams_of(SlowCopies, monkeypatch)


def streams_of(kind, monkeypatch):
    made = []

    def make(device):
        made.append(kind(len(made)))
        return made[-1]

    monkeypatch.setattr(async_sampling, "make_copies", make)
    return made


def generate(kinds, **overrides):
    """(tokens and ends of every output, beams, log-probabilities)"""
    prompts = [[i, 2 * i + 1, 3] * (1 + 5 * (i % 3)) for i in range(12)]
    of_each = [kinds[i % len(kinds)] for i in range(12)]
    params = [SamplingParams(max_tokens=6 + i + 15 * (k in PLAIN), seed=i, **k) for i, k in enumerate(of_each)]
    with LLM(overrides={**TINY, "kv.num_blocks": 90, "debug.check": True, **overrides}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        beams = llm.beam_search([[1, 2, 3], [4, 5]], BeamSearchParams(beam_width=3, max_tokens=6), use_tqdm=False)
    of_requests = [(o.text, list(o.token_ids), o.finish_reason) for out in outputs for o in out.outputs]
    logprobs = [found for out in outputs for found in (out.prompt_logprobs, *(o.logprobs for o in out.outputs))]
    return of_requests, [[list(o.token_ids) for o in out.outputs] for out in beams], logprobs


def assert_same_logprobs(got, wanted):
    assert len(got) == len(wanted)
    for mine, its in zip(got, wanted, strict=True):
        assert (mine is None) == (its is None) and len(mine or ()) == len(its or ())
        for position, other in zip(mine or (), its or (), strict=True):
            if position != other:  # a forward of other rows may round otherwise
                assert list(position) == list(other)
                assert [entry.rank for entry in position.values()] == [entry.rank for entry in other.values()]
                values = [[entry.logprob for entry in entries.values()] for entries in (position, other)]
                np.testing.assert_allclose(*values, **ATTENTION[torch.float32])


PLAIN = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.8, "stop": ["a", "e", " "]}]
FOLLOWING = [  # what is chosen next depends on the output
    {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "prompt_logprobs": 1, "min_tokens": 7, "logprobs": 0},
    {"temperature": 0.7, "structured": StructuredParams(regex="([a-z ]{2,5}[0-9]){2,9}")},
    {"temperature": 1.0, "structured": StructuredParams(choice=["yes", "no", "perhaps"]), "logprobs": 1},
    {"temperature": 1.0, "bad_words": ["a", " e"], "presence_penalty": 0.5, "allowed_token_ids": list(range(30, 99))},
]
MIXED = [  # the plain ones outlive the others
    *FOLLOWING,
    {"temperature": 1.0, "n": 2, "logprobs": 2, "logit_bias": {60: 3.0, 61: -1.0}},
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
def test_tokens_on_their_way_are_those_of_the_synchronous_engine(options, kinds, wanted, streams):
    got = generate({"plain": PLAIN, "mixed": MIXED}[kinds], **{"engine.overlap": 2, **options})
    assert got[:2] == wanted[kinds][:2]
    assert_same_logprobs(got[2], wanted[kinds][2])
    stream, prompts = streams
    assert not prompts._in_flight and (prompts.num_copies > 0) == (kinds == "mixed")
    assert stream.num_copies > 5 and not stream._in_flight
    assert stream.most_in_flight == 2, "no step was started before the one before it had ended"


def test_a_step_whose_processors_need_its_tokens_starts_behind_the_one_before_it_all_the_same(monkeypatch):
    """As many forwards are launched while a step is in flight as with requests that need nothing."""
    params = [SamplingParams(max_tokens=20, seed=i, ignore_eos=True, **FOLLOWING[i % 3]) for i in range(6)]
    plain = [SamplingParams(max_tokens=20, seed=i, ignore_eos=True, **PLAIN[i % 2]) for i in range(6)]
    run_model, of_engine = ModelRunner.run_model, []

    def watching(runner, batch):
        followers = runner.head.sampler.follow_output(batch.rows).any()
        of_engine.append((len(streams[0]._in_flight), followers))
        return run_model(runner, batch)

    monkeypatch.setattr(ModelRunner, "run_model", watching)
    shares = []
    for asked in (params, plain, params[:1] + plain[1:]):
        streams, of_engine = streams_of(PatientCopies, monkeypatch), []
        with LLM(overrides={**TINY, "kv.num_blocks": 90, "engine.overlap": 2}) as llm:
            of_engine.clear()
            llm.generate([[i, 3] for i in range(6)], asked, use_tqdm=False)
        assert any(followers for _, followers in of_engine) == (asked is not plain)
        shares.append((len(of_engine), sum(num_in_flight == 1 for num_in_flight, _ in of_engine)))
    assert all(num_overlapped >= num_steps - 2 for num_steps, num_overlapped in shares), shares


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
            SamplingParams(seed=i, max_tokens=rng.randrange(9, 20), eos_token_ids=(5, 9), **LONG[i % len(LONG)]),
        )
        for i, prompt in enumerate(prompts)
    ]


FEW = list(range(4, 14))  # so few tokens that one observed too much or too little shows
LONG = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "allowed_token_ids": FEW},
    {"temperature": 0.0, "repetition_penalty": 2.0, "logprobs": 1, "allowed_token_ids": FEW},
    {"temperature": 0.9, "structured": StructuredParams(regex="([a-z ]{2,5}[0-9]){1,9}"), "min_tokens": 2},
    {"temperature": 0.9, "bad_words_token_ids": ((6,), (9, 7)), "prompt_logprobs": 2, "min_tokens": 4},
    {"temperature": 0.5, "frequency_penalty": 2.0, "logit_bias": {5: 1.0}, "allowed_token_ids": FEW, "logprobs": 0},
    {"temperature": 1.0, "structured": StructuredParams(choice=["yes", "no", "perhaps"]), "logprobs": 2},
    {"temperature": 0.5, "presence_penalty": 2.0, "min_tokens": 9, "allowed_token_ids": FEW},
]


def tokens_of(core: EngineCore, asked: list[EngineRequest], rng: random.Random | None = None) -> dict[str, list[int]]:
    """Of every request that came to its own end. With `rng` they arrive one by one, and some are aborted."""
    tokens: dict[str, list[int]] = {request.id: [] for request in asked}
    gone: set[str] = set()
    waiting = list(asked)
    while waiting or not core.is_settled:
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
    """Steps fail before they begin, behind their launch, in the middle of sampling, or when their tokens are on their
    way: nobody reads those."""
    asked, rng = requests(seed), random.Random(seed)
    wanted = tokens_of(core_of(), asked)
    run_model, launch = ModelRunner.run_model, Sampler.launch
    num_run, fails_at, in_flight = 0, "", []

    def fail(where):
        nonlocal fails_at
        if fails_at == where:
            fails_at = ""
            in_flight.append((where, len(streams[0]._in_flight)))
            raise ZeroDivisionError

    def failing_run(runner, batch):
        nonlocal num_run, fails_at
        num_run += 1
        if num_run % (5 + seed) == 0:
            fails_at = ("before", "launched", "sampled", "sent")[num_run // (5 + seed) % 4]
        fail("before")
        hidden = run_model(runner, batch)
        fail("launched")
        return hidden

    def failing_launch(sampler, *args):
        found = launch(sampler, *args)
        fail("sampled")
        return found

    def failing_append(tokens, *args):
        fail("sent")
        return append(tokens, *args)

    options = {"runner.inputs": inputs, "runner.graphs": graphs, "kv.num_blocks": 20}
    options["scheduler.max_num_seqs"] = 6  # rows are given to others while a step that was given to them is in flight
    core = core_of(**{"engine.overlap": 2, **options})
    monkeypatch.setattr(ModelRunner, "run_model", failing_run)
    monkeypatch.setattr(Sampler, "launch", failing_launch)
    runner = core.executor.inner.worker.runner
    append = type(runner.inputs).append  # of the builder that gets tokens which are on the device
    monkeypatch.setattr(type(runner.inputs), "append", failing_append)
    got = tokens_of(core, asked, rng)
    assert got == {req_id: wanted[req_id] for req_id in got}
    assert {where for where, _ in in_flight} == {"before", "launched", "sampled", "sent"}
    assert {1} <= {n for where, n in in_flight if where in ("before", "launched")}, "none failed behind one in flight"
    assert len(asked) // 5 < len(got) < len(asked)
    core.scheduler.check()
    runner.head.sampler.check()
    assert not runner.rows.of and len(runner.head.verifier._unobserved) <= 1, "what failed is not kept"


def test_a_row_s_next_owner_does_not_see_what_was_sampled_behind_the_end_of_the_last(streams):
    """Ends that nobody foresees, and rows that are given on at once, to requests of which every token changes what
    follows."""
    rng, penalty = random.Random(3), {"frequency_penalty": 2.0, "allowed_token_ids": FEW}
    params = SamplingParams(seed=0, max_tokens=12, eos_token_ids=(5, 9, 11), temperature=0.1, **penalty)
    asked = [EngineRequest(str(i), [rng.randrange(200) for _ in range(3)], params.replace(seed=i)) for i in range(40)]
    wanted = tokens_of(core_of(), asked)
    assert len({len(tokens) for tokens in wanted.values()}) > 5
    assert tokens_of(core_of(**{"engine.overlap": 2, "scheduler.max_num_seqs": 4}), asked) == wanted


# ---------------------------------------------------------------- the ring


def test_a_buffer_is_used_again_once_it_has_been_read():
    stream = SlowCopies(0)
    ring = PinnedRing(stream, num_buffers=2, size=4)
    first, second = ring.send([torch.tensor([1, 2, 3])]), ring.send([torch.tensor([4])])
    assert second.result()[0].tolist() == [4]  # the order of their reading is not the ring's business
    third = ring.send([torch.tensor([5])])  # in the first one's buffer, which is read before
    assert stream.num_waits == 2 and first.is_ready() and not third.is_ready()
    assert first.result()[0].tolist() == [1, 2, 3] and stream.num_waits == 2
    fourth = ring.send([torch.tensor([6, 7, 8, 9])])
    assert [sent.result()[0].tolist() for sent in (first, second, third, fourth)] == [[1, 2, 3], [4], [5], [6, 7, 8, 9]]


def test_an_output_may_be_read_again_and_does_not_give_its_buffer_back_twice():
    stream = SlowCopies(0)
    ring = PinnedRing(stream, num_buffers=1)
    first = ring.send([torch.tensor([1, 2])])
    assert first.result() is first.result()
    second = ring.send([torch.tensor([3, 4])])
    first.result()
    third = ring.send([torch.tensor([5, 6])])  # the stream would say if it were written in flight
    assert [sent.result()[0].tolist() for sent in (first, second, third)] == [[1, 2], [3, 4], [5, 6]]


def test_tensors_of_any_number_shape_and_type_travel_and_pieces_grow_to_fit():
    stream = SlowCopies(0)
    ring = PinnedRing(stream, num_buffers=2)
    generator, sent = torch.Generator().manual_seed(0), []
    for i, shapes in enumerate([[(3,)], [(2, 5), (2, 5)], [], [(7,), (2, 3), (1, 1)], [(1, 9), (2, 40)], [(4,)]]):
        dtypes = [torch.int64, torch.float32, torch.bool][i % 3 :] + [torch.float32] * 3
        tensors = [(torch.rand(s, generator=generator) * 9).to(d) for s, d in zip(shapes, dtypes, strict=False)]
        sent.append((ring.send(tensors), [t.clone() for t in tensors]))
    for output, wanted in sent:
        for array, tensor in zip(output.result(), wanted, strict=True):
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
        self._ended: set[int] = set()

    def execute(self, plan):
        self.log.append(f"start {plan.step}")
        return AsyncOutput(lambda: self._is_ready(plan.step), lambda: self._finish(plan))

    def wait_for(self, line):
        eventually(lambda: line in self.log)

    def _is_ready(self, step):
        if step not in self._ended and self.ended.acquire(blocking=False):
            self._ended.add(step)
        return step in self._ended

    def _finish(self, plan):
        self.log.append(f"finish {plan.step}")
        return StepOutput(tokens={"a": [plan.step]})


def test_the_next_step_is_started_before_the_one_before_has_ended_and_they_end_in_order():
    slow = Slow()
    executor = BackgroundExecutor(lambda: UniExecutor(lambda: slow))
    outputs = [executor.submit(StepPlan(step=0)), executor.submit(StepPlan(step=1))]
    slow.wait_for("start 1")
    assert slow.log == ["start 0", "start 1"] and not outputs[0].is_ready()
    slow.ended.release()
    assert outputs[0].result().tokens == {"a": [0]} and not outputs[1].is_ready()
    outputs.append(executor.submit(StepPlan(step=2)))
    slow.wait_for("start 2")  # though the thread was waiting for step 1
    slow.ended.release(2)
    assert [output.result().tokens["a"][0] for output in outputs] == [0, 1, 2]
    assert slow.log == ["start 0", "start 1", "finish 0", "start 2", "finish 1", "finish 2"]
    executor.shutdown()


def test_a_device_that_fails_when_it_is_asked_ends_the_wait():
    num_asked = 0

    def is_ready():
        nonlocal num_asked
        num_asked += 1
        return 1 // (3 - num_asked) > 1

    class Broken:
        def execute(self, plan):
            return AsyncOutput(is_ready, is_ready)

    executor = BackgroundExecutor(lambda: UniExecutor(Broken))
    with pytest.raises(ZeroDivisionError):
        executor.submit(StepPlan(step=0)).result()
    executor.shutdown()


def test_without_a_thread_whoever_asks_waits():
    slow = Slow()
    output = UniExecutor(lambda: slow).submit(StepPlan(step=3))
    assert not output.is_ready() and slow.log == ["start 3"]
    slow.ended.release()
    assert output.is_ready() and output.result().tokens == {"a": [3]} and output.result() is output.result()


def test_a_placeholder_is_taken_from_its_own_row():
    """Of three requests in another order than their rows, with a prompt between."""

    class Inputs:
        def build(self, plan, key):
            return plan

    tokens = async_sampling.NewestTokens(Inputs(), 8, torch.device("cpu"))
    tokens.newest[:] = torch.arange(8) * 10
    batch = _Batch(
        token_ids=np.array([-1, 5, 6, -1, 0, 0]), query_start=np.array([0, 1, 3, 4]), rows=np.array([4, 7, 2])
    )
    assert tokens.build(batch, None).token_ids.tolist() == [40, 5, 6, 20, 0, 0]


class _Batch:
    def __init__(self, **arrays):
        self.__dict__.update(arrays)
