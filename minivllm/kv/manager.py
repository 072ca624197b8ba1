"""PagedKVManager: block tables that grow on demand, share what is equal and give everything back.

A request holds ceil(tokens / block_size) blocks and no more, so it wastes less than one block (the PagedAttention
paper, Kwon et al. 2023, section 4). For a request with c tokens computed, or to be by steps in flight, and n tokens in
this step:

    | found by lookup() | computed earlier |  n new  | lookahead |
    0                                      c       c+n          the table covers this far, rounded up to a block
    |---------- published by commit() -----|  only full blocks of computed, final tokens

Three things may be found: blocks of an equal prefix, a relative's blocks (fork), or the request's own KV on the host
(swap). A block that several tables name is never written: a request that starts in the middle of such a block gets a
copy of it when it is admitted, because its first token will be written there (copy-on-write; vLLM V0 copied at the
write itself, as often, but had to search the tables for it in every step).

A model's layers may be several groups (kv_groups.py): then each block of a request's tokens is a block of each group,
one behind the other in its table. Of a group with a sliding window the blocks that no token to come will read are given
back, when the table grows; `absent`, which is no block of the pool, stands in their places, all at the group's
beginning. One group that keeps all tokens is the case above, and costs nothing more.

K and V behind a request's computed tokens, of a step in flight or one that failed, hurt nobody. A state that stands
there cannot go back, so from one that may (`Table.reached`) nobody forks, and it is not swapped but computed again.

The manager knows nothing of phases, policies or devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from minivllm.kv.base import CACHED, FREE, SHARED, USED, KVUsage, Moves, PrefixIndex
from minivllm.kv.pool import BlockPool
from minivllm.kv.swap import Recompute, SwapPolicy, SwapSpace
from minivllm.kv_groups import ONE_GROUP, KVGroups, first_kept
from minivllm.request import Request


@dataclass(slots=True)
class Table:
    """One request's blocks, in token order. The first num_published of each group need no publishing any more."""

    blocks: list[int]  # one of each group, then the next of each
    num_published: int
    reached: int = 0  # tokens that a step was given room for: a state may stand behind all of them. Of states alone


class Found(NamedTuple):
    """Blocks on the device that a request may start from."""

    blocks: list[int]
    num_tokens: int


NOTHING = Found([], 0)


class PagedKVManager:
    num_lent = 0

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        index: PrefixIndex,
        num_host_blocks: int = 0,
        swap_policy: SwapPolicy | None = None,
        shares_forks: bool = True,
        groups: KVGroups = ONE_GROUP,
        most_new_tokens: int = 0,
    ):
        """index: of several groups, or of one with a window, a GroupPrefix. most_new_tokens: that one step adds to a
        request; how long one may get depends on it where groups have windows."""
        self.block_size = block_size
        self.num_groups = len(groups.groups)
        self._has_states = groups.has_states
        self._bounded = [(group, window) for group, window in enumerate(groups.windows) if window is not None]
        self.absent = num_blocks  # the workers' spare block, which no table names
        self.pool = BlockPool(num_blocks)
        self.index = index
        self.tables: dict[str, Table] = {}
        self.usage = KVUsage(num_blocks, num_blocks, 0, block_size, self.num_groups)
        self.capacity = groups.capacity(num_blocks, block_size, most_new_tokens)
        self.most_blocks = partial(groups.most_blocks, block_size=block_size, most_new=most_new_tokens)
        self.moves = Moves()
        self.swap = SwapSpace(num_host_blocks, swap_policy or Recompute(), self.moves)
        self.shares_forks = shares_forks
        self._found: dict[str, Found] = {}  # what lookup() or fork() promised to the allocate() that follows

    # --- the KVManager Protocol

    def lookup(self, req: Request) -> int:
        if (kept := self.swap.kept.get(req.id)) is not None:
            return kept.num_tokens
        if req.params.prompt_logprobs is not None:
            return 0  # their logits must be computed, and a cached token gives none
        # A prompt found whole would leave nothing to compute and so no logits: its last token is always computed.
        num_blocks = (req.num_tokens - 1) // self.block_size
        blocks = self.index.match(self.index.keys(req, num_blocks, self.block_size)[:num_blocks])
        found = Found(blocks, len(blocks) // self.num_groups * self.block_size)
        self._found[req.id] = found
        return found.num_tokens

    def allocate(self, req: Request, new_tokens: int, lookahead: int = 0) -> Sequence[int] | None:
        table = self.tables.get(req.id)
        if table is None:
            return self._admit(req, new_tokens + lookahead)
        planned = req.num_computed_tokens + req.num_in_flight
        if self._has_states:
            table.reached = planned + new_tokens
        missing = self._blocks_for(planned + new_tokens + lookahead) - len(table.blocks)
        if missing <= 0:
            return ()
        if self._bounded:
            self._give_back_behind(table.blocks, planned)
        if missing > self.pool.num_free:
            return None
        new = self._take(missing)
        table.blocks += new
        return new

    def commit(self, req: Request) -> None:
        table = self.tables[req.id]
        full = req.num_computed_tokens // self.block_size
        if full <= table.num_published:
            return
        keys = self.index.keys(req, full, self.block_size)[:full]
        first, end = table.num_published * self.num_groups, full * self.num_groups
        self.index.publish(keys, table.num_published, table.blocks[first:end])
        table.num_published = full

    def free(self, req: Request, keep: bool = False) -> None:
        self._found.pop(req.id, None)
        self.swap.forget(req)
        table = self.tables.pop(req.id, None)
        if table is None:
            return
        if keep:
            self._keep(req, table)
        self._give_back(reversed(self._held(table.blocks)))

    def check(self) -> None:
        self.pool.check()
        self.swap.check()
        named = [0] * self.pool.num_blocks
        for table in self.tables.values():
            held = self._held(table.blocks)
            assert len(held) == len(set(held)), "a table names a block twice"
            for block in held:
                named[block] += 1
            for group in range(self.num_groups):
                own = table.blocks[group :: self.num_groups]
                assert self.absent not in own[own.count(self.absent) :], "a block is gone from behind one that is kept"
        assert named == self.pool.ref_counts, "a reference count differs from the tables that name the block"
        assert not self.swap.kept.keys() & self.tables.keys(), "a request is on the host and on the device"
        cached = sum(map(self.index.__contains__, self.pool.free_list()))
        expected = KVUsage(self.pool.num_blocks, self.pool.num_free, cached, self.block_size, self.num_groups)
        assert self.usage == expected, f"usage says {self.usage}, the pool {expected}"

    # --- capabilities of the paged manager

    def fork(self, parent: Request, child: Request) -> int:
        """Like lookup(child), but what is found is the parent's KV, without a copy: all computed tokens that both have,
        short of the child's last one. Nothing is held until allocate(child). 0 with shares_forks=False, or if a window
        or a state of the parent has moved on: the child is admitted like anybody else, and finds what the prefix index
        has."""
        if not self.shares_forks:
            return 0
        num_tokens = min(parent.num_computed_tokens, child.num_tokens - 1)
        if self._has_states and num_tokens != self.tables[parent.id].reached:
            return 0
        blocks = self.tables[parent.id].blocks[: self._blocks_for(num_tokens)]
        if any(self.absent in blocks[first :: self.num_groups] for first in self._firsts_kept(num_tokens)):
            return 0
        self._found[child.id] = Found(blocks, num_tokens)
        return num_tokens

    def forget_cached(self) -> None:
        """Evict every reusable prefix that no request names (failure injection; also: the weights have changed)."""
        for block in self.pool.free_list():
            self.index.drop(block)
        self.usage.num_cached = 0

    def block_map(self) -> bytes:
        """The state of each block, a byte a block: base.FREE, CACHED, USED or SHARED. Looks at the blocks that hold
        something, not at the whole pool: what is cached was freed, and so stands at the end of the free list."""
        states = bytearray([FREE]) * self.pool.num_blocks
        for table in self.tables.values():
            for block in self._held(table.blocks):
                states[block] = USED if self.pool.ref_counts[block] == 1 else SHARED
        cached = filter(self.index.__contains__, self.pool.newest_free())
        for block in islice(cached, self.usage.num_cached):
            states[block] = CACHED
        return bytes(states)

    def blocks_of(self, req_id: str) -> Sequence[int]:
        """A request's blocks, in token order; () if it has none."""
        table = self.tables.get(req_id)
        return self._held(table.blocks) if table else ()

    # --- inside

    def _keep(self, req: Request, table: Table) -> None:
        """On the host, if that is the policy."""
        if self._has_states and table.reached != req.num_computed_tokens:
            self.moves.notes.append(f"preempt {req.id}: recompute (its states have moved on)")
            return
        self._give_back_behind(table.blocks, req.num_computed_tokens)
        used = self._blocks_for(req.num_computed_tokens)
        self.swap.keep(req, self._held(table.blocks[:used]), table.num_published)

    def _num_distinct(self, req_ids: Iterable[str]) -> int:
        """Blocks that these name."""
        return len({block for req_id in req_ids for block in self._held(self.tables[req_id].blocks)})

    def _admit(self, req: Request, new_tokens: int) -> list[int] | None:
        if req.id in self.swap.kept:
            return self._return(req, new_tokens)
        found = self._found.pop(req.id, NOTHING)
        shares_last = found.num_tokens % self.block_size != 0  # then the first write goes to somebody else's block
        missing = self._blocks_for(found.num_tokens + new_tokens) - len(found.blocks)
        held = self._held(found.blocks)
        # A found block that is free now will not be free once it is touched.
        num_found_free = sum(self.pool.ref_counts[block] == 0 for block in held)
        if missing + shares_last * self.num_groups > self.pool.num_free - num_found_free:
            return None
        for block in held:
            self.pool.touch(block)
        self.usage.num_cached -= num_found_free
        blocks = list(found.blocks)
        if shares_last:
            self._copy_on_write(blocks)
        blocks += self._take(missing)
        reached = found.num_tokens + new_tokens
        self.tables[req.id] = Table(blocks, found.num_tokens // self.block_size, reached)
        return list(blocks)

    def _return(self, req: Request, new_tokens: int) -> list[int] | None:
        """From the host back to the device, grown by what the step needs."""
        kept = self.swap.kept[req.id]
        num_back = self.swap.num_missing(req)
        num_grown = self._blocks_for(kept.num_tokens + new_tokens) - self._blocks_for(kept.num_tokens)
        if num_back + num_grown > self.pool.num_free:
            return None
        back = self.swap.bring(req, self._take(num_back), self.pool)
        blocks = self._with_gaps(back.blocks, kept.num_tokens) + self._take(num_grown)
        self.tables[req.id] = Table(blocks, back.num_published, kept.num_tokens + new_tokens)
        return list(blocks)

    def _copy_on_write(self, blocks: list[int]) -> None:
        """Replace the last block of each group, which others name too, by a private copy."""
        shared = blocks[-self.num_groups :]
        blocks[-self.num_groups :] = own = self._take(self.num_groups)
        self.moves.copies += zip(shared, own, strict=True)
        freed = self.pool.release(shared)
        assert not freed, "a block that nobody shared was copied"

    def _blocks_for(self, num_tokens: int) -> int:
        """Of all groups, if nothing has been given back."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def _firsts_kept(self, num_tokens: int) -> list[int]:
        """Where in a table the groups with windows begin that still have so many tokens before the next one."""
        size, count = self.block_size, self.num_groups
        return [first_kept(num_tokens, window, size) * count + group for group, window in self._bounded]

    def _give_back_behind(self, blocks: list[int], num_tokens: int) -> None:
        """Those that no token from number num_tokens on will read, the latest first."""
        gone = []
        for first in self._firsts_kept(num_tokens):
            at = first - self.num_groups
            while at >= 0 and blocks[at] != self.absent:
                gone.append(blocks[at])
                blocks[at] = self.absent
                at -= self.num_groups
        self._give_back(gone)

    def _held(self, blocks: list[int]) -> list[int]:
        return [block for block in blocks if block != self.absent] if self._bounded else blocks

    def _with_gaps(self, held: list[int], num_tokens: int) -> list[int]:
        """The table of a request with so many tokens, out of its _held blocks and no others."""
        blocks = [0] * self._blocks_for(num_tokens)
        for first in self._firsts_kept(num_tokens):
            for at in range(first - self.num_groups, -1, -self.num_groups):
                blocks[at] = self.absent
        rest = iter(held)
        return [block or next(rest) for block in blocks]

    def _give_back(self, blocks: Iterable[int]) -> None:
        freed = self.pool.release(blocks)
        if self.moves.copies:  # of a fork that goes before it has run
            self.moves.copies = [pair for pair in self.moves.copies if pair[1] not in freed]
        self.usage.num_cached += sum(block in self.index for block in freed)
        self.usage.num_free = self.pool.num_free

    def _take(self, n: int) -> list[int]:
        blocks = self.pool.take(n)
        self.usage.num_cached -= sum(self.index.drop(block) for block in blocks)
        self.usage.num_free = self.pool.num_free
        return blocks
