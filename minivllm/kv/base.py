"""The KV seam: what a scheduler asks of whoever keeps K and V, and what the paged manager asks of a prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minivllm.plan import StepPlan
from minivllm.request import Request


@dataclass(slots=True)
class KVUsage:
    """Live counters, in blocks. A cached block is free and still holds a reusable prefix."""

    num_total: int
    num_free: int
    num_cached: int = 0
    block_size: int = 1  # tokens a block
    num_groups: int = 1  # blocks that so many tokens take: one of each KV group

    @property
    def size(self) -> str:
        """The pool's, for people."""
        each = f", {self.num_groups} of them for as many tokens" if self.num_groups > 1 else ""
        return f"{self.num_total} blocks of {self.block_size} tokens{each}"


FREE, CACHED, USED, SHARED = range(4)  # a block's state in a pool's map; shared: several live requests name it


@dataclass(slots=True)
class Moves:
    """What must happen to blocks before the next forward; the columns of the same names in StepPlan."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def drain(self, plan: StepPlan) -> None:
        """Hand everything over to the plan."""
        for name in ("swap_out", "swap_in", "copies", "notes"):
            column = getattr(self, name)
            getattr(plan, name).extend(column)
            column.clear()


class KVManager(Protocol):
    """paged | contiguous ... Tokens and lengths in, block ids out; no tensors."""

    def lookup(self, req: Request) -> int:
        """How many leading tokens of req need not be computed: fewer than req.num_tokens, and whole blocks unless they
        are what free(keep=True) kept."""
        ...

    def allocate(self, req: Request, new_tokens: int, lookahead: int = 0) -> Sequence[int] | None:
        """Room for new_tokens more (and `lookahead` drafts after them): the blocks that req's table gains, or None.

        All or nothing. A request's first allocation follows its lookup and starts with the blocks found there. Moves
        and copies of blocks that this takes wait in `moves` for the plan.
        """
        ...

    def commit(self, req: Request) -> None:
        """Publish the full blocks of req's computed tokens. The only publisher, so a draft is never published."""
        ...

    def free(self, req: Request, keep: bool = False) -> None:
        """Give back req's blocks, tail first, so that prefixes outlive suffixes. A request without blocks is no error.

        keep: req was preempted and will come back, so its KV may be kept elsewhere. lookup() then finds it.
        """
        ...

    def check(self) -> None:
        """Assert what must hold between two steps: each block is free or named, as often as it is counted."""
        ...

    num_lent: int  # blocks that are neither free nor a running request's: on their way to or from another engine
    capacity: int  # slots that one request can hold at most, in the empty pool
    most_blocks: Callable[[int], int]  # of a request of so many slots, at its worst moment, if it shares none
    usage: KVUsage  # blocks in all, free, and free with a reusable prefix
    moves: Moves  # copies and swaps of blocks that wait for the next plan


class PrefixIndex(Protocol):
    """none | hash | radix: from a request's beginning to the blocks that already hold it.

    The eviction order is not its business: the pool's free list is in leaf-first LRU order for every index.
    """

    def keys(self, req: Request, num_blocks: int, block_size: int) -> Sequence[Any]:
        """The keys of req's first num_blocks full blocks (cached in req.block_keys); () if nothing is ever shared."""
        ...

    def match(self, keys: Sequence[Any], first: int = 0) -> list[int]:
        """The blocks of the longest known beginning of keys[first:], each behind all keys before it."""
        ...

    def publish(self, keys: Sequence[Any], first: int, blocks: Sequence[int]) -> None:
        """blocks[i] holds the tokens of keys[first + i], and what precedes them is keys[:first]."""
        ...

    def drop(self, block: int) -> bool:
        """Forget the block, if it is known; its content is about to be overwritten. True if it was known."""
        ...

    def __contains__(self, block: int) -> bool: ...
