"""Speculation with steps in flight: drafts for a step that was planned before anybody could have proposed them.

While step n runs, nobody knows how many of its drafts become output, nor what is proposed behind them. The scheduler
plans step n + 1 all the same, for the most that it can be (`StepPlan.ahead`): so many drafts, at the furthest place.
Here, where both are known once n has run, the plan becomes what it would have been, had it been made now:

    the plan        |------- known -------| n: 1 + k, at most | n + 1: 1 + k, at most |
    what it is      |------- known -------| n: 1 + 2 of k | n + 1: 1 + what was proposed |

So whoever computes the step sees plans as without an overlap, and tokens, K and V and their places are the same. What
the plan has too much of, slots and budget, is left unused. The scheduler does the same sum when the step is over
(scheduler/drafts.py: `complete`).

vLLM V1's asynchronous scheduling has the idea: placeholders in the scheduler, the true drafts where the model runs.
There a device sets the positions right; here this is the host's, which waits for a step's tokens before it starts the
next one. What overlaps is all that the scheduler and the clients' side do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from minivllm.plan import StepOutput, StepPlan
from minivllm.request import before_an_end


@dataclass(slots=True)
class _Row:
    num_known: int  # tokens
    stops: frozenset[int]  # tokens that end the request
    drafts: list[int]  # proposed for its next step


class DraftsAhead:
    """An `execute` around another, whose output must be there when it returns."""

    def __init__(self, execute: Callable[[StepPlan], StepOutput]):
        self._execute = execute
        self._rows: dict[str, _Row] = {}

    def __call__(self, plan: StepPlan) -> StepOutput:
        self._leave_and_join(plan)
        plan = self._exact(plan)
        out = self._execute(plan)
        for req_id in plan.num_tokens:
            row = self._rows[req_id]
            row.num_known += len(out.tokens.get(req_id, ()))
            row.drafts = before_an_end(out.drafts.get(req_id, ()), row.stops)
        return out

    def _leave_and_join(self, plan: StepPlan) -> None:
        for req_id in plan.leaves:
            self._rows.pop(req_id, None)  # not there if the step that it should have joined in failed
        for join in plan.joins:
            self._rows[join.req_id] = _Row(len(join.token_ids), join.params.end_token_ids, [])

    def _exact(self, plan: StepPlan) -> StepPlan:
        if not plan.ahead:
            return plan
        exact = replace(plan, num_tokens=dict(plan.num_tokens), start=dict(plan.start), drafts=dict(plan.drafts))
        exact.ahead = {}
        for req_id, most in plan.ahead.items():
            row = self._rows[req_id]
            drafts = row.drafts[:most]
            exact.start[req_id], exact.num_tokens[req_id] = row.num_known - 1, 1 + len(drafts)
            if drafts:
                exact.drafts[req_id] = drafts
        return exact
