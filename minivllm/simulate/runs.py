"""RunWorker: many steps in which every request decodes, in one.

While nobody comes, ends or is in a prompt, a step is as the one before, each context a token longer. So such steps are
a run: its requests get as many tokens at once, in the time that the steps take together. The scheduler plans it as it
plans speculative decoding: this worker proposes drafts, as many to each request, and all are right. A run ends with the
first request that does, when the next one comes, where the token budget or free blocks end. Lengths are those of single
steps, and times too if what a step takes grows evenly with the contexts (a test compares them).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Protocol

import numpy as np

from minivllm.plan import StepOutput, StepPlan
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import StepCost
from minivllm.simulate.light_worker import LightWorker
from minivllm.simulate.worker import SimulatedWorker
from minivllm.simulate.workload import FIRST_TOKEN


class RunCost(StepCost, Protocol):
    def run_seconds(self, start: np.ndarray, num_steps: int) -> float:
        """Of so many steps in which each request decodes a token. start [R] int64: tokens in the cache before them."""
        ...


class Ahead(Protocol):
    """What a run must not go beyond."""

    def seconds_left(self, step_seconds: float) -> float:
        """From the end of a step that takes so long to when somebody may come; inf: nobody, 0: the next is a single
        step."""
        ...

    def tokens_waiting(self) -> int:
        """Of the request that is to be let in next; 0: nobody waits."""
        ...


class RunWorker(LightWorker):
    """Needs engine.overlap=1, and requests that end by max_tokens alone."""

    cost: RunCost

    def __init__(self, like: SimulatedWorker, stopwatch: VirtualClock, ahead: Ahead):
        """like: with a RunCost."""
        super().__init__(like, stopwatch)
        self._ahead, facts = ahead, self.facts()
        self._most_tokens = facts.max_num_batched_tokens
        self._block_size = facts.block_size
        self._num_groups = len(facts.groups.groups)  # each takes blocks of its own
        self._left: dict[str, int] = {}  # tokens that a request will say yet

    def execute(self, plan: StepPlan) -> StepOutput:
        begin = self._stopwatch.now
        out = self._run(plan) if plan.drafts else super().execute(plan)
        for req_id, tokens in out.tokens.items():
            self._left[req_id] -= len(tokens)
        num_steps = self._num_steps(plan, out, self._stopwatch.now - begin)
        if num_steps > 1:
            out.drafts = {req_id: [FIRST_TOKEN] * (num_steps - 1) for req_id in out.tokens}
        return out

    def _leave_and_join(self, plan: StepPlan) -> None:
        super()._leave_and_join(plan)
        for req_id in plan.leaves:
            self._left.pop(req_id, None)
        for join in plan.joins:
            assert join.params.max_tokens is not None, "whose end nobody knows"
            self._left[join.req_id] = join.num_prompt_tokens + join.params.max_tokens - len(join.token_ids)

    def _run(self, plan: StepPlan) -> StepOutput:
        self._leave_and_join(plan)
        (num_steps,) = set(plan.num_tokens.values())
        start = np.fromiter(plan.start.values(), np.int64, len(plan.start))
        self._stopwatch.now += self.cost.run_seconds(start, num_steps)
        return StepOutput(tokens={req_id: [FIRST_TOKEN] * num_steps for req_id in plan.num_tokens})

    def _num_steps(self, plan: StepPlan, out: StepOutput, seconds: float) -> int:
        """That the next plan may have in one. seconds: that this one takes."""
        count, stats = len(out.tokens), plan.stats
        # windows give blocks back in every step, for which somebody may wait
        may_admit = stats.num_waiting and (plan.joins or plan.total_tokens >= self._most_tokens or self._num_groups > 1)
        if not count or count < len(plan.num_tokens) or may_admit or stats.num_preempted:
            return 1
        if not (least := min(self._left[req_id] for req_id in out.tokens)):
            return 1  # whoever ends makes room, or is followed
        # who waits for blocks must not be let in for a chunk that is smaller because a run takes the budget
        most = min(least, (self._most_tokens - self._ahead.tokens_waiting()) // count)
        if most < 2:
            return 1
        ends = np.fromiter((plan.start[i] + plan.num_tokens[i] for i in out.tokens), np.int64, count)
        spare = count * self._num_groups if self._num_groups > 1 else 0  # windows give theirs back after a run alone
        most = self._steps_within(stats.num_free_blocks - spare, ends, most)
        left = self._ahead.seconds_left(seconds)
        if most > 1 and math.isfinite(left):
            most = min(most, math.ceil(left / self.cost.run_seconds(ends, 1)))
            while most > 1 and self.cost.run_seconds(ends, most - 1) >= left:  # steps become longer
                most -= 1
        return max(1, most)

    def _steps_within(self, num_blocks: int, ends: np.ndarray, most: int) -> int:
        """How many, up to `most`, need no more than so many new blocks. ends [R] int64: tokens in the cache."""

        def need(num_steps: int) -> int:
            return self._num_groups * int((-(-(ends + num_steps) // self._block_size)).sum())

        held = need(0)
        return bisect_right(range(1, most + 1), num_blocks, key=lambda num_steps: need(num_steps) - held)
