"""GroupPrefix: a prefix cache over KV groups. What it finds is the longest prefix that every group can serve.

A group that keeps all tokens serves a prefix if it has all its blocks; one with a window if it has those that the next
token reads, however many before them are gone. So a shorter prefix may fail where a longer one does not, and the answer
is found as a fixed point: each group in turn cuts the prefix to what it can serve, until all agree (the idea of vLLM
V1's HybridKVCacheCoordinator).

Each group has an index of its own, over keys that all share. To the manager this is a PrefixIndex whose lists of blocks
have an entry for each group (kv_groups.py); `absent` stands for blocks that nobody needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.kv.base import PrefixIndex
from minivllm.kv_groups import Window, first_kept
from minivllm.request import Request


class GroupPrefix:
    def __init__(self, indexes: Sequence[PrefixIndex], windows: Sequence[Window], block_size: int, absent: int):
        """indexes: one a group, of the same kind; the first one's keys are all groups'."""
        self._groups = list(zip(indexes, windows, strict=True))
        self.block_size = block_size
        self.absent = absent

    def keys(self, req: Request, num_blocks: int, block_size: int) -> Sequence[Any]:
        return self._groups[0][0].keys(req, num_blocks, block_size)

    def match(self, keys: Sequence[Any], first: int = 0) -> list[int]:
        assert first == 0, "a prefix begins at its beginning"
        longest = len(keys)
        while True:  # until all groups agree
            found, before = [], longest
            for index, window in self._groups:
                begin = self._first(longest, window)
                blocks = index.match(keys[:longest], begin)
                longest = begin + len(blocks)
                found.append([self.absent] * begin + blocks)
            if longest == before:
                return [block for each in zip(*found, strict=True) for block in each]

    def publish(self, keys: Sequence[Any], first: int, blocks: Sequence[int]) -> None:
        num_groups = len(self._groups)
        for group, (index, _) in enumerate(self._groups):
            own = blocks[group::num_groups]
            num_gone = own.count(self.absent)  # the oldest ones: they left the window before they were published
            index.publish(keys, first + num_gone, own[num_gone:])

    def drop(self, block: int) -> bool:
        return any(index.drop(block) for index, _ in self._groups)

    def __contains__(self, block: int) -> bool:
        return any(block in index for index, _ in self._groups)

    def _first(self, num_blocks: int, window: Window) -> int:
        return min(num_blocks, first_kept(num_blocks * self.block_size, window, self.block_size))
