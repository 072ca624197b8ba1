"""Failure injection around any scheduler: what rarely happens is made to happen often, and output must not change."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.kv.manager import PagedKVManager
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import Request
from minivllm.scheduler.around import Around
from minivllm.scheduler.protocol import InnerScheduler


class Injector(Around):
    """Disturbs the inner one before each plan."""

    def __init__(self, inner: InnerScheduler, kv: PagedKVManager, preempt_every: int = 0, evict_all: bool = False):
        super().__init__(inner)
        self.kv = kv
        self.preempt_every = preempt_every
        self.evict_all = evict_all
        self._num_steps = 0
        self._tokens_then: dict[str, int] = {}  # request -> its tokens when it was preempted here

    def abort(self, req_id: str) -> None:
        self._tokens_then.pop(req_id, None)
        self.inner.abort(req_id)

    def fork(self, forks: Sequence[tuple[str, Request]], ends: Sequence[str]) -> None:
        self.inner.fork(forks, ends)
        for req_id in ends:
            self._tokens_then.pop(req_id, None)

    def schedule(self, now: float) -> StepPlan:
        self._num_steps += 1
        if self.preempt_every and self._num_steps % self.preempt_every == 0:
            self._preempt_one()
        if self.evict_all:
            self.kv.forget_cached()
        return self.inner.schedule(now)

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        deltas = self.inner.update(plan, out)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._tokens_then.pop(delta.req_id, None)
        return deltas

    def _preempt_one(self) -> None:
        # Only a request that has gained a token since it was last preempted: else one could be recomputed for ever.
        ready = [r for r in self.inner.running if r.num_tokens > self._tokens_then.get(r.id, 0)]
        if ready:
            victim = ready[self._num_steps % len(ready)]
            self._tokens_then[victim.id] = victim.num_tokens
            self.inner.hold([victim.id])
