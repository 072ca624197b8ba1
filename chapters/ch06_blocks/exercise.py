"""Chapter 6: write the pool of blocks. Fill in `take`, `touch` and `release`, then run the tests:

python -m minivllm chapter 6 --exercise
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class BlockPool:
    """Which blocks are free, and how many block tables name each of the others.

    No method may look through the free blocks: each costs the same in a pool of any size.
    """

    def __init__(self, num_blocks: int):
        self.names = [0] * num_blocks  # of each block: how many tables name it
        self.free = OrderedDict.fromkeys(range(num_blocks))  # the next to be taken first

    def take(self, n: int) -> list[int]:
        """The first n free blocks, each named by one table now.

        OutOfBlocks, and nothing taken, if there are fewer.
        """
        raise NotImplementedError("yours to write")

    def touch(self, block: int) -> None:
        """One more table names the block. It may have been free, anywhere among the others."""
        raise NotImplementedError("yours to write")

    def release(self, blocks: Iterable[int]) -> None:
        """One table fewer names each. Who is named by none is free, behind all others."""
        raise NotImplementedError("yours to write")
