"""What is in flight: plans whose output update() has not taken in, and who wants nothing of it any more.

A scheduler that plans ahead counts on these plans. `Request.num_in_flight` says how many tokens they add to a request:
planning raises it, update() lowers it as it turns the count into computed tokens, and `drop` sets it to zero when the
request leaves `running`. Nobody can call a plan back. So what was dropped is written down by plan and not by request:
an id that is preempted and planned again, or that is used by a new request, has a claim on the later plans alone.

    plan 7 {a b} --+-- plan 8 {a b} --+          b is preempted here: plans 7 and 8 owe it nothing
                   |                  |
                 land 7: b dropped  land 8: b dropped
"""

from __future__ import annotations

from collections.abc import Collection

from minivllm.plan import StepPlan
from minivllm.request import Request


class InFlight:
    def __init__(self) -> None:
        self._plans: dict[int, StepPlan] = {}  # by step
        self._dropped: dict[int, set[str]] = {}  # by step in flight

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, plan: StepPlan) -> None:
        plan.num_in_flight = len(self._plans)
        self._plans[plan.step] = plan

    def land(self, plan: StepPlan) -> Collection[str]:
        """Its output is here -> the requests that must get nothing of it."""
        del self._plans[plan.step]
        return self._dropped.pop(plan.step, ())

    def drop(self, req: Request) -> None:
        """It leaves `running`: what the plans in flight compute for it is not to be believed."""
        if req.num_in_flight:
            req.num_in_flight = 0
            for step, plan in self._plans.items():
                if req.id in plan.num_tokens:
                    self._dropped.setdefault(step, set()).add(req.id)

    def check(self, req: Request) -> None:
        plans = [
            plan
            for step, plan in self._plans.items()
            if req.id in plan.num_tokens and req.id not in self._dropped.get(step, ())
        ]
        ahead = bool(plans) and req.id in plans[0].ahead  # then its place there is known by now
        num_found = plans[0].start[req.id] - req.num_computed_tokens if plans and not ahead else 0
        assert req.num_in_flight == num_found + sum(plan.num_tokens[req.id] for plan in plans)
        assert self._dropped.keys() <= self._plans.keys(), "a plan that has landed is remembered"
