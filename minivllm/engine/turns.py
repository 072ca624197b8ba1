"""A queue in which clients take turns: however much one has put there, the next of another waits for one of its own.
And it finds a worker free, for all but one of them at most work for one client.

Round robin (Nagle, "On Packet Switches with Infinite Storage", RFC 970, 1985), by items and not by their cost, for work
whose cost is bounded. Among the items of a client, and where there is one client, first come, first served.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Thread-safe."""

    def __init__(self, num_workers: int) -> None:
        """num_workers: who call `get`. One alone is everybody's."""
        self._most_each = max(1, num_workers - 1)
        self._lines: dict[str, deque[T]] = {}  # by client, in the order of their turns; none is empty
        self._at_work: Counter[str] = Counter()  # how many have an item of a client
        self._change = threading.Condition()

    def put(self, item: T, client: str = "") -> None:
        with self._change:
            self._lines.setdefault(client, deque()).append(item)
            self._change.notify()

    def get(self) -> tuple[T, str]:
        """(item, whose it is). Waits for one of a client that has a worker left; that one is free again once `done`."""
        with self._change:
            while (client := self._next()) is None:
                self._change.wait()
            self._at_work[client] += 1
            line = self._lines.pop(client)
            item = line.popleft()
            if line:
                self._lines[client] = line
            return item, client

    def done(self, client: str) -> None:
        with self._change:
            self._at_work[client] -= 1
            if not self._at_work[client]:
                del self._at_work[client]
            self._change.notify()

    def _next(self) -> str | None:
        return next((client for client in self._lines if self._at_work[client] < self._most_each), None)
