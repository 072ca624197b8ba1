"""K and V beyond the device: a store of blocks in host memory, where a prefix outlives its blocks on the device.

    BlockStore   which full block is in which slot of the host, by a prefix cache's keys; the least recently used goes
    StoredKV     writes each full block there once it is computed, and finds there what the device has no more

What is found in the store is to a scheduler what is found in the prefix cache. The request gets new blocks for it, and
they are filled from the host before the step that needs them: a column of the plan (swap_in), as the copies out are
(swap_out), which runners and cost models know from V0's swapping. Within a plan all that goes out precedes what comes
in, and slots are given to new keys only between plans, so that none is overwritten before it was read.

This is the CPU tier of Mooncake's store (Qin et al., FAST 2025, sections 3 and 4) and of vLLM's offloading connector.
Not the original: copies are waited for by the step, where Mooncake's overlap with the layers of a prefill.

Several managers may share one store, as nodes share Mooncake's: that is a model for simulation, in which a slot can be
read at once when another manager has decided to write it, and what lies on which node is not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from minivllm.kv.handover import SendingKV
from minivllm.kv.manager import PagedKVManager
from minivllm.request import Request


class BlockStore:
    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._slot_of: OrderedDict[Any, int] = OrderedDict()  # by key, the least recently used first
        self._free = list(range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slot_of)

    def match(self, keys: Sequence[Any]) -> list[int]:
        """The slots of the longest known beginning of keys, which counts as used, the beginning last."""
        slots = []
        for key in keys:
            if (slot := self._slot_of.get(key)) is None:
                break
            slots.append(slot)
        for key in reversed(keys[: len(slots)]):
            self._slot_of.move_to_end(key)
        return slots

    def put(self, keys: Sequence[Any]) -> list[tuple[int, int]]:
        """Places for those of them that are not there yet: (index into keys, slot). All count as used."""
        new: dict[int, int] = {}  # by slot: where there are fewer than keys, the last keys lose theirs again
        for i in range(len(keys) - 1, -1, -1):
            if keys[i] in self._slot_of:
                self._slot_of.move_to_end(keys[i])
            elif self.num_blocks:
                slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
                self._slot_of[keys[i]], new[slot] = slot, i
        return sorted((i, slot) for slot, i in new.items())

    def check(self) -> None:
        slots = [*self._slot_of.values(), *self._free]
        assert sorted(slots) == list(range(self.num_blocks)), "a slot is in two places, or in none"


class StoredKV(PagedKVManager):
    """Of one KV group that keeps all tokens, with kv.prefix=hash, whose keys stand for all that precedes a block, and
    without swapping, which has slots of its own."""

    def __init__(self, *args: Any, store: BlockStore, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert self.num_groups == 1 and not self._bounded and not self.swap.pool.num_blocks
        self.store = store
        self.num_fetched = 0  # blocks that came from the store
        self._stored: dict[str, list[int]] = {}  # request -> the slots that its lookup found behind the device's blocks

    def lookup(self, req: Request) -> int:
        num_found = super().lookup(req)
        if req.params.prompt_logprobs is not None:
            return num_found
        num_blocks = (req.num_tokens - 1) // self.block_size
        keys = self.index.keys(req, num_blocks, self.block_size)[:num_blocks]
        self._stored[req.id] = slots = self.store.match(keys)[num_found // self.block_size :]
        return num_found + len(slots) * self.block_size

    def allocate(self, req: Request, new_tokens: int, lookahead: int = 0) -> Sequence[int] | None:
        slots = self._stored.pop(req.id, [])
        if not slots:
            return super().allocate(req, new_tokens, lookahead)
        blocks = super().allocate(req, len(slots) * self.block_size + new_tokens, lookahead)
        if blocks is not None:
            first = self.tables[req.id].num_published
            self.moves.swap_in += zip(slots, blocks[first : first + len(slots)], strict=True)
            self.num_fetched += len(slots)
        return blocks

    def commit(self, req: Request) -> None:
        table = self.tables[req.id]
        first = table.num_published
        super().commit(req)
        if table.num_published > first:
            keys = self.index.keys(req, table.num_published, self.block_size)[: table.num_published]
            self.moves.swap_out += [(table.blocks[i], slot) for i, slot in self.store.put(keys)]

    def free(self, req: Request, keep: bool = False) -> None:
        self._stored.pop(req.id, None)
        super().free(req, keep)

    def check(self) -> None:
        super().check()
        self.store.check()


class StoredSendingKV(StoredKV, SendingKV):
    """Of an engine that computes prompts and hands them over."""
