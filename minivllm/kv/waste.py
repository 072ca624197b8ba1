"""Where the KV pool's slots go: the four parts of Figure 2 in the vLLM paper (Kwon et al. 2023), for any manager.

    tokens     slots that hold K and V of a live request's token
    reserved   slots held empty for tokens that will come
    internal   slots held though no token will ever be written there: over-reservation, and the end of a last block
    external   slots lost to the allocator: what it rounds a reservation up by, and free slots that the next request
               cannot be given, be it that no run is long enough or that too few are free ("external & others")

A slot is one token's K and V in all layers. What is in no part is free and can be given out. A request's last token is
never fed back, so a request that ends with n tokens fills n - 1 slots.

To be called between steps (after `update`), with requests = the scheduler's live ones. A request that holds slots and
is not among them has finished and is kept by its batch (scheduler/static): all that it holds is internal waste.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from minivllm.request import Request

if TYPE_CHECKING:
    from minivllm.kv.manager import PagedKVManager


class Waste(NamedTuple):
    """Fractions of the pool."""

    tokens: float
    reserved: float
    internal: float
    external: float

    @property
    def free(self) -> float:
        return 1.0 - sum(self)


def slots_now_and_in_the_end(
    req_id: str, requests: Mapping[str, Request], final_lengths: Mapping[str, int]
) -> tuple[int, int]:
    """Slots that the request fills now, and when it ends. final_lengths: tokens of each request, prompt and output."""
    req = requests.get(req_id)
    if req is None:
        return 0, 0
    now, end = req.num_computed_tokens, final_lengths[req_id] - 1
    assert now <= end, f"{req_id} fills {now} slots, and is said to end with {end}"
    return now, end


def paged_waste(
    kv: PagedKVManager,
    requests: Mapping[str, Request],
    final_lengths: Mapping[str, int],
    next_request: Request | None = None,
) -> Waste:
    """A block that several requests share counts once, as the fullest of them sees it. Free blocks are external waste
    if they are too few for the prompt of next_request (a prefix that it may find is not looked up)."""
    size = kv.block_size
    filled: dict[int, int] = {}  # of each block that a table names: slots filled now, and in the end
    filled_in_the_end: dict[int, int] = {}
    for req_id, table in kv.tables.items():
        now, end = slots_now_and_in_the_end(req_id, requests, final_lengths)
        for i, block in enumerate(table.blocks):
            if block == kv.absent:
                continue
            before = i // kv.num_groups * size
            filled[block] = max(filled.get(block, 0), min(now - before, size))
            filled_in_the_end[block] = max(filled_in_the_end.get(block, 0), min(end - before, size))
    tokens, in_the_end = sum(filled.values()), sum(filled_in_the_end.values())
    free = kv.usage.num_free
    stuck = next_request is not None and -(-next_request.num_tokens // size) * kv.num_groups > free
    slots = kv.usage.num_total * size
    return Waste(
        tokens=tokens / slots,
        reserved=(in_the_end - tokens) / slots,
        internal=(len(filled) * size - in_the_end) / slots,
        external=stuck * free * size / slots,
    )
