"""What one rendering of a chat template may take: steps, work, and time.

A step is a round of a loop or a call. Work is what a step may do at one go, in characters that it reads or makes; an
item of a list counts as ITEM of them. Work is charged before it is done, for all that a value holds, as often as it
holds it: a list of lists of lists that are all the same one is small, and takes for ever to print. The clock is looked
at with every step, since templates may have long bodies. No call that has been paid for takes longer than some tens of
milliseconds, so what is stopped is stopped soon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_STEPS = 250_000
MAX_WORK = 2**28
MAX_SECONDS = 10.0
ITEM = 128  # characters
ATOMS = {int, float, bool, type(None)}


class Budget:
    __slots__ = ("clock", "deadline", "steps", "work")

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """clock: in seconds."""
        self.steps, self.work, self.clock = MAX_STEPS, MAX_WORK, clock
        self.deadline = clock() + MAX_SECONDS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise SecurityError(f"it takes over {MAX_STEPS:,} steps")
        if self.clock() > self.deadline:
            raise SecurityError(f"it takes over {MAX_SECONDS:g} s")

    def spend(self, work: int) -> None:
        self.work -= work
        if self.work < 0:
            raise SecurityError("it reads or makes too much")

    def counted(self, items: Iterable, each: int = 0) -> Iterator:
        """each: the work of an item."""
        for item in items:
            self.step()
            self.spend(each)
            yield item

    def read(self, *values: Any, times: int = 1) -> None:
        """Pay for going through them, so often."""
        left, each = list(values), times * ITEM
        while left and self.work >= 0:
            value = left.pop()
            kind = type(value)
            if kind is str:
                self.work -= times * len(value)
            elif kind is list or kind is tuple:
                self.work -= each * len(value)
                left += value
            elif kind is dict:
                self.work -= 2 * each * len(value)
                left += value
                left += value.values()
            elif kind not in ATOMS:
                left += self._inside(value, each)
        self.spend(0)

    def _inside(self, value: Any, each: int) -> Iterable:
        """What it holds: a subclass of what JSON is made of, or one of Jinja's or Python's own."""
        if isinstance(value, Namespace):
            return [value._Namespace__attrs]  # which printing it shows
        if isinstance(value, Mapping):
            return [dict(value)]
        if isinstance(value, str):
            return [str(value)]
        if isinstance(value, list):
            return [list.copy(value)]
        if isinstance(value, tuple):
            return [list(value)]
        if isinstance(value, MappingView | range):
            self.spend(each * len(value))
            return () if isinstance(value, range) else list(value)
        return ()

    def indent(self, value: Any, width: int) -> None:
        """Pay for writing it with every item on a line of its own."""
        left = [(value, 1)]
        while left:
            value, depth = left.pop()
            if isinstance(value, Mapping):
                value = list(value.values())
            if isinstance(value, list | tuple):
                self.spend(len(value) * (ITEM + width * depth))
                left += [(item, depth + 1) for item in value]
