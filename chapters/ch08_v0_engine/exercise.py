"""Chapter 8: choose a victim, and bring it back. Fill in `make_room`, then run the tests:

python -m minivllm chapter 8 --exercise
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Request:
    id: str
    tokens: list[int]  # the prompt, then the answer so far
    num_computed: int = 0  # of these, how many have their K and V in its blocks
    blocks: list[int] = field(default_factory=list)


def make_room(
    request: Request,
    running: list[Request],
    waiting: list[Request],
    free: list[int],
    block_size: int,
) -> bool:
    """Give `request`, one of those that run, blocks for all of its tokens.

    While too few blocks are free, the last of `running` is preempted: its blocks are free, nothing
    of it counts as computed, and it is the first to be let in again. Both lists are in order of
    arrival, before and after. False if `request` had to go itself.
    """
    raise NotImplementedError("yours to write")
