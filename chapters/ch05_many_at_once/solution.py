"""The solution of chapter 5's exercise."""

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
        while self.waiting and len(self.running) < self.seats:
            self.running.append(self.waiting.popleft())
        served = [request.name for request in self.running]
        for request in self.running:
            request.num_left -= 1
        self.running = [request for request in self.running if request.num_left > 0]
        return served
