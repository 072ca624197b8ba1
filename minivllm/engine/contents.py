"""What items (request.Item) hold, on its way to the workers: once a digest, when the first request that names it
arrives, and until the last one has ended. Plans name it by its digest, so that what they cost does not grow with what a
prompt has beside its tokens.

    add a {x: bytes}   workers hold x                    plan   encode [x]    a runs
    add b {x: bytes}   -                                 plan                 b runs
    a ends             -
    b ends             workers drop x, behind all plans that were made before    plan   forget [x]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from minivllm.request import EngineRequest


class Tells(Protocol):
    def tell(self, method: str, *args: object) -> None:
        """As an executor's."""
        ...


class Contents:
    def __init__(self, workers: Tells):
        self._workers = workers
        self._of: dict[str, Sequence[str]] = {}  # by request that lives: digests
        self._num_users: Counter[str] = Counter()  # by digest

    def take(self, req: EngineRequest) -> None:
        """It has arrived."""
        if req.contents:
            self._of[req.id] = tuple(req.contents)
            for digest, content in req.contents.items():
                if not self._num_users[digest]:
                    self._workers.tell("hold_item", digest, content)
                self._num_users[digest] += 1

    def drop(self, req_ids: Iterable[str]) -> None:
        """They have ended."""
        for req_id in req_ids:
            for digest in self._of.pop(req_id, ()):
                self._num_users[digest] -= 1
                if not self._num_users[digest]:
                    del self._num_users[digest]
                    self._workers.tell("drop_item", digest)
