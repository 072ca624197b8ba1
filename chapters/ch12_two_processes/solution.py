"""The solution of chapter 12's exercise."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

END = 0  # the token that ends an answer


@dataclass(eq=False)  # no two requests are equal, not even under one id
class Request:
    id: str
    blocks: list[int]
    num_in_flight: int = 0  # steps that have it and have not landed


class Core:
    """A step loop whose device runs elsewhere: steps are submitted, and land later, in their order."""

    def __init__(self, num_blocks: int):
        self.free = list(range(num_blocks))
        self.live: dict[str, Request] = {}
        self.in_flight: deque[list[Request]] = deque()  # the oldest first

    def add(self, req_id: str, num_blocks: int) -> bool:
        """False, and nothing is taken, if the id is in use or too few blocks are free."""
        if req_id in self.live or num_blocks > len(self.free):
            return False
        self.live[req_id] = Request(req_id, [self.free.pop() for _ in range(num_blocks)])
        return True

    def submit(self) -> None:
        """One more step, with all who live. Until it lands, the device may write to their blocks."""
        self.in_flight.append(list(self.live.values()))
        for request in self.live.values():
            request.num_in_flight += 1


class AbortingCore(Core):
    def abort(self, req_id: str) -> None:
        """Nobody waits for this answer any more; one that has ended already is no error."""
        request = self.live.pop(req_id, None)
        if request is not None and not request.num_in_flight:
            self.free += request.blocks

    def land(self, tokens: list[int]) -> dict[str, int]:
        """The oldest step has ended and gives tokens[i] for its i-th request. -> {id: token}."""
        wanted: dict[str, int] = {}
        for request, token in zip(self.in_flight.popleft(), tokens, strict=True):
            request.num_in_flight -= 1
            if self.live.get(request.id) is request:
                wanted[request.id] = token
                if token == END:
                    self.abort(request.id)
            elif not request.num_in_flight:
                self.free += request.blocks
        return wanted
