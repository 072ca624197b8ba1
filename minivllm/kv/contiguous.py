"""ContiguousKVManager: KV as it was kept before paging. One run of consecutive blocks a request, reserved when it is
admitted for all that it may ever need, and never moved or grown.

The tables that come out are ordinary ones that happen to name consecutive blocks, so the same runner, kernels and plans
serve both kinds, and what is compared is memory alone. Nothing is shared: lookup() finds nothing, commit() publishes
nothing, and a preempted request gives its whole run back and is recomputed.

How much is reserved is a policy, after the baselines of the vLLM paper (Kwon et al. 2023, section 6.1):

    reserve_max      max_model_len for everybody (FasterTransformer; Orca Max)
    reserve_pow2     the output length rounded up to a power of two (Orca Pow2)
    reserve_oracle   the output length, known beforehand (Orca Oracle)

Orca is closed, and the paper assumes that it takes its memory from a buddy allocator; so do we, for every policy.
Rounding a reservation up to a power of two of blocks is the allocator's waste, which the paper counts as external, not
as internal: its Oracle has no internal part at all. Not the original: the paper's runs are counted in slots, ours in
blocks (with kv.block_size=1 the two are the same); FasterTransformer had one fixed buffer a batch and no allocator.

pow2 and oracle need the output length before it is known. They take max_tokens for it, which is true of requests that
set ignore_eos (as benchmarks do) and an upper bound for all others, so a run is never too short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from minivllm.kv.base import FREE, USED, KVUsage, Moves
from minivllm.kv.waste import Waste, slots_now_and_in_the_end
from minivllm.request import Request

Reservation = Callable[[Request, int], int]  # (request, max_model_len) -> slots to hold for it


def reserve_max(req: Request, max_model_len: int) -> int:
    return max_model_len


def reserve_pow2(req: Request, max_model_len: int) -> int:
    max_output = max_model_len - req.num_prompt_tokens
    output = min(req.params.max_tokens or max_output, max_output)
    return min(req.num_prompt_tokens + (1 << _order(output)), max_model_len)


def reserve_oracle(req: Request, max_model_len: int) -> int:
    return req.num_final_slots(max_model_len)


class Buddies:
    """Free runs of 2**order blocks, each aligned to its own size. Taking splits the smallest run that is large enough;
    giving back merges a run with its buddy (the other half of what both were split from) for as long as it is free.

    A pool that is no power of two begins as several runs, the largest first: 13 = 8 + 4 + 1. Each of them starts at a
    multiple of twice its size, so its buddy's place is taken by smaller ones, and no merge crosses from one to another.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.num_free = 0
        # By order: the starts of the free runs. Dictionaries as ordered sets, so that the choice is reproducible.
        self._free: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length())]
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self.give(self.num_free, order)

    @property
    def max_order(self) -> int:
        """The order of the largest run that the empty pool has."""
        return len(self._free) - 1

    def has(self, order: int) -> bool:
        return any(self._free[order:])

    def take(self, order: int) -> int | None:
        """The start of a run of 2**order blocks, or None if no free run is that long."""
        have = next((k for k in range(order, len(self._free)) if self._free[k]), None)
        if have is None:
            return None
        start, _ = self._free[have].popitem()
        for k in reversed(range(order, have)):  # keep the lower half, free the upper one
            self._free[k][start + (1 << k)] = None
        self.num_free -= 1 << order
        return start

    def give(self, start: int, order: int) -> None:
        self.num_free += 1 << order
        while (buddy := start ^ (1 << order)) in self._free[order]:
            del self._free[order][buddy]
            start = min(start, buddy)
            order += 1
        self._free[order][start] = None

    def runs(self) -> Iterator[tuple[int, int]]:
        """(start, order) of every free run."""
        for order, starts in enumerate(self._free):
            for start in starts:
                yield start, order

    def check(self) -> None:
        free = set(self.runs())
        assert sum(1 << order for _, order in free) == self.num_free, "the free runs and their count disagree"
        for start, order in free:
            assert start % (1 << order) == 0, f"the run at {start} is not aligned to its size"
            assert (start ^ (1 << order), order) not in free, f"the run at {start} and its buddy were not merged"


@dataclass(slots=True)
class Run:
    """Blocks start .. start + num_blocks are the request's table; the allocator took 2**order for them."""

    start: int
    order: int
    num_blocks: int


class ContiguousKVManager:
    num_lent = 0

    def __init__(self, num_blocks: int, block_size: int, reservation: Reservation, max_model_len: int):
        self.block_size = block_size
        self.reservation = reservation
        self.max_model_len = max_model_len
        self.buddies = Buddies(num_blocks)
        self.runs: dict[str, Run] = {}
        self.usage = KVUsage(num_total=num_blocks, num_free=num_blocks, block_size=block_size)
        # A reservation may be for one slot more than the last token needs.
        self.capacity = (block_size << self.buddies.max_order) - 1
        self.moves = Moves()  # always empty: a run stays where it is

    def lookup(self, req: Request) -> int:
        return 0

    def allocate(self, req: Request, new_tokens: int, lookahead: int = 0) -> Sequence[int] | None:
        """The whole run at a request's first call, then (). A run is never extended: None if drafts would pass its end,
        so whoever drafts must not draft beyond max_tokens."""
        run = self.runs.get(req.id)
        num_blocks = run.num_blocks if run else self._num_reserved(req)
        planned = req.num_computed_tokens + req.num_in_flight
        if planned + new_tokens + lookahead > num_blocks * self.block_size:
            return None
        if run:
            return ()
        order = _order(num_blocks)
        start = self.buddies.take(order)
        if start is None:
            return None
        self.runs[req.id] = Run(start, order, num_blocks)
        self.usage.num_free = self.buddies.num_free
        return range(start, start + num_blocks)

    def commit(self, req: Request) -> None:
        pass  # nothing is ever shared

    def free(self, req: Request, keep: bool = False) -> None:
        """keep is a wish that only a manager with somewhere to keep things can grant."""
        run = self.runs.pop(req.id, None)
        if run is not None:
            self.buddies.give(run.start, run.order)
            self.usage.num_free = self.buddies.num_free

    def fork(self, parent: Request, child: Request) -> int:
        return 0  # a run belongs to one request

    def forget_cached(self) -> None:
        pass  # no prefix outlives its request

    def block_map(self) -> bytes:
        """The state of each block, a byte a block: base.FREE or USED, which includes what is only reserved."""
        states = bytearray([FREE]) * self.usage.num_total
        for run in self.runs.values():
            states[run.start : run.start + (1 << run.order)] = bytes([USED]) * (1 << run.order)
        return bytes(states)

    def blocks_of(self, req_id: str) -> Sequence[int]:
        """A request's table, in token order; () if it has none."""
        run = self.runs.get(req_id)
        return range(run.start, run.start + run.num_blocks) if run else ()

    def waste(
        self,
        requests: Mapping[str, Request],
        final_lengths: Mapping[str, int],
        next_request: Request | None = None,
    ) -> Waste:
        """See kv/waste. Free slots are external waste if no free run is long enough for next_request."""
        tokens = in_the_end = held = rounded_up = 0
        for req_id, run in self.runs.items():
            now, end = slots_now_and_in_the_end(req_id, requests, final_lengths)
            tokens += now
            in_the_end += end
            held += run.num_blocks * self.block_size
            rounded_up += ((1 << run.order) - run.num_blocks) * self.block_size
        stuck = next_request is not None and not self.buddies.has(_order(self._num_reserved(next_request)))
        slots = self.usage.num_total * self.block_size
        return Waste(
            tokens=tokens / slots,
            reserved=(in_the_end - tokens) / slots,
            internal=(held - in_the_end) / slots,
            external=(rounded_up + stuck * self.usage.num_free * self.block_size) / slots,
        )

    def most_blocks(self, num_slots: int) -> int:
        """The shortest run that holds them; a reservation may be for more, but who has one never grows."""
        return 1 << _order(-(-num_slots // self.block_size))

    def check(self) -> None:
        self.buddies.check()
        taken = [(run.start, run.order) for run in self.runs.values()]
        end = 0
        for start, order in sorted([*taken, *self.buddies.runs()]):
            assert start == end, f"runs overlap or blocks are lost between {end} and {start}"
            end = start + (1 << order)
        assert end == self.usage.num_total, "the runs do not cover the pool"
        for run in self.runs.values():
            assert 1 << run.order >> 1 < run.num_blocks <= 1 << run.order, "a run has the wrong order"
        expected = KVUsage(self.buddies.num_blocks, self.buddies.num_free, 0, self.block_size)
        assert self.usage == expected, f"usage says {self.usage}, the allocator {expected}"

    def _num_reserved(self, req: Request) -> int:
        return -(-self.reservation(req, self.max_model_len) // self.block_size)


def _order(n: int) -> int:
    """The smallest k with 2**k >= n."""
    return (n - 1).bit_length()
