"""BlockPool: which blocks are free, in which order they will be reused, and how many tables name each one.

The free list is a doubly linked list threaded through two arrays (no node objects), so that taking the oldest block,
freeing one and pulling one out of the middle are all O(1) whatever the pool's size (vLLM V1's `FreeKVCacheBlockQueue`).
Its order is the eviction order. Tables are freed tail first, so in one prefix a later block always stands before the
earlier ones: least-recently-used order is leaf-first order, and an evicted prefix shrinks from its end.

    head = next to be taken                                     tail = freed last
    [never used ...][freed long ago: suffix ... prefix][freed now: suffix ... prefix]

The pool knows nothing of tokens or of prefixes: a block that still holds a reusable prefix is on the list like any
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from minivllm.errors import OutOfBlocks


class BlockPool:
    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts = [0] * num_blocks
        self._end = end = num_blocks  # sentinel: its next is the head, its previous the tail
        numbers = _numbers(num_blocks + 1)
        self._next = [*numbers[1:], 0]
        self._prev = [end, *numbers[:-1]]

    def take(self, n: int) -> list[int]:
        """The n oldest free blocks, each now named once. Raises OutOfBlocks, taking none, if there are fewer."""
        if n > self.num_free:
            raise OutOfBlocks(f"asked for {n} blocks, {self.num_free} of {self.num_blocks} are free")
        blocks, block = [], self._next[self._end]
        for _ in range(n):
            blocks.append(block)
            self.ref_counts[block] = 1
            block = self._next[block]
        self._link(self._end, block)
        self.num_free -= n
        return blocks

    def touch(self, block: int) -> None:
        """One more table names the block; a free one leaves the free list."""
        if self.ref_counts[block] == 0:
            self._link(self._prev[block], self._next[block])
            self.num_free -= 1
        self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """One table fewer names each block. Those that no table names any more go to the tail in this order;
        returned."""
        freed = []
        for block in blocks:
            self.ref_counts[block] -= 1
            assert self.ref_counts[block] >= 0, f"block {block} was freed more often than taken"
            if self.ref_counts[block] == 0:
                self._link(self._prev[self._end], block)
                self._link(block, self._end)
                freed.append(block)
        self.num_free += len(freed)
        return freed

    def free_list(self) -> Iterator[int]:
        """From the block that is taken next to the one that was freed last."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def newest_free(self) -> Iterator[int]:
        """The free list from its end."""
        block = self._prev[self._end]
        while block != self._end:
            yield block
            block = self._prev[block]

    def check(self) -> None:
        """What holds between any two steps. `debug.check` asks in each: of the loops only the walk is Python's."""
        free = list(self.free_list())
        assert len(free) == len(set(free)) == self.num_free, "the free list and its count disagree"
        assert not any(map(self.ref_counts.__getitem__, free)), "a block in use stands on the free list"
        num_unnamed = self.ref_counts.count(0)
        assert self.num_free == num_unnamed and min(self.ref_counts, default=0) >= 0, "free + in use != total"
        ring = [*free, self._end]
        followers = map(self._next.__getitem__, ring)
        assert list(map(self._prev.__getitem__, followers)) == ring, "the free list is torn"

    def _link(self, left: int, right: int) -> None:
        self._next[left] = right
        self._prev[right] = left


@lru_cache(maxsize=4)
def _numbers(count: int) -> tuple[int, ...]:
    """The same objects for all lists and pools: they are larger than a list's place for one."""
    return tuple(range(count))
