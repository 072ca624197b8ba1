"""The control plane cannot tell a simulated worker from a real one."""

from __future__ import annotations

import random
from dataclasses import asdict
from functools import partial

import pytest

from minivllm.config import EngineConfig
from minivllm.engine import build as building
from minivllm.engine.build import engine as composition
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.engine.step_loop import Reporter
from minivllm.request import EngineRequest, SamplingParams
from minivllm.simulate.clock import VirtualClock

SMALL = {
    "model.path": "dummy:tiny-short",
    "model.dtype": "float32",
    "model.max_model_len": 120,
    "kv.num_blocks": 40,
    "kv.block_size": 8,
    "executor.num_threads": 1,
    "debug.check": True,
}
STEP_SECONDS = 0.25


class Plans(Reporter):
    """An Observer that keeps each plan as data, and moves a clock that both engines read."""

    def __init__(self):
        self.now, self.plans = 0.0, []

    def on_step(self, plan, out, deltas, times):
        self.now += STEP_SECONDS
        self.plans.append(asdict(plan))


class Recorded:
    """Says what another run said."""

    def __init__(self, said: dict[str, list[int]]):
        self.said, self.of = said, {}

    def join(self, row, join):
        self.of[row] = self.said[join.req_id]

    def leave(self, row): ...

    def draw(self, rows, positions):
        pairs = zip(rows.tolist(), positions.tolist(), strict=True)
        tokens = [self.of[row][at] if at < len(self.of[row]) else 0 for row, at in pairs]  # 0: behind its end
        return rows * 0 + tokens


def arrivals() -> list[tuple[float, EngineRequest]]:
    rng = random.Random(0)
    shared = [rng.randrange(3, 500) for _ in range(30)]
    found = []
    for i in range(14):
        prompt = shared[: rng.randrange(31)] + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 40))]
        params = SamplingParams(temperature=0.8, seed=i, max_tokens=rng.randrange(1, 30), eos_token_ids=(2,))
        found.append((rng.randrange(12) * STEP_SECONDS, EngineRequest(f"r{i}", prompt, params, priority=i % 3)))
    return sorted(found, key=lambda arrival: arrival[0])


def run(config: EngineConfig) -> tuple[list[dict], dict[str, list[int]]]:
    """Its plans, and what each request says in all."""
    observer, waiting = Plans(), arrivals()
    engine = building.build(config, [observer])
    engine.core.clock = lambda: observer.now
    said = {request.id: list(request.prompt_token_ids) for _, request in waiting}
    while waiting or engine.core.has_work:
        while waiting and waiting[0][0] <= observer.now:
            engine.core.add(waiting.pop(0)[1])
        for delta in engine.core.step():
            assert delta.error is None, delta.error
            said[delta.req_id] += delta.token_ids
    engine.core.shutdown()
    return observer.plans, said


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheduler.max_num_batched_tokens": 16},  # prompts in pieces
        {"kv.num_blocks": 16, "model.max_model_len": 100},  # too few blocks: preemptions
        {"kv.num_blocks": 16, "model.max_model_len": 100, "kv.preemption": "swap", "scheduler.policy": "priority"},
        {"preset": "v0", "kv.preemption": "recompute"},
        {"preset": "orca-pow2"},
        {"kv.prefix": "radix", "runner.inputs": "gather", "debug.preempt_every": 3},
        {"engine.overlap": 2},
        {"model.path": "dummy:tiny-gemma3"},  # windows: blocks of two groups come and go
        {"model.path": "dummy:tiny-qwen3.5"},  # states, which take larger blocks
    ],
    ids=lambda options: ",".join(map(str, options.values())) or "default",
)
def test_of_the_same_arrivals_step_times_and_tokens_it_makes_the_same_plans(options, monkeypatch):
    preset = {"v0": "v0", "orca-pow2": "orca-pow2"}.get(options.get("preset", ""), "v1")
    overrides = {**SMALL, **{field: value for field, value in options.items() if field != "preset"}}
    real, said = run(EngineConfig.build(preset, overrides))
    make = partial(SimulatedWorkerBuilder, clock=VirtualClock(), tokens=Recorded(said))
    monkeypatch.setattr(composition, "build_worker", lambda config: make(config).build())
    simulated, again = run(EngineConfig.build(preset, {**overrides, "executor.kind": "simulated"}))
    assert again == said
    assert simulated == real
    assert len(real) > 20
