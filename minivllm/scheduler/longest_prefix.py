"""LongestPrefix: SGLang's order. Of those who wait, whose prompt the prefix cache holds the longest beginning of comes
first, since that beginning may be evicted while it waits (Zheng et al., "SGLang", NeurIPS 2024, section 3: near to a
depth-first walk of the tree, which no order of all requests beats).

Two rules of SGLang's beside it (sgl-project/sglang, `srt/managers/schedule_policy.py`, 2026). Requests that nothing is
cached of, but that begin as an earlier one in the queue does, wait for it: then it is computed once. And a long queue
is served as it stands, since all this takes time.

Not the original: who was preempted comes before all others, by arrival, so that two requests cannot push each other out
for ever; SGLang sorts it in like a new one, and takes first from those with the shortest answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.kv.base import KVManager
from minivllm.plan import StepPlan
from minivllm.request import Request
from minivllm.scheduler.around import Around
from minivllm.scheduler.policy import ByKey
from minivllm.scheduler.protocol import InnerScheduler

MOST_SORTED = 128  # requests that wait
BEGINNING = 32  # tokens: who has no more than these cached, and shares as many, waits for the other
PREEMPTED, NEW, FOLLOWS = range(3)


class LongestPrefix(ByKey):
    def __init__(self, kv: KVManager):
        self.kv = kv

    def order(self, req: Request, sequence: int) -> tuple:
        return (NEW, 0, sequence)

    def around(self, inner: InnerScheduler) -> InnerScheduler:
        return Sorting(inner, self)

    def orders(self, waiting: Sequence[Request]) -> dict[str, tuple]:
        """Those that are to change. waiting: in service order. A search's beams keep theirs."""
        changed, begun = {}, set()
        for req in waiting:
            if req.beam is None:
                rank, num_cached = self._rank(req, begun)
                order = rank, -num_cached, *req.order[2:]
                if order != req.order:
                    changed[req.id] = order
        return changed

    def _rank(self, req: Request, begun: set[tuple]) -> tuple[int, int]:
        """(rank, tokens cached). begun: beginnings of requests ahead of it, to which its own is added."""
        if req.num_preemptions:
            return PREEMPTED, 0
        num_cached = self.kv.lookup(req)
        if num_cached <= BEGINNING and req.num_tokens > BEGINNING:
            beginning = req.adapter, req.cache_salt, *req.token_ids[:BEGINNING]
            if beginning in begun:
                return FOLLOWS, 0
            begun.add(beginning)
        return NEW, num_cached


class Sorting(Around):
    """Sorts the queue before each step."""

    def __init__(self, inner: InnerScheduler, policy: LongestPrefix):
        super().__init__(inner)
        self.policy = policy

    def schedule(self, now: float) -> StepPlan:
        if len(self.waiting) <= MOST_SORTED and (orders := self.policy.orders(self.waiting[::-1])):
            self.inner.reorder(orders)
        return self.inner.schedule(now)
