"""Fault isolation: a step that raises ends one request alone, where it can be told whose fault it was.

A step is one forward of many requests, and an exception does not say whose part of it raised. So nobody is ended for it
yet: those that were in it are preempted like any others, and then tried one after the other, each alone in its steps,
until it has a token. Whose step raises again is ended with that error; the others go on as if nothing had happened,
since a preemption changes no output. If all pass, it was their meeting that failed (memory, say), and each has a token
more than before, so that this ends.

    running  a b c  --raises-->  waiting a b c, to be tried  -->  a alone: a token
                                                                  b alone: raises, b ends with the error
                                                                  c alone: a token  -->  a c run together again
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import Request
from minivllm.scheduler.around import Around
from minivllm.scheduler.protocol import InnerScheduler

logger = logging.getLogger("minivllm")


class FaultIsolation(Around):
    def __init__(self, inner: InnerScheduler):
        super().__init__(inner)
        self._untried: dict[str, None] = {}  # who was in a failed step, in the order of their trials

    def abort(self, req_id: str) -> None:
        self._untried.pop(req_id, None)
        self.inner.abort(req_id)

    def fork(self, forks: Sequence[tuple[str, Request]], ends: Sequence[str]) -> None:
        for req_id in ends:
            self._untried.pop(req_id, None)
        self.inner.fork(forks, ends)

    def schedule(self, now: float) -> StepPlan:
        if self._untried:
            alone = next(iter(self._untried))
            self.inner.hold([req_id for req_id in self.requests if req_id != alone])
        return self.inner.schedule(now)

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        if out.is_failed and len(plan.num_tokens) > 1:
            logger.warning("trying each of the %d requests of the failed step alone", len(plan.num_tokens))
            self._untried.update(dict.fromkeys(req_id for req_id in plan.num_tokens if req_id in self.requests))
            return self.inner.update(plan, StepOutput(is_lost=True))
        deltas = self.inner.update(plan, out)
        if self._untried:
            for req_id in (*out.tokens, *out.pooled, *out.errors):
                self._untried.pop(req_id, None)
        return deltas

    def check(self) -> None:
        self.inner.check()
        assert self._untried.keys() <= self.requests.keys(), "a request that has gone is to be tried"
