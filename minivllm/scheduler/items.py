"""Which items (request.Item) the workers hold: the columns `encode` and `forget` of a plan, filled by counting.

An item is made ready when the first request that names it joins, and dropped when the last one has left. So it crosses
to a worker once, however many requests name it; what a preemption took away is made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minivllm.plan import StepPlan
from minivllm.request import Request


class HeldItems:
    def __init__(self) -> None:
        self._users: dict[str, set[str]] = {}  # by digest: requests that have joined; only counted, never in order
        self._of: dict[str, tuple[str, ...]] = {}  # by request: digests
        self._unsaid: list[str] = []  # forgotten by plans that have not run

    def fill(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        """By the plan's leaves and joins. requests: those that live, by id."""
        left, self._unsaid = self._unsaid, []
        for req_id in plan.leaves:
            left += self._release(req_id)
        for join in plan.joins:
            if join.items:
                self._of[join.req_id] = tuple(dict.fromkeys(item.digest for item in join.items))
                plan.encode += self._use(join.req_id, requests[join.req_id].contents)
        plan.forget = [digest for digest in left if digest not in self._users]

    def take_back(self, plan: StepPlan) -> None:
        """It has not run. Whoever joined in it leaves, and joins again."""
        self._unsaid += plan.forget

    def _use(self, req_id: str, contents: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Those that nobody else names."""
        for digest in self._of[req_id]:
            if digest not in self._users:
                self._users[digest] = set()
                yield digest, contents[digest]
            self._users[digest].add(req_id)

    def _release(self, req_id: str) -> Iterator[str]:
        """Those that nobody else names."""
        for digest in self._of.pop(req_id, ()):
            self._users[digest].discard(req_id)
            if not self._users[digest]:
                del self._users[digest]
                yield digest

    def check(self) -> None:
        named = {(digest, req_id) for req_id, digests in self._of.items() for digest in digests}
        assert named == {(d, r) for d, users in self._users.items() for r in users}, "an item's users are miscounted"
        assert all(self._users.values()), "an item is held that nobody names"
