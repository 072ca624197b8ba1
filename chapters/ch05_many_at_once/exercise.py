"""Chapter 5: write a batch that people enter and leave. Fill in `step`, then run the tests:

python -m minivllm chapter 5 --exercise
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass
class Request:
    name: str
    num_left: int  # tokens that it still wants, at least one


class Batcher:
    def __init__(self, seats: int):
        self.seats = seats
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()  # the first to have come is the first

    def step(self) -> list[str]:
        """Fill the free seats, make a token for everybody who sits, let go of those who have all.

        Returns the names of those who got a token, in the order in which they sat down. Whoever
        gets their last token leaves in the same step, so that the seat is free in the next one.
        """
        raise NotImplementedError("yours to write")
