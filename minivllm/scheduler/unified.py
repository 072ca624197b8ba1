"""UnifiedScheduler: vLLM V1's. There is no prefill phase and no decode phase, only {request_id: num_tokens}.

Every request has tokens that it knows (prompt and output) and tokens that are computed; a step lets the second number
catch up with the first, under one token budget. Running requests come first, so decodes are never held up by a new
prompt; what is left of the budget goes to waiting requests, whose prompts are cut to fit it (chunked prefill, from
Sarathi: Agrawal et al. 2023). When blocks run out, the request served last gives its own back and is recomputed later.
"""

from __future__ import annotations

from minivllm.plan import StepPlan
from minivllm.scheduler.base import SchedulerBase


class UnifiedScheduler(SchedulerBase):
    def schedule(self, now: float) -> StepPlan:
        plan = self._new_plan()
        budget = self._schedule_running(plan, self.limits.max_num_batched_tokens)
        if not plan.stats.num_preempted:  # blocks that were just taken from one request are not for a new one
            self._schedule_waiting(plan, budget)
        return self._finish_plan(plan)

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            req = self.waiting[-1]
            num_cached = self.kv.lookup(req)
            new_tokens = req.num_tokens - num_cached
            if new_tokens > budget:
                if not self.chunked_prefill:
                    break
                new_tokens = budget
            if not self._try_admit(plan, req, num_cached, new_tokens):
                break
            budget -= new_tokens
