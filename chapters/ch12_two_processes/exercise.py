"""Chapter 12: abort in flight. Fill in `abort` and `land`, then run the tests:

python -m minivllm chapter 12 --exercise
"""

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
        """Nobody waits for this answer any more; one that has ended already is no error.

        Its id may be used again at once. Its blocks are free as soon as no step that is still in
        flight can write to them: now, or when the last such step lands.
        """
        raise NotImplementedError("yours to write")

    def land(self, tokens: list[int]) -> dict[str, int]:
        """The oldest step has ended and gives tokens[i] for its i-th request. -> {id: token}.

        In what is returned are those that live, and no others. END is the last token of an answer:
        its request lives no longer, though the next step may have it already.
        """
        raise NotImplementedError("yours to write")
