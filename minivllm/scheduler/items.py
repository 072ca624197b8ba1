"""Which items (request.Item) the workers have ready: the columns `encode` and `forget` of a plan, filled by counting.

An item is made ready for the first request that names it and runs, in the step that lets that request in, and is
forgotten when the last one has left; what a preemption took away is made again. What an item holds is not here: it went
to the workers when its request arrived (engine/contents.py), and a plan names it by its digest.

To make one ready may cost as much as many steps (an encoder's pass over 30 seconds of sound), in which everybody who
decodes stands still, and what it becomes takes memory. So both are bounded, as tokens and blocks are, and whoever would
exceed a bound waits at the head of the queue: for the next step (`is_within_step`), or until somebody leaves
(`has_room`). vLLM V1's encoder budget and encoder cache are these two; it counts positions of the encoder, and here,
where a model's items all have as many, items.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.plan import StepPlan
from minivllm.request import Request


class HeldItems:
    def __init__(self, most_new: int | None = None, most: int | None = None):
        """most_new: items that a step makes ready, but always all of one request; most: that are ready at once. None:
        no bound."""
        self.most_new, self.most = most_new, most
        self._users: dict[str, set[str]] = {}  # by digest: requests that run; only counted, never in order
        self._of: dict[str, Sequence[str]] = {}  # by request: digests
        self._unmade: dict[str, None] = {}  # used, and made ready by the next plan
        self._unused: dict[str, None] = {}  # ready, and forgotten by the next plan
        self._unsure: dict[str, None] = {}  # in columns of plans that have not run: ready or not

    def has_room(self, req: Request) -> bool:
        """Whether its items may be ready beside those of all who run."""
        return self.most is None or len(self._users.keys() | _digests(req)) <= self.most

    def is_within_step(self, req: Request) -> bool:
        """Whether the next step may make its items ready, beside those of whoever was let in since the last plan."""
        if self.most_new is None or not self._unmade:
            return True
        num_new = sum(digest not in self._users and digest not in self._unused for digest in _digests(req))
        return not num_new or len(self._unmade) + num_new <= self.most_new

    def join(self, req: Request) -> None:
        if not req.items:
            return
        self._of[req.id] = digests = _digests(req)
        for digest in digests:
            if digest not in self._users:
                self._users[digest] = set()
                if digest in self._unused:
                    del self._unused[digest]
                else:
                    self._unmade[digest] = None
            self._users[digest].add(req.id)

    def leave(self, req_id: str) -> None:
        for digest in self._of.pop(req_id, ()):
            self._users[digest].discard(req_id)
            if not self._users[digest]:
                del self._users[digest]
                if digest in self._unmade:
                    del self._unmade[digest]
                else:
                    self._unused[digest] = None

    def drain(self, plan: StepPlan) -> None:
        """What is in both columns is forgotten, if it was ready, and then made ready."""
        plan.encode = list(self._unmade)
        plan.forget = list(self._unused | self._unsure)
        self._unmade, self._unused, self._unsure = {}, {}, {}

    def take_back(self, plan: StepPlan) -> None:
        """It has not run, or not to its end."""
        for digest in (*plan.encode, *plan.forget):
            self._unsure[digest] = None
            self._unused.pop(digest, None)
            if digest in self._users:
                self._unmade[digest] = None

    def check(self) -> None:
        named = {(digest, req_id) for req_id, digests in self._of.items() for digest in digests}
        assert named == {(d, r) for d, users in self._users.items() for r in users}, "an item's users are miscounted"
        assert all(self._users.values()), "an item is held that nobody names"
        assert self._unmade.keys() <= self._users.keys(), "an item is made ready that nobody names"
        assert not self._unused.keys() & self._users.keys(), "an item is forgotten that somebody names"
        assert self.most is None or len(self._users) <= self.most, "more items are held than there is room for"


def _digests(req: Request) -> Sequence[str]:
    """Without repetitions, in their order."""
    return tuple(dict.fromkeys(item.digest for item in req.items))
