"""An engine on paper: the real scheduler and KV manager, no model. A step takes so long, and each of its tokens too.

It is chapter 3's picture in two numbers. Nothing here depends on a machine, so a test may compare times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from chapters.crowd import Guest
from minivllm.config import EngineConfig
from minivllm.engine.build import build_kv, build_scheduler
from minivllm.engine.core import EngineCore
from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.request import EngineRequest, SamplingParams
from minivllm.scheduler.base import Limits

STEP_MS, TOKEN_MS = 10.0, 1.0
NUM_BLOCKS, MAX_LEN = 256, 1024


@dataclass(slots=True)
class Served:
    """What one guest got, by the clock on paper."""

    came: float
    num_cached: int = 0
    times: list[float] = field(default_factory=list)  # ms, of each token

    @property
    def first(self) -> float:
        """ms from the arrival to the first token."""
        return self.times[0] - self.came

    @property
    def worst_gap(self) -> float:
        """ms between one token and the next, at most."""
        return max((b - a for a, b in pairwise(self.times)), default=0.0)


class NoModel:
    """An executor: whoever's known tokens are all computed gets token 5."""

    def __init__(self, num_prompt: dict[str, int]):
        self.num_prompt = num_prompt

    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        ends = {name: plan.start[name] + now for name, now in plan.num_tokens.items()}
        out = StepOutput({name: [5] for name, end in ends.items() if end >= self.num_prompt[name]})
        return AsyncOutput.ready(out)

    def shutdown(self) -> None: ...


def serve(guests: Sequence[Guest], rules: dict[str, Any]) -> dict[str, Served]:
    """Until everybody has been served. rules: dotted options of the scheduler and of kv."""
    config = EngineConfig.build("v1", {"kv.num_blocks": NUM_BLOCKS, **rules})
    kv = build_kv(config, NUM_BLOCKS, MAX_LEN)
    budget = config.scheduler.max_num_batched_tokens
    scheduler = build_scheduler(config, kv, Limits(config.scheduler.max_num_seqs, budget, MAX_LEN, kv.capacity))
    core: Any = EngineCore(scheduler, NoModel({guest.name: len(guest.prompt) for guest in guests}))  # type: ignore
    coming, clock, step = deque(sorted(guests, key=lambda guest: guest.arrives)), 0.0, 0
    served: dict[str, Served] = {}
    while coming or core.has_work:
        while coming and (coming[0].arrives <= step or not core.has_work):
            guest = coming.popleft()
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=guest.num_new, ignore_eos=True)
            core.add(EngineRequest(guest.name, guest.prompt, params))
            served[guest.name] = Served(clock)
        deltas = core.step()
        clock, step = clock + STEP_MS + TOKEN_MS * core.plan.total_tokens, step + 1
        for delta in deltas:
            served[delta.req_id].times += [clock] * len(delta.token_ids)
            served[delta.req_id].num_cached = delta.num_cached_tokens
    return served
