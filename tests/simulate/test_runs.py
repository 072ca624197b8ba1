"""Runs of decode steps in one, compared with the same steps one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minivllm.config import EngineConfig
from minivllm.engine.build.engine import build_over
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.request import EngineRequest, SamplingParams
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import Cost, Step
from minivllm.simulate.host import NO_HOST
from minivllm.simulate.light_worker import LightWorker
from minivllm.simulate.runs import RunWorker
from minivllm.simulate.timeline import TimelineExecutor

BUDGET = 64
# when it comes, prompt, output
Wanted = list[tuple[float, int, int]]


class Even(Cost):
    """A second, and 1/1024 for each token in the cache: sums of such numbers are exact."""

    def step_seconds(self, step: Step) -> float:
        return 1 + float((step.start + step.num_new).sum()) / 1024

    def run_seconds(self, start: np.ndarray, num_steps: int) -> float:
        steps = range(num_steps)
        return sum(self.step_seconds(Step(np.ones(len(start), np.int64), start + i, len(start))) for i in steps)


class Served:
    """Requests' times, and steps: (requests, tokens of each) of those that are runs."""

    def __init__(self, wanted: Wanted, in_runs: bool, **options):
        config = EngineConfig.build(
            "v1",
            {
                "model.path": "dummy:tiny",
                "executor.kind": "simulated",
                "executor.device": "b200",
                "scheduler.max_num_batched_tokens": BUDGET,
                "kv.prefix": "none",
                "debug.check": True,
            }
            | options,
        )
        self.clock, stopwatch = VirtualClock(), VirtualClock()
        self.coming = [
            (when, EngineRequest(str(i), [20] * prompt, SamplingParams(max_tokens=output, ignore_eos=True)))
            for i, (when, prompt, output) in enumerate(wanted)
        ][::-1]
        like = SimulatedWorkerBuilder(config, make_cost=Even).build()
        worker = RunWorker(like, stopwatch, self) if in_runs else LightWorker(like, stopwatch)
        self.core = build_over(TimelineExecutor(worker, stopwatch, self.clock, NO_HOST), config, clock=self.clock).core
        self.tokens = {str(i): 0 for i in range(len(wanted))}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.runs: list[tuple[int, int]] = []
        self.serve()

    def tokens_waiting(self) -> int:
        waiting = self.core.scheduler.base.waiting
        return waiting[-1].num_tokens if waiting else 0

    def seconds_left(self, step_seconds: float) -> float:
        return max(0.0, self.coming[-1][0] - self.clock() - step_seconds) if self.coming else np.inf

    def serve(self) -> None:
        while self.coming or self.core.has_work:
            while self.coming and self.coming[-1][0] <= self.clock():
                self.core.add(self.coming.pop()[1])
            if not self.core.has_work:
                self.clock.wait_until(self.coming[-1][0])
                continue
            for delta in self.core.step():
                assert delta.error is None
                if delta.token_ids:
                    self.first.setdefault(delta.req_id, self.clock())
                    self.last[delta.req_id] = self.clock()
                    self.tokens[delta.req_id] += len(delta.token_ids)
            if plan := self.core.plan.drafts:
                (length,) = {len(drafts) for drafts in plan.values()}
                self.runs.append((len(plan), 1 + length))
        self.core.shutdown()

    @property
    def said(self) -> dict[str, tuple[float, float, int]]:
        return {i: (self.last[i], self.tokens[i]) for i in self.tokens}


def test_a_run_is_what_the_budget_and_the_first_end_allow():
    served = Served([(0, 8, 60), (0, 8, 60)], in_runs=True)
    # one token comes from the prompt, then 32 of each are the budget of 64; 27 are left
    assert served.runs == [(2, 32), (2, 27)]
    assert served.tokens == {"0": 60, "1": 60}


def test_nobody_who_comes_waits_for_a_run():
    served = Served([(0, 8, 60), (10.5, 8, 3)], in_runs=True)
    alone = Served([(0, 8, 60), (10.5, 8, 3)], in_runs=False)
    assert served.first == alone.first
    assert served.runs[0][1] < 12


def test_a_request_that_ends_ends_the_run():
    # a token from the prompt, the run, then a single step, which somebody might join who waited for the end
    assert Served([(0, 8, 5), (0, 8, 9)], in_runs=True).runs == [(2, 4), (1, 3)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", ["dummy:tiny", "gpt-oss-20b"])  # without and with windows: two groups of layers
@pytest.mark.parametrize("num_blocks", [400, 14])  # of each group: room for all, or for few and preemption
def test_times_are_those_of_single_steps(seed, num_blocks, model):
    rng = random.Random(seed)
    budget = rng.choice([BUDGET, 4 * BUDGET])
    whens = sorted(rng.choice([0.0, rng.uniform(0, 90)]) for _ in range(7))
    wanted = [(when, rng.randint(1, 90), rng.randint(1, 70)) for when in whens]
    options = {"model.path": model, "scheduler.max_num_seqs": rng.choice([2, 16]), "model.max_model_len": 170}
    options |= {"scheduler.max_num_batched_tokens": budget}
    compare(wanted, options | {"kv.num_blocks": num_blocks if model == "dummy:tiny" else 2 * num_blocks})


@pytest.mark.parametrize("model", ["dummy:tiny", "gpt-oss-20b"])
def test_times_are_those_of_single_steps_where_dozens_share_a_tight_pool(model):
    rng = random.Random(0)
    wanted = [(when, rng.randint(80, 100), rng.randint(200, 250)) for when in [0.0] * 20 + [150.0, 170.0, 400.0]]
    options = {"model.path": model, "kv.num_blocks": 200, "model.max_model_len": 350, "debug.check": False}
    runs = compare(wanted, options | {"scheduler.max_num_batched_tokens": 600})
    assert runs.core.stats.num_preempted


def compare(wanted: Wanted, options: dict) -> Served:
    runs, steps = (Served(wanted, in_runs, **options) for in_runs in (True, False))
    assert runs.said == steps.said
    assert runs.first == steps.first
    assert runs.core.stats.num_preempted == steps.core.stats.num_preempted
    assert runs.runs or runs.core.stats.num_preempted or options["scheduler.max_num_seqs"] == 2
    return runs


def test_a_run_has_blocks_in_each_group_of_layers():
    wanted = [(0, 8, 100)] * 2
    options = {"model.path": "gpt-oss-20b", "kv.num_blocks": 22, "scheduler.max_num_batched_tokens": 256}
    runs = compare(wanted, options)
    assert max(length for _, length in runs.runs) < 98


def test_who_waits_for_blocks_is_not_let_in_by_a_run():
    """A run of 14 steps takes 224 of the 544 tokens of the budget; what is left would be 20 blocks of the 32 that are
    free, where single steps leave 33 blocks' worth."""
    wanted = [(0, 1, 16)] * 16 + [(0, 600, 3)]
    options = {"kv.num_blocks": 48, "scheduler.max_num_batched_tokens": 544, "model.max_model_len": 700}
    compare(wanted, options)


def test_a_tight_pool_preempts():
    """Or the test above compares nothing there."""
    served = Served([(0, 60, 70)] * 3, in_runs=True, **{"kv.num_blocks": 14})
    assert served.core.stats.num_preempted
