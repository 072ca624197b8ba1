"""Suspects: whose fault was it? A step that raises ends one request alone, where it can be told which.

A step is one forward of many requests, and an exception does not say whose part of it raised. So nobody is ended for it
yet: those that were in it are preempted like any others, and then tried one after the other, each alone in its steps,
until it has a token. Whose step raises again is ended with that error; the others go on as if nothing had happened,
since a preemption changes no output. If all pass, it was their meeting that failed (memory, say), and each has a token
more than before, so that this ends.

    running  a b c  --raises-->  waiting a b c, all suspects  -->  a alone: a token
                                                                   b alone: raises, b ends with the error
                                                                   c alone: a token  -->  a c run together again
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import Request

if TYPE_CHECKING:
    from minivllm.scheduler.base import SchedulerBase
    from minivllm.scheduler.beam import ForkingScheduler

logger = logging.getLogger("minivllm")


class Suspects:
    """A Scheduler around another one, of which `base` is the scheduler itself."""

    def __init__(self, inner: ForkingScheduler, base: SchedulerBase):
        self.inner = inner
        self.base = base
        self._suspects: dict[str, None] = {}  # ids, in the order of their trials

    def add(self, req: Request) -> None:
        self.inner.add(req)

    def abort(self, req_id: str) -> None:
        self._suspects.pop(req_id, None)
        self.inner.abort(req_id)

    def fork(self, forks: Sequence[tuple[str, Request]], ends: Sequence[str]) -> None:
        for req_id in ends:
            self._suspects.pop(req_id, None)
        self.inner.fork(forks, ends)

    def schedule(self, now: float) -> StepPlan:
        if not self._suspects:
            return self.inner.schedule(now)
        alone, base = next(iter(self._suspects)), self.base
        for req in base.running[::-1]:
            if req.id != alone:
                base.preempt(req)
        queue = base.waiting
        base.waiting = [req for req in queue if req.id == alone]
        plan = self.inner.schedule(now)
        waits = {req.id for req in base.waiting}  # it may have been preempted meanwhile
        base.waiting = [*(req for req in queue if req.id != alone)]
        for req_id in waits:
            base.enqueue(base.requests[req_id])
        plan.stats.num_waiting = len(base.waiting)
        return plan

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        if out.is_failed and len(plan.num_tokens) > 1:
            logger.warning("trying each of the %d requests of the failed step alone", len(plan.num_tokens))
            self._suspects.update(dict.fromkeys(req_id for req_id in plan.num_tokens if req_id in self.base.requests))
            return self.inner.update(plan, StepOutput(is_lost=True))
        deltas = self.inner.update(plan, out)
        if self._suspects:
            for req_id in (*out.tokens, *out.errors):
                self._suspects.pop(req_id, None)
        return deltas

    def check(self) -> None:
        self.inner.check()
        assert self._suspects.keys() <= self.base.requests.keys(), "a request that has gone is suspected"
