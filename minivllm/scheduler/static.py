"""StaticScheduler: batches of whole requests, as they were served before Orca made the iteration the unit.

Wait until the engine is idle, take the next max_num_seqs requests (fewer if the pool has no room for their prompts),
compute all prompts, decode until the LAST of them has ended, and only then look at the queue again. Who arrives in
between waits for the whole batch; who ends early leaves a place that nobody takes.

    waiting --open--> seats --prefill, over as many steps as the token budget takes--> running --ends--> ended -+
       ^------------------------------------- nobody runs any more: their blocks and rows are given back -------+

Kinder than the original (FasterTransformer, transformers' generate): a row that has ended burns no compute, prompts are
not padded to the longest of them, and a result is delivered when it is there and not with its batch's last. What is
kept is what costs memory and time in the queue: the ended request's KV and its place.

The original reserved memory for the longest output and could not run short. With a paged pool this one can: then the
blocks of ended requests go first, and only then is somebody preempted, who waits for the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.plan import StepPlan
from minivllm.request import Request
from minivllm.scheduler.base import SchedulerBase


class StaticScheduler(SchedulerBase):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert not self.chunked_prefill, "static batching computes prompts whole: scheduler.chunked_prefill=false"
        self._num_seats = 0  # of the open batch: places that the queue may still fill
        self._ended: list[Request] = []  # with their blocks and rows; empty when nobody runs

    def schedule(self, now: float) -> StepPlan:
        if not self.running:
            self._give_back_ended()
            self._num_seats = self._num_seats or self._open()
        plan = self._new_plan()
        self._schedule_prefills(plan)
        if not plan.num_tokens:
            self._schedule_running(plan, self.limits.max_num_batched_tokens)
        return self._finish_plan(plan)

    def _open(self) -> int:
        """Seats of a new batch. No more than can all decode in one step, and none for who is not here yet."""
        return min(len(self.waiting), self.limits.max_num_seqs, self.limits.max_num_batched_tokens)

    def _schedule_prefills(self, plan: StepPlan) -> None:
        budget = self.limits.max_num_batched_tokens
        while self._num_seats and self.waiting:
            req = self.waiting[-1]
            num_found = self.kv.lookup(req)
            new_tokens = req.num_tokens - num_found
            if new_tokens > budget or not self.items.is_within_step(req):
                return  # the next step goes on here, before anybody decodes
            if not self._try_admit(plan, req, num_found, new_tokens):
                break
            budget -= new_tokens
            self._num_seats -= 1
        self._num_seats = 0

    def _make_room(self, plan: StepPlan, req: Request, new_tokens: int) -> Sequence[int] | None:
        if self._ended:
            self._give_back_ended()
            if (blocks := self.kv.allocate(req, new_tokens)) is not None:
                return blocks
        return super()._make_room(plan, req, new_tokens)

    def _retire(self, req: Request) -> None:
        self.in_flight.drop(req)
        self._ended.append(req)
        del self.requests[req.id]
        if not self.running:
            self._give_back_ended()

    def _give_back_ended(self) -> None:
        for req in self._ended:
            self.kv.free(req)
            self.members.leave(req.id)
        self._ended = []

    def check(self) -> None:
        super().check()
        assert self.running or not self._ended, "nobody runs, and ended requests keep their blocks"
        num_members = len(self.running) + len(self._ended) + self._num_seats
        assert num_members <= self.limits.max_num_seqs, "the batch has more members than seats"
