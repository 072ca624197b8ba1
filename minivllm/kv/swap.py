"""SwapSpace: the KV of preempted requests, kept in host memory until they return (vLLM V0).

Blocks that several evicted requests share are moved once and stay shared: within a step the same device block always
goes to the same host block, and on the way back the same host block to the same device block. Both sides count
references with a BlockPool. The moves are columns of the plan, done by the runner before the forward: first everything
that goes out, then everything that comes in. A host block that was emptied is given out again only in the next step,
for the same reason.

Whether to swap at all is a policy, asked for each request: never, always, or whichever is estimated to be cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minivllm.kv.base import Moves
from minivllm.kv.pool import BlockPool
from minivllm.request import Request


class SwapPolicy(Protocol):
    def swaps(self, req: Request, num_blocks: int) -> tuple[bool, str]:
        """Whether to move num_blocks blocks out rather than recompute req's tokens later, and why."""
        ...


class Recompute:
    """Never: give the blocks up and compute the tokens again."""

    def __init__(self, **_: object):  # takes the options of its siblings
        pass

    def swaps(self, req: Request, num_blocks: int) -> tuple[bool, str]:
        return False, "as configured"


class Swap:
    """Always, as long as the host has room."""

    def __init__(self, **_: object):
        pass

    def swaps(self, req: Request, num_blocks: int) -> tuple[bool, str]:
        return True, "as configured"


class Auto:
    """Whichever is estimated to take less time.

    seconds_per_token: to recompute one token in a prefill. seconds_per_block: to copy one block in one direction.
    """

    def __init__(self, seconds_per_token: float, seconds_per_block: float):
        self.seconds_per_token = seconds_per_token
        self.seconds_per_block = seconds_per_block

    def swaps(self, req: Request, num_blocks: int) -> tuple[bool, str]:
        recompute = 1e3 * req.num_computed_tokens * self.seconds_per_token
        swap = 2e3 * num_blocks * self.seconds_per_block  # out now, in later
        tokens = f"{req.num_computed_tokens} tokens recomputed in {recompute:.2f} ms"
        return swap < recompute, f"{tokens}, {num_blocks} blocks moved twice in {swap:.2f} ms"


@dataclass(slots=True)
class Kept:
    """A preempted request's KV. blocks: of the host while it waits, of the device once it is back."""

    blocks: list[int]
    num_tokens: int
    num_published: int


class SwapSpace:
    def __init__(self, num_blocks: int, policy: SwapPolicy, moves: Moves):
        self.pool = BlockPool(num_blocks)
        self.policy = policy
        self.kept: dict[str, Kept] = {}
        self._moves = moves
        self._emptied: list[int] = []  # host blocks whose content leaves in the step being planned

    def keep(self, req: Request, blocks: Sequence[int], num_published: int) -> None:
        """Move the blocks that hold req's computed tokens out; or nothing, and a note says why."""
        self._reclaim()
        wanted, reason = self.policy.swaps(req, len(blocks))
        here = dict(self._moves.swap_out)
        missing = [block for block in blocks if block not in here]
        if wanted and len(missing) > self.pool.num_free:
            wanted, reason = False, f"{len(missing)} host blocks needed, {self.pool.num_free} free"
        self._moves.notes.append(f"preempt {req.id}: {'swap' if wanted else 'recompute'} ({reason})")
        if not wanted:
            return
        for block in blocks:
            if block in here:
                self.pool.touch(here[block])
        for source, target in zip(missing, self.pool.take(len(missing)), strict=True):
            here[source] = target
            self._moves.swap_out.append((source, target))
        self.kept[req.id] = Kept([here[block] for block in blocks], req.num_computed_tokens, num_published)

    def num_missing(self, req: Request) -> int:
        """Device blocks to take so that req can return: those that nobody has brought back in this step."""
        there = dict(self._moves.swap_in)
        return sum(block not in there for block in self.kept[req.id].blocks)

    def bring(self, req: Request, new_blocks: Sequence[int], device: BlockPool) -> Kept:
        """Move req's KV back into num_missing() new device blocks."""
        there, fresh = dict(self._moves.swap_in), iter(new_blocks)
        kept = self.kept.pop(req.id)
        for source in kept.blocks:
            if source in there:
                device.touch(there[source])
            else:
                there[source] = next(fresh)
                self._moves.swap_in.append((source, there[source]))
        self._emptied += kept.blocks
        return Kept([there[source] for source in kept.blocks], kept.num_tokens, kept.num_published)

    def forget(self, req: Request) -> None:
        kept = self.kept.pop(req.id, None)
        if kept is not None:
            self._emptied += kept.blocks

    def _reclaim(self) -> None:
        """Host blocks that an earlier step emptied are free once the plan has taken that step's moves over."""
        if not self._moves.swap_in and not self._moves.swap_out:
            self.pool.release(self._emptied)
            self._emptied.clear()

    def check(self) -> None:
        self.pool.check()
        named = [0] * self.pool.num_blocks
        for blocks in (self._emptied, *(kept.blocks for kept in self.kept.values())):
            for block in blocks:
                named[block] += 1
        assert named == self.pool.ref_counts, "a host block's references differ from the tables that name it"
