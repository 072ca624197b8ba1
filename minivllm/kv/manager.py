"""PagedKVManager: block tables that grow on demand, share prefixes and give everything back.

A request holds ceil(tokens / block_size) blocks and no more, so it wastes less than one block (the PagedAttention
paper, Kwon et al. 2023, section 4). For a request with num_computed = c and n tokens in this step:

    | cached prefix | computed earlier |  n new  | lookahead |
    0           lookup()               c       c+n          the table covers this far, rounded up to a block
    |------ published by commit() -----|  only full blocks of computed, final tokens

The manager knows nothing of phases, policies or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.kv.base import KVUsage, PrefixIndex
from minivllm.kv.pool import BlockPool
from minivllm.request import Request


@dataclass(slots=True)
class Table:
    """One request's blocks, in token order. The first num_published are in the prefix index."""

    blocks: list[int]
    num_published: int


class PagedKVManager:
    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex):
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = index
        self.tables: dict[str, Table] = {}
        self.usage = KVUsage(num_total=num_blocks, num_free=num_blocks)
        self._found: dict[str, list[int]] = {}  # what lookup() promised to the allocate() that follows it

    def lookup(self, req: Request) -> int:
        if req.params.prompt_logprobs is not None:
            return 0  # their logits must be computed, and a cached token gives none
        # A prompt found whole would leave nothing to compute and so no logits: its last token is always computed.
        num_blocks = (req.num_tokens - 1) // self.block_size
        found = self.index.match(self.index.keys(req, num_blocks, self.block_size)[:num_blocks])
        self._found[req.id] = found
        return len(found) * self.block_size

    def allocate(self, req: Request, new_tokens: int, lookahead: int = 0) -> Sequence[int] | None:
        table = self.tables.get(req.id)
        if table is None:
            return self._admit(req, new_tokens + lookahead)
        missing = self._blocks_for(req.num_computed_tokens + new_tokens + lookahead) - len(table.blocks)
        if missing <= 0:
            return ()
        if missing > self.pool.num_free:
            return None
        new = self._take(missing)
        table.blocks += new
        return new

    def _admit(self, req: Request, new_tokens: int) -> list[int] | None:
        found = self._found.pop(req.id, [])
        missing = self._blocks_for(len(found) * self.block_size + new_tokens) - len(found)
        # A found block that is free now will not be free once it is touched.
        num_found_free = sum(self.pool.ref_counts[block] == 0 for block in found)
        if missing > self.pool.num_free - num_found_free:
            return None
        for block in found:
            self.pool.touch(block)
        self.usage.num_cached -= num_found_free
        blocks = found + self._take(missing)
        self.tables[req.id] = Table(blocks, num_published=len(found))
        return list(blocks)

    def commit(self, req: Request) -> None:
        table = self.tables[req.id]
        full = req.num_computed_tokens // self.block_size
        if full <= table.num_published:
            return
        keys = self.index.keys(req, full, self.block_size)[:full]
        self.index.publish(keys, table.num_published, table.blocks[table.num_published : full])
        table.num_published = full

    def free(self, req: Request) -> None:
        self._found.pop(req.id, None)
        table = self.tables.pop(req.id, None)
        if table is None:
            return
        freed = self.pool.release(reversed(table.blocks))
        self.usage.num_cached += sum(block in self.index for block in freed)
        self.usage.num_free = self.pool.num_free

    def forget_cached(self) -> None:
        """Evict every reusable prefix that no request names (failure injection; also: the weights have changed)."""
        for block in self.pool.free_list():
            self.index.drop(block)
        self.usage.num_cached = 0

    def check(self) -> None:
        self.pool.check()
        named = [0] * self.pool.num_blocks
        for table in self.tables.values():
            assert len(table.blocks) == len(set(table.blocks)), "a table names a block twice"
            for block in table.blocks:
                named[block] += 1
        assert named == self.pool.ref_counts, "a reference count differs from the tables that name the block"
        cached = sum(block in self.index for block in self.pool.free_list())
        expected = KVUsage(self.pool.num_blocks, self.pool.num_free, cached)
        assert self.usage == expected, f"usage says {self.usage}, the pool {expected}"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take(self, n: int) -> list[int]:
        blocks = self.pool.take(n)
        self.usage.num_cached -= sum(self.index.drop(block) for block in blocks)
        self.usage.num_free = self.pool.num_free
        return blocks
