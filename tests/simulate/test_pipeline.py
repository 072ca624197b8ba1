"""Stages of a model on devices behind each other, with as many steps in flight as there are stages."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import build_cluster
from minivllm.engine.build.disaggregated import Counts, build_disaggregated
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.errors import ConfigError
from minivllm.plan import StepOutput, StepPlan
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import Cost, Numbers, Step
from minivllm.simulate.devices import find_device
from minivllm.simulate.host import NO_HOST, HostCost
from minivllm.simulate.models import MODELS
from minivllm.simulate.pipeline import Pipeline, PipelineExecutor, Stage
from minivllm.simulate.shape import read_shape
from minivllm.simulate.wire import Wire
from minivllm.simulate.workload import TraceRequest
from tests.simulate.test_cluster import arrivals, config, run, said

HALF = Numbers("bfloat16", 2, 2)


class Worker:
    def __init__(self, clock: VirtualClock, seconds: float):
        self.clock, self.seconds = clock, seconds

    def execute(self, plan):
        self.clock.now += self.seconds if plan.num_tokens else 0.0
        return StepOutput({"r": [plan.step]})


def lanes(*seconds: float, count: int = 2, host: HostCost = NO_HOST):
    """Of one pipeline, with a stage for each of these seconds and 0.5 s from one to the next."""
    pipeline, found = Pipeline(len(seconds), lambda num_tokens: 0.5, host), []
    for _ in range(count):
        watches = [VirtualClock() for _ in seconds]
        stages = [Stage(Worker(watch, own), watch) for watch, own in zip(watches, seconds, strict=True)]
        clock = VirtualClock()
        found.append((clock, PipelineExecutor(stages, clock, pipeline)))
    return found


def step(number: int = 0) -> StepPlan:
    return StepPlan(number, {"r": 1}, {"r": 0})


def test_a_step_passes_the_stages_and_the_next_lanes_is_behind_it():
    (first, one), (second, two) = lanes(2.0, 3.0)
    out, late = one.submit(step()), two.submit(step(1))
    assert out.result().tokens == {"r": [0]} and first() == 2.0 + 0.5 + 3.0
    assert late.result().tokens == {"r": [1]} and second() == first() + 3.0  # stage 1 was busy, stage 0 was not
    assert one.busy_seconds == 5.0
    one.submit(step(2)).result()
    assert first() == 8.5 + 3.0  # it came to stage 1 at 8.0, which was busy until 8.5


def test_one_host_makes_all_lanes_steps():
    (first, one), (second, two) = lanes(1.0, 1.0, host=HostCost(4.0))
    one.submit(step()).result()
    two.submit(step(1)).result()
    assert (first(), second()) == (4.0 + 2.5, 8.0 + 2.5)


def test_a_plan_that_only_says_who_has_left_waits_for_nobody():
    (_, one), (second, two) = lanes(2.0, 3.0)
    one.submit(step())
    two.submit(StepPlan(1)).result()
    assert second() == 0.0


# ----------------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize("name, asked", [("opt-13b", "3x2xa100-80"), ("llama-3.1-70b", "2x4xh100:50,30")])
def test_the_stages_are_the_model_and_no_more(name, asked):
    device, shape = find_device(asked), read_shape(MODELS[name])
    whole, parts = (
        Cost(device, shape, HALF),
        [Cost(device, part, HALF) for part in shape.stages(3 if "3x" in asked else 2, device.split)],
    )
    steps = [Step(np.array([300, 1, 1]), np.array([0, 200, 40]), 3), Step.of(1)]
    for one in steps:
        assert math.isclose(sum(part.step_seconds(one) for part in parts), whole.step_seconds(one))
    assert math.isclose(sum(part.kv_bytes_per_token for part in parts), whole.kv_bytes_per_token)
    twice = shape.tied * Cost(device, shape, HALF)._part.vocab_size * shape.hidden_size * 2  # kept at both ends
    assert math.isclose(sum(part.weight_bytes for part in parts), whole.weight_bytes + twice, rel_tol=1e-6)


def test_layers_are_split_as_asked_and_else_evenly():
    shape = read_shape(MODELS["opt-13b"])
    assert [part.num_layers for part in shape.stages(3)] == [14, 13, 13]
    assert [part.num_layers for part in shape.stages(2, (25, 15))] == [25, 15]
    mixture = read_shape(MODELS["qwen3-235b-a22b"]).stages(4)
    assert sum(part.experts.num_layers for part in mixture if part.experts) == 94


def test_each_device_holds_its_stage_alone():
    """OPT-66B's weights are more than an A100 has, and half of them are not."""
    own = {"model.path": "opt-66b", "executor.kind": "simulated"}
    with pytest.raises(ConfigError, match="of weights"):
        build_cluster(EngineConfig.build("v0", {**own, "executor.device": "a100-80"}))
    cluster = build_cluster(EngineConfig.build("v0", {**own, "executor.device": "2x1xa100-80"}))
    pools = [replica.core.scheduler.base.kv.usage.num_total for replica in cluster.replicas]  # pyright: ignore
    assert len(pools) == 2 and pools[0] == pools[1]
    # what memory leaves beside half of the weights and 64 layers / 2 of K and V, in 16 bits; each core has half of it
    assert 0.7 < 2 * pools[0] * 16 * (2 * 32 * 9216 * 2) / (80 * 2**30 - 65e9) <= 1.0


# ---------------------------------------------------------------------------------------------------------- cluster


def test_a_lone_request_gains_nothing_and_pays_the_way():
    lone = [TraceRequest(0.0, 300, 6)]
    one, two = run(lone), run(lone, **{"executor.device": "2x1xh100", "kv.num_blocks": 300})
    link = find_device("h100").link
    assert link is not None
    ways = [link.all_reduce_seconds(2, num_tokens * 4096 * 2) for num_tokens in (300, 1, 1, 1, 1, 1)]
    assert math.isclose(two.summary()["latency"]["mean"], one.summary()["latency"]["mean"] + sum(ways))


def test_with_a_step_in_flight_for_each_stage_all_stages_work():
    many = [TraceRequest(0.0, 20, 100)] * 32

    def served(device: str) -> dict:
        pool = {"kv.num_blocks": 1200, "executor.device": device, "engine.router": "round_robin"}
        return run(many, **pool).summary()

    even, uneven = served("2x1xh100"), served("2x1xh100:28,4")
    assert even["device_busy"] > 0.9 > 0.7 > uneven["device_busy"]
    assert even["output_tokens_per_s"] > 1.4 * uneven["output_tokens_per_s"]


@pytest.mark.parametrize("overrides", [{}, {"preset": "v0", "kv.num_blocks": 90}, {"kv.prefix": "radix"}], ids=str)
def test_two_runs_are_equal_to_the_last_byte(overrides):
    options = {"executor.device": "2x2xh100", "replicas": 2, "model.max_model_len": 345, **overrides}
    first, second = (said(run(iter(arrivals()), HostCost(1e-3, 1e-5), 1e-4, **options)) for _ in range(2))
    assert first == second and json.loads(first.partition("\n}")[0] + "}")["num_finished"] == 60


def test_prompts_may_have_a_pipeline_and_answers_none():
    own = config(**{"kv.prefix": "none", "model.max_model_len": 400})
    piped = own.override({"executor.device": "2x1xh100"})
    cluster = build_disaggregated(piped, own, Counts(1, 1), wire=Wire(1e9, 0.0))
    found = cluster.run(arrivals()).summary()
    assert found["num_finished"] == 60
    whole = 2 * 32 * 8 * 128 * 2  # the decode device takes all layers of a token
    sent = sum(request.num_prompt for request in arrivals() if request.num_output > 1)
    assert found["kv_transfers"]["bytes_a_device"] == sent * whole


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"executor.device": "2x1xh100:10,10"}, "do not make the model's 32"),
        ({"executor.device": "2x1xh100:32"}, "layers of 1 of them are named"),
        ({"executor.device": "2x1xxeon-8480"}, "is not modelled"),
        ({"executor.device": "2x1xh100", "engine.overlap": 2}, "are in flight already"),
        ({"executor.device": "2x1xh100", "spec_decode.method": "ngram"}, "in a pipeline is not simulated"),
        ({"executor.device": "2x1xh100", "model.path": "gemma-3-27b"}, "sliding windows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused_in_a_sentence(overrides, words):
    with pytest.raises(ConfigError, match=words):
        build_cluster(config(**overrides))


def test_a_pipeline_has_no_real_clock():
    with pytest.raises(ConfigError, match="have a virtual clock alone"):
        SimulatedWorkerBuilder(config(**{"executor.device": "2x1xh100"})).build()
