"""The solution of chapter 6's exercise."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class BlockPool:
    """Which blocks are free, and how many block tables name each of the others."""

    def __init__(self, num_blocks: int):
        self.names = [0] * num_blocks  # of each block: how many tables name it
        self.free = OrderedDict.fromkeys(range(num_blocks))  # the next to be taken first

    def take(self, n: int) -> list[int]:
        if n > len(self.free):
            raise OutOfBlocks(f"{n} blocks wanted, {len(self.free)} are free")
        blocks = [self.free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self.names[block] = 1
        return blocks

    def touch(self, block: int) -> None:
        if self.names[block] == 0:
            del self.free[block]
        self.names[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.names[block] -= 1
            if self.names[block] == 0:
                self.free[block] = None
