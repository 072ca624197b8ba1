"""Chapter 9: write the prefix cache. Fill in `lookup` and `admit`, then run the tests:

python -m minivllm chapter 9 --exercise
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class Blocks:
    """A pool, and what its blocks hold. This part is given."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.names = [0] * num_blocks  # of each block: how many tables name it
        self.free = OrderedDict.fromkeys(range(num_blocks))  # the next to be taken first
        self.block_of: dict[Hashable, int] = {}  # key -> the block that holds these tokens after that beginning
        self.key_of: dict[int, Hashable] = {}

    def keys(self, tokens: Sequence[Hashable]) -> list[Hashable]:
        """Of each full block: its tokens, and the key of the block before it."""
        found: list[Hashable] = []
        for i in range(len(tokens) // self.block_size):
            block = tuple(tokens[i * self.block_size : (i + 1) * self.block_size])
            found.append((found[-1] if found else None, block))
        return found

    def take(self) -> int:
        """The next free block, named once. What it held is forgotten."""
        block, _ = self.free.popitem(last=False)
        self.names[block] = 1
        self.block_of.pop(self.key_of.pop(block, None), None)
        return block

    def publish(self, tokens: Sequence[Hashable], table: list[int]) -> None:
        """These tokens have been computed: their full blocks can be found from now on."""
        for key, block in zip(self.keys(tokens), table, strict=False):
            if key not in self.block_of:
                self.block_of[key] = block
                self.key_of[block] = key

    def release(self, table: list[int]) -> None:
        """A request has ended. Its last block is the first to be free, so that a beginning outlives its end."""
        for block in reversed(table):
            self.names[block] -= 1
            if self.names[block] == 0:
                self.free[block] = None


class PrefixCache(Blocks):
    def lookup(self, tokens: Sequence[Hashable]) -> list[int]:
        """The blocks that hold the longest known beginning of a prompt.

        Never all of it: its last token must be computed, or nothing could be sampled.
        """
        raise NotImplementedError("yours to write")

    def admit(self, tokens: Sequence[Hashable]) -> list[int]:
        """A new request's table: what lookup finds, named once more, then blocks that are taken.

        OutOfBlocks, and nothing changed, if that is more than there is.
        """
        raise NotImplementedError("yours to write")
