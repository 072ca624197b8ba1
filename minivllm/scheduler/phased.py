"""PhasedScheduler: vLLM V0's. A step is all prefill or all decode, and prefill goes first.

A waiting prompt that fits is computed whole, before any running request gets its next token; that is what V1 changed.
Sequences of one prompt (n > 1) form a group: the first one computes the prompt, the others fork its blocks and copy
only the one that they will write to. A group is preempted as a whole, the one that arrived last first, and comes back
before anybody who arrived later.

Not the original: V0 sampled the first token of all n sequences in the prefill step; here a forked sequence computes the
prompt's last token again, one step later. V0 kept groups that it swapped out in a queue of their own and let nobody
start while it held one; here they return to the one queue, whose head has the same effect.
"""

from __future__ import annotations

from minivllm.errors import NeverFits
from minivllm.plan import StepPlan
from minivllm.request import Request
from minivllm.scheduler.base import SchedulerBase


class PhasedScheduler(SchedulerBase):
    def schedule(self, now: float) -> StepPlan:
        plan = self._new_plan()
        self._schedule_prefills(plan)
        if not plan.num_tokens:
            self._schedule_decodes(plan)
        return self._finish_plan(plan)

    def _schedule_prefills(self, plan: StepPlan) -> None:
        """Whole prompts in order of service, until one does not fit or would only decode."""
        budget = self.limits.max_num_batched_tokens
        for req in reversed(self.waiting.copy()):
            if len(self.running) == self.limits.max_num_seqs:
                break
            if self._prompt_is_being_computed(req):
                continue  # it will fork its group's first sequence in the next step
            num_found = self._find(req)
            new_tokens = req.num_tokens - num_found
            if new_tokens == 1 or new_tokens > budget or not self._try_admit(plan, req, num_found, new_tokens):
                break
            budget -= new_tokens

    def _schedule_decodes(self, plan: StepPlan) -> None:
        budget = self._schedule_running(plan, self.limits.max_num_batched_tokens)
        if plan.stats.num_preempted:
            return
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            req = self.waiting[-1]  # back from the host, or a fork: one token to compute, like those that run
            num_found = self._find(req)
            if req.num_tokens - num_found != 1 or not self._try_admit(plan, req, num_found, 1):
                break
            budget -= 1

    def _prompt_is_being_computed(self, req: Request) -> bool:
        """In this plan, or in one that is in flight."""
        relatives = (r for r in self.running if req.group and r.group == req.group)
        computing = (r for r in relatives if r.num_in_flight and r.num_computed_tokens < r.num_prompt_tokens)
        return req.num_output_tokens == 0 and any(computing)

    def _find(self, req: Request) -> int:
        """What req need not compute: its own KV on the host, its group's prompt, or an equal prefix."""
        num_found = self.kv.lookup(req)
        for relative in self.running:
            if req.group and relative.group == req.group and relative.num_computed_tokens >= req.num_prompt_tokens:
                if num_found < req.num_prompt_tokens - 1 and req.num_output_tokens == 0:
                    return self.kv.fork(relative, req) or num_found
                break
        return num_found

    def _check_fits(self, req: Request) -> None:
        super()._check_fits(req)
        group = [r for r in self.requests.values() if req.group and r.group == req.group]
        lengths = [r.num_final_slots(self.limits.max_model_len) for r in (*group, req)]
        if not self.fit_together(lengths):
            raise NeverFits(
                f"the {len(lengths)} sequences of this request run together and may reach {sum(lengths)} tokens, more "
                f"than fit into a KV pool of {self.kv.usage.size}. Lower n or max_tokens, or give the pool more blocks",
                "n",
            )

    def _victims(self) -> list[Request]:
        """The group served last, its last sequence first."""
        last = self.running[-1]
        return [r for r in reversed(self.running) if r is last or (r.group and r.group == last.group)]
