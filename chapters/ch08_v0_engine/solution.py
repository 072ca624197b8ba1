"""The solution of chapter 8's exercise."""

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
    num_missing = -(-len(request.tokens) // block_size) - len(request.blocks)
    while num_missing > len(free):
        victim = running.pop()
        free += victim.blocks
        victim.blocks, victim.num_computed = [], 0
        waiting.insert(0, victim)
        if victim is request:
            return False
    request.blocks += [free.pop() for _ in range(num_missing)]
    return True
