"""Rules of an engine whose prompts become vectors: the budget of a step is never exceeded, nobody is passed over, an
error belongs to one request, and nothing is left behind."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fakes import SlowStream

from minivllm.config import EngineConfig
from minivllm.engine.build import build_scheduler
from minivllm.engine.core import EngineCore
from minivllm.errors import NeverFits
from minivllm.kv.none import NoKV
from minivllm.plan import NOT_FINITE, StepOutput
from minivllm.request import NO_TOKENS, EngineRequest, PoolingParams
from minivllm.scheduler.base import Limits

UNLUCKY, NAN = 13, 0  # tokens on which the fake model raises, or gives no number


class Lengths:
    """A worker whose vectors are the texts' lengths."""

    def __init__(self):
        self.rows, self.batches = {}, []

    def execute(self, plan) -> StepOutput:
        for req_id in plan.leaves:
            self.rows.pop(req_id, None)
        for join in plan.joins:
            assert join.req_id not in self.rows
            self.rows[join.req_id] = join.token_ids
        if plan.num_tokens:
            self.batches.append(list(plan.num_tokens.values()))
        out = StepOutput()
        for req_id, num_tokens in plan.num_tokens.items():
            tokens = self.rows[req_id]
            assert num_tokens == len(tokens) and plan.start[req_id] == 0 and not plan.new_blocks.get(req_id)
            if UNLUCKY in tokens:
                raise RuntimeError("unlucky")
            if NAN in tokens:
                out.errors[req_id] = NOT_FINITE
            else:
                out.pooled[req_id] = np.array([num_tokens], np.float32)
        return out


class Engine:
    """The control plane of a pooling engine over it, with steps that run as late as they can."""

    def __init__(self, max_num_seqs=8, budget=32, overlap=1, longest=32):
        config = EngineConfig.build("v1", {"engine.overlap": min(overlap, 2)})
        kv = NoKV(longest)
        limits = Limits(max_num_seqs, budget, longest + 1, kv.capacity)
        self.worker = Lengths()
        scheduler = build_scheduler(config, kv, limits, keeps_kv=False)
        self.core = EngineCore(scheduler, SlowStream(self.worker), clock=lambda: 0.0, check=True, overlap=overlap)

    def add(self, *texts):
        for i, tokens in enumerate(texts):
            self.core.add(EngineRequest(str(i), tokens, NO_TOKENS, pooling=PoolingParams()))

    def run(self) -> dict[str, float | str]:
        """What each request ended with, in the order in which they did."""
        found = {}
        while self.core.has_work:
            for delta in self.core.step():
                assert delta.req_id not in found and not delta.token_ids
                assert delta.finish_reason == ("error" if delta.error else "stop")
                found[delta.req_id] = delta.error or float(np.frombuffer(delta.pooled, np.float32)[0])
        while not self.core.is_settled:
            self.core.step()
        assert not self.worker.rows
        return found


@pytest.fixture(params=[1, 2, 3], ids="overlap={}".format)
def overlap(request):
    return request.param


def test_a_step_takes_the_head_of_the_queue_while_it_fits(overlap):
    engine = Engine(max_num_seqs=3, budget=10, longest=10, overlap=overlap)
    engine.add([1] * 4, [1] * 4, [1] * 4, [1], [1], [1], [1] * 10, [1])
    assert list(engine.run()) == [str(i) for i in range(8)]
    if overlap == 1:
        assert engine.worker.batches == [[4, 4], [4, 1, 1], [1], [10], [1]]


def test_random_queues_keep_the_budget_and_the_order(overlap):
    rng = random.Random(0)
    for _ in range(50):
        engine = Engine(rng.randrange(1, 9), budget := rng.randrange(8, 40), overlap, longest=8)
        texts = [[1] * rng.randrange(1, 9) for _ in range(rng.randrange(1, 40))]
        engine.add(*texts)
        assert list(engine.run().items()) == [(str(i), len(text)) for i, text in enumerate(texts)]
        assert all(sum(b) <= budget and len(b) <= engine.core.scheduler.limits.max_num_seqs
                   for b in engine.worker.batches)  # fmt: skip
        assert engine.core.stats.prompt_tokens == sum(map(len, texts)) and engine.core.stats.num_waiting == 0


def test_an_error_belongs_to_the_request_that_causes_it(overlap):
    engine = Engine(overlap=overlap)
    engine.add([1], [UNLUCKY], [1, 1], [1, NAN])
    assert engine.run() == {"0": 1, "1": "RuntimeError: unlucky", "2": 2, "3": NOT_FINITE}


def test_what_is_taken_back_does_not_run(overlap):
    engine = Engine(overlap=overlap)
    engine.add([1], [1, 1], [1, 1, 1])
    engine.core.abort(["1", "unknown"])
    assert engine.run() == {"0": 1, "2": 3} and engine.worker.batches == [[1, 3]]


def test_a_text_takes_the_whole_length_and_no_more():
    engine = Engine(longest=8)
    engine.add([1] * 8)
    with pytest.raises(NeverFits):
        engine.core.add(EngineRequest("long", [1] * 9, NO_TOKENS, pooling=PoolingParams()))
    assert engine.run() == {"0": 8}
