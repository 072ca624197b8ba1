"""Failure injection around any scheduler: what rarely happens is made to happen often, and output must not change."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.kv.manager import PagedKVManager
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import Request
from minivllm.scheduler.base import SchedulerBase


class Injector:
    """A Scheduler that disturbs another one before each plan."""

    def __init__(self, inner: SchedulerBase, kv: PagedKVManager, preempt_every: int = 0, evict_all: bool = False):
        self.inner = inner
        self.kv = kv
        self.preempt_every = preempt_every
        self.evict_all = evict_all
        self._num_steps = 0
        self._tokens_then: dict[str, int] = {}  # request -> its tokens when it was preempted here

    def add(self, req: Request) -> None:
        self.inner.add(req)

    def abort(self, req_id: str) -> None:
        self._tokens_then.pop(req_id, None)
        self.inner.abort(req_id)

    def fork(self, forks: Sequence[tuple[str, Request]], ends: Sequence[str]) -> None:
        self.inner.fork(forks, ends)
        for req_id in ends:
            self._tokens_then.pop(req_id, None)

    def schedule(self, now: float) -> StepPlan:
        self._num_steps += 1
        num_preempted = self._preempt_one() if self.preempt_every and self._num_steps % self.preempt_every == 0 else 0
        if self.evict_all:
            self.kv.forget_cached()
        plan = self.inner.schedule(now)
        plan.stats.num_preempted += num_preempted
        return plan

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        deltas = self.inner.update(plan, out)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._tokens_then.pop(delta.req_id, None)
        return deltas

    def check(self) -> None:
        self.inner.check()

    def _preempt_one(self) -> int:
        # Only a request that has gained a token since it was last preempted: else one could be recomputed for ever.
        ready = [r for r in self.inner.running if r.num_tokens > self._tokens_then.get(r.id, 0)]
        if not ready:
            return 0
        victim = ready[self._num_steps % len(ready)]
        self._tokens_then[victim.id] = victim.num_tokens
        self.inner.preempt(victim)
        return 1
