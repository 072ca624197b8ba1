"""LightWorker: what SimulatedWorker says of lengths and time, for thousands of replicas in one process.

It builds no inputs and draws no tokens: every token is the same one, and a request says as many as its max_tokens. So
a step costs Python nothing for a request that decodes; who is still in its prompt is looked at. Plans and times are
those of a SimulatedWorker (a test compares them). What a token is, or guesses, it does not know: speculative decoding
needs the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from minivllm.facts import WorkerFacts
from minivllm.plan import StepOutput, StepPlan
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import Step
from minivllm.simulate.worker import SimulatedWorker, moving_seconds
from minivllm.simulate.workload import FIRST_TOKEN

SAID = [FIRST_TOKEN]  # in every step, by everybody; nobody changes it


class LightWorker:
    def __init__(
        self,
        like: SimulatedWorker,
        stopwatch: VirtualClock,
        facts: WorkerFacts | None = None,
        step_seconds: Callable[[Step], float] | None = None,
    ):
        """like: whose cost and, unless they are given, facts it shares; one for all replicas. step_seconds: in the
        place of its cost's, where a step is more than what this worker does."""
        self._like = like
        self.cost = like.cost
        self._block_tokens = like.block_tokens
        self._step_seconds = step_seconds or like.cost.step_seconds
        self._stopwatch = stopwatch
        self._facts = facts or like.facts()
        self._prompts: dict[str, int] = {}  # of requests that have tokens to compute before they say one: how many

    def facts(self) -> WorkerFacts:
        return replace(self._facts, decisions=[*self._facts.decisions])  # an engine writes its own below them

    def measure_costs(self) -> dict[str, float]:
        return self._like.measure_costs()

    def execute(self, plan: StepPlan) -> StepOutput:
        self._leave_and_join(plan)
        seconds, out = moving_seconds(self.cost, plan, self._block_tokens), StepOutput()
        if num_tokens := plan.num_tokens:
            out.tokens = dict.fromkeys(num_tokens, SAID)
            if self._prompts:
                self._silence(plan, out.tokens)
            count = len(num_tokens)
            num_new = np.fromiter(num_tokens.values(), np.int64, count)
            start = np.fromiter(plan.start.values(), np.int64, count)
            seconds += self._step_seconds(Step(num_new, start, len(out.tokens)))
        self._stopwatch.now += seconds
        return out

    def _leave_and_join(self, plan: StepPlan) -> None:
        for req_id in plan.leaves:
            self._prompts.pop(req_id, None)
        for join in plan.joins:
            self._prompts[join.req_id] = len(join.token_ids)

    def _silence(self, plan: StepPlan, said: dict[str, list[int]]) -> None:
        """Take those away whose prompts this step does not finish; the others decode from now on."""
        for req_id in [req_id for req_id in self._prompts if req_id in said]:
            if plan.start[req_id] + plan.num_tokens[req_id] < self._prompts[req_id]:
                del said[req_id]
            else:
                del self._prompts[req_id]
