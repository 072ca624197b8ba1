"""Data-parallel ranks that share a mixture's experts: they step together, and the slowest is waited for."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import HostKV, build_cluster
from minivllm.engine.build.disaggregated import Counts, build_disaggregated
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.errors import ConfigError
from minivllm.plan import StepOutput, StepPlan
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import Cost, Numbers, RankCost, Step
from minivllm.simulate.devices import find_device
from minivllm.simulate.host import NO_HOST, HostCost
from minivllm.simulate.machines import cost_on
from minivllm.simulate.models import MODELS
from minivllm.simulate.ranks import RankExecutor, RankGroup
from minivllm.simulate.shape import read_shape
from minivllm.simulate.workload import TraceRequest
from tests.simulate.test_cluster import arrivals, run, said

HALF = Numbers("bfloat16", 2, 2)
QWEN = {"model.path": "qwen3-30b-a3b", "executor.device": "4xh100+dp", "model.max_model_len": 400}


class Worker:
    def __init__(self, clock: VirtualClock):
        self.clock = clock

    def execute(self, plan):
        self.clock.now += sum(plan.num_tokens.values())
        return StepOutput({"r": [plan.step]})


def group_of(num_ranks: int, host: HostCost = NO_HOST):
    """Alone a rank takes a second a token, an idle one 0.5 s; and all of them together 0.1 s a token."""
    group, found = RankGroup(num_ranks, lambda num_tokens: 0.1 * num_tokens, 0.5), []
    for _ in range(num_ranks):
        stopwatch, clock = VirtualClock(), VirtualClock()
        found.append((clock, RankExecutor(Worker(stopwatch), stopwatch, clock, host, group)))
    return group, found


def step(number: int, num_tokens: int) -> StepPlan:
    return StepPlan(number, {"r": num_tokens}, {"r": 0})


# -------------------------------------------------------------------------------------------------------------- a group


def test_a_step_begins_with_the_last_and_ends_for_all_with_the_slowest():
    group, [(_, one), (late, two), _] = group_of(3)
    late.now = 0.25
    outs = [one.submit(step(7, 3)), two.submit(step(8, 1))]
    assert not outs[0].is_ready()
    assert [out.result().tokens for out in outs] == [{"r": [7]}, {"r": [8]}]
    assert group.end_round() == 0.25 + 3 + 0.1 * (3 + 1 + 1)  # the third takes part with a token


def test_the_host_works_before_a_step_or_beneath_the_one_that_runs():
    group, [(clock, one)] = group_of(1, HostCost(0.5))
    first = one.submit(step(0, 1))
    assert group.end_round() == clock.now == 0.5  # nobody waits for it yet
    one.submit(step(1, 1))
    first.result()
    assert group.end_round() == 0.5 + 1.1
    clock.now = 1.6
    second = one.submit(step(2, 1))
    second.result()
    assert math.isclose(group.end_round(), 0.5 + 3 * 1.1)  # the device never waited
    assert math.isclose(group.busy_seconds, 3 * 1.1)


def test_a_plan_that_only_says_who_has_left_waits_for_nobody():
    group, [(clock, one), _] = group_of(2, HostCost(0.5))
    assert one.submit(StepPlan(1)).result().tokens == {"r": [1]}
    assert (group.end_round(), clock.now, group.busy_seconds) == (0.0, 0.0, 0.0)


# --------------------------------------------------------------------------------------------------------------- costs


def test_ranks_hold_the_experts_once_and_all_else_each():
    for name in ("qwen3-30b-a3b", "deepseek-v3"):
        shape = read_shape(MODELS[name])
        ranks, alone = cost_on(find_device("8xh200+dp"), shape, HALF), Cost(find_device("h200"), shape, HALF)
        assert isinstance(ranks, RankCost)
        assert 8 * ranks.expert_bytes == alone.expert_bytes
        assert ranks.weight_bytes - ranks.expert_bytes == alone.weight_bytes - alone.expert_bytes
        assert ranks.kv_bytes_per_token == alone.kv_bytes_per_token
        assert ranks.forward_bytes(100, 1) > alone.forward_bytes(100, 1)


def test_what_a_rank_does_alone_and_what_all_share_make_the_step_of_a_device():
    """The same model without its experts, on one device, is what a rank does alone."""
    shape = read_shape(MODELS["deepseek-v3"])
    of = shape.experts
    assert of is not None
    one = Step(np.array([300, 1, 1]), np.array([0, 200, 4000]), 3)
    ranks, alone = RankCost(find_device("8xh200+dp"), shape, HALF), Cost(find_device("h200"), shape, HALF)
    experts = of.num_layers * alone.seconds(alone._experts(302, of))
    assert math.isclose(ranks.own_seconds(one), alone.step_seconds(one) - experts)
    assert math.isclose(ranks.step_seconds(one), ranks.own_seconds(one) + ranks.shared_seconds(8 * 302))
    # of many tokens each device computes an eighth of what all bring: as much as alone, and a little for the crowd
    link, many = find_device("h200").link, 1 << 15
    assert link is not None
    exchanged = 2 * of.num_layers * link.all_reduce_seconds(8, 8 * many * shape.hidden_size)
    computed = ranks.shared_seconds(8 * many) - exchanged
    assert 1.0 < computed / (of.num_layers * alone.seconds(alone._experts(many, of))) < 1.05


# ------------------------------------------------------------------------------------------------------------- cluster


def test_who_is_alone_is_in_step_with_ranks_that_do_nothing():
    figures = run([TraceRequest(0.0, 300, 6)], **QWEN).summary()
    device = find_device("4xh100+dp")
    cost = RankCost(device, read_shape(MODELS["qwen3-30b-a3b"]), HALF)
    idle = cost.own_seconds(replace(Step.of(1), num_samples=0))
    steps = [Step(np.array([300]), np.array([0]), 1)]
    steps += [Step(np.array([1]), np.array([place]), 1) for place in range(300, 305)]
    seconds = sum(max(cost.own_seconds(each), idle) + cost.shared_seconds(int(each.num_new[0]) + 3) for each in steps)
    assert math.isclose(figures["latency"]["mean"], seconds)


@pytest.mark.parametrize("overrides", [{}, {"engine.overlap": 2}, {"preset": "v0"}, {"kv.num_blocks": 60}], ids=str)
def test_two_runs_are_equal_to_the_last_byte_and_all_are_served(overrides):
    options = {**QWEN, "replicas": 2, **overrides}
    first, second = (said(run(iter(arrivals(rate=400)), HostCost(1e-3, 1e-5), 1e-4, **options)) for _ in range(2))
    assert first == second
    found = json.loads(first.partition("\n}")[0] + "}")
    assert (found["num_finished"], found["num_refused"]) == (60, 0)


def test_a_rank_with_a_long_prompt_holds_the_others_up():
    """With replicas of their own the three would not know of it."""
    many = [TraceRequest(0.0, 20, 100)] * 4
    long = {**QWEN, "model.max_model_len": 1100, "engine.router": "round_robin", "kv.prefix": "none"}
    alike = run(many, **long).summary()
    uneven = run([*many[:3], TraceRequest(0.0, 1000, 100)], **long).summary()
    assert uneven["ttft"]["p50"] > 1.2 * alike["ttft"]["p50"]


def test_a_step_in_flight_hides_the_host():
    many = [TraceRequest(0.0, 20, 50)] * 16
    slow, hidden = (run(many, HostCost(2e-3), **QWEN, **{"engine.overlap": n}).summary() for n in (1, 2))
    device = run(many, **QWEN).summary()
    per_step = [found["tpot"]["mean"] for found in (device, hidden, slow)]
    assert math.isclose(per_step[2] - per_step[0], 2e-3, rel_tol=0.01)
    assert per_step[1] - per_step[0] < 0.2e-3


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"executor.device": "h100+dp"}, "and here is one"),
        ({"executor.device": "2x4xh100+dp"}, "no .ep, .dcp or stages"),
        ({"executor.device": "4xh100+ep+dp"}, "no .ep, .dcp or stages"),
        ({"model.path": "llama-3.1-8b"}, "the model has none"),
        ({"executor.device": "3xh100+dp"}, "3 devices cannot have equal parts of 128 experts"),
        ({"spec_decode.method": "ngram"}, "among data-parallel ranks is not simulated"),
        ({"debug.trace": "x.jsonl"}, "several among data-parallel ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused_in_a_sentence(overrides, words):
    with pytest.raises(ConfigError, match=words):
        run([], **{**QWEN, **overrides})


def test_ranks_have_no_real_clock_no_store_and_no_other_side():
    config = EngineConfig.build("v1", {"executor.kind": "simulated", "kv.prefix": "hash", **QWEN})
    with pytest.raises(ConfigError, match="data-parallel ranks have a virtual clock alone"):
        SimulatedWorkerBuilder(config).build()
    with pytest.raises(ConfigError, match="in data-parallel ranks"):
        build_cluster(config, host_kv=HostKV(4000))
    with pytest.raises(ConfigError, match="do all of a request"):
        build_disaggregated(config, config, Counts(1, 1))
