"""Events: what happens in a simulated world, the earliest first.

At one instant the order is by kind (Order), then as they were told of. So a run is a function of what is put in.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Order(IntEnum):
    """Of what happens at one instant. A router hears of ends before it places who arrives then; a core takes all that
    has come before it goes on."""

    REPORT = 0
    ARRIVAL = 1
    HANDOVER = 2  # of a request whose prompt is computed, to where it goes on
    DELIVERY = 3
    CORE = 4


class Events:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, Order, int, Callable[..., None], tuple]] = []
        self._numbers = count()

    def at(self, moment: float, order: Order, act: Callable[..., None], *args: Any) -> None:
        assert moment >= self.now, "what has been cannot be changed"
        heappush(self._heap, (moment, order, next(self._numbers), act, args))

    def clear(self) -> None:
        """Nothing more will happen."""
        self._heap.clear()

    def run(self) -> None:
        """Until nothing more will happen."""
        heap = self._heap
        while heap:
            self.now, _, _, act, args = heappop(heap)
            act(*args)
