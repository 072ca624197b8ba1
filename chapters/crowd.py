"""Many requests on the real engine: the laboratory of chapters 5, 8, 9, 10 and 11.

Guests arrive before a step, not at a time. So every machine makes the same plans, and what is compared sees the same
arrivals at the same tokens. How long a step takes is what differs from one machine to the next.

The model is loaded once. Each run has a scheduler and a KV manager of its own over it, so that runs can take turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from minivllm.config import EngineConfig
from minivllm.engine.build import build, build_kv, build_scheduler
from minivllm.engine.core import EngineCore
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import EngineRequest, SamplingParams
from minivllm.scheduler.base import Limits

EXACT = {"model.dtype": "float32", "model.quantization": "none"}  # so that outputs can be compared token by token


class Guest(NamedTuple):
    name: str
    prompt: list[int]
    num_new: int
    arrives: int = 0  # before this step, counted from 0


@dataclass(slots=True)
class Visit:
    """What one guest got: its tokens, when each came (ms since the run began), and in which step."""

    came: float
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        """ms between one token and the next."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def first(self) -> float:
        """ms from the arrival to the first token."""
        return self.times[0] - self.came


class Run(NamedTuple):
    visits: dict[str, Visit]
    plans: list[StepPlan]
    times: list[dict[str, float]]  # of each step, as the engine core measures it: {phase: ms}

    @property
    def ms(self) -> float:
        """Until the last token of all."""
        return max(visit.times[-1] for visit in self.visits.values())

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: visit.tokens for name, visit in self.visits.items()}


class House:
    """The default model, with a pool of KV blocks: `serve` as often as you like, each time under other rules."""

    def __init__(self, num_blocks: int, **overrides: Any):
        """overrides: with `__` for the dot, kv__preemption="swap". What the worker itself must be built for."""
        given = {name.replace("__", "."): value for name, value in overrides.items()}
        sizes = {"kv.num_blocks": num_blocks, "executor.num_threads": torch.get_num_threads()}
        self.overrides = {**EXACT, **sizes, **given}
        self.engine = build(EngineConfig.build("v1", self.overrides))
        self.executor = self.engine.executor
        self.facts = self.executor.call("facts")[0]

    def serve(self, guests: Sequence[Guest], preset: str = "v1", rules: dict[str, Any] | None = None) -> Run:
        """Until everybody has been served. rules: dotted overrides of the scheduler and of kv."""
        config = EngineConfig.build(preset, {**self.overrides, **(rules or {})})
        kv = build_kv(config, config.kv.num_blocks, self.facts.max_model_len, self.facts.num_host_blocks)
        budget = config.scheduler.max_num_batched_tokens
        limits = Limits(config.scheduler.max_num_seqs, budget, self.facts.max_model_len, kv.capacity)
        watch = Watch()
        return watch.run(EngineCore(build_scheduler(config, kv, limits), self.executor, [watch]), guests)

    def close(self) -> None:
        self.engine.core.shutdown()


class Watch:
    """An observer of the engine core that keeps every plan, its times, and each guest's tokens."""

    def __init__(self) -> None:
        self.visits: dict[str, Visit] = {}
        self.plans: list[StepPlan] = []
        self.times: list[dict[str, float]] = []
        self.begin = time.perf_counter()

    def run(self, core: EngineCore, guests: Sequence[Guest]) -> Run:
        coming = deque(sorted(guests, key=lambda guest: guest.arrives))
        while coming or core.has_work:
            while coming and (coming[0].arrives <= len(self.plans) or not core.has_work):
                guest = coming.popleft()
                params = SamplingParams(temperature=0.0, seed=0, max_tokens=guest.num_new, ignore_eos=True)
                core.add(EngineRequest(guest.name, guest.prompt, params))
            core.step()
        served = Run(self.visits, list(self.plans), list(self.times))
        while not core.is_settled:  # the worker drops the last rows
            core.step()
        return served

    def on_add(self, req: EngineRequest, step: int) -> None:
        self.visits[req.id] = Visit(came=self._now())

    def on_step(self, plan: StepPlan, out: StepOutput, deltas: list[Delta], times: dict[str, float]) -> None:
        now = self._now()
        for delta in deltas:
            if delta.error is not None:
                raise RuntimeError(f"{delta.req_id}: {delta.error}")
            visit = self.visits[delta.req_id]
            visit.num_cached = delta.num_cached_tokens
            visit.tokens += delta.token_ids
            visit.times += [now] * len(delta.token_ids)
            visit.steps += [len(self.plans)] * len(delta.token_ids)
        self.plans.append(plan)
        self.times.append(times)

    def _now(self) -> float:
        return 1e3 * (time.perf_counter() - self.begin)

    def on_start(self, config: dict[str, Any], info: dict[str, Any]) -> None: ...
    def on_abort(self, req_id: str) -> None: ...
    def close(self) -> None: ...


def random_tokens(num: int, seed: int) -> list[int]:
    """A prompt that nobody has written. Ids below 1000 are the model's special ones and single bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 49_000, (num,), generator=generator).tolist()
