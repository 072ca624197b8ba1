"""A queue in which clients take turns: however much one has put there, the next of another waits for one of its own.

Round robin (Nagle, "On Packet Switches with Infinite Storage", RFC 970, 1985), by items and not by their cost, for work
whose cost is bounded. Among the items of a client, and where there is one client, first come, first served.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Thread-safe."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}  # by client, in the order of their turns; none is empty
        self._change = threading.Condition()

    def put(self, item: T, client: str = "") -> None:
        with self._change:
            self._lines.setdefault(client, deque()).append(item)
            self._change.notify()

    def get(self) -> T:
        """Waits for one."""
        with self._change:
            while not self._lines:
                self._change.wait()
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            item = line.popleft()
            if line:
                self._lines[client] = line
            return item
