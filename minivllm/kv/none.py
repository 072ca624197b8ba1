"""NoKV: the manager of a model that keeps no K and V: an encoder, or a decoder whose prompts become vectors.

Such a request takes one forward of its whole prompt and leaves nothing behind. So there is nothing to find, allocate,
share, swap or give back: all that bounds a step is its budget of tokens and of requests. A prompt must not be cut into
chunks, since nothing that an earlier chunk computed is there for the next one; and with attention that looks both
ways, the first token of a prompt depends on the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.kv.base import KVUsage, Moves
from minivllm.request import Request


class NoKV:
    """A KVManager with a pool of no blocks. capacity: tokens of the longest request."""

    num_lent = 0

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.usage = KVUsage(num_total=0, num_free=0)
        self.moves = Moves()

    def lookup(self, req: Request) -> int:
        return 0

    def allocate(self, req: Request, new_tokens: int, lookahead: int = 0) -> Sequence[int]:
        return ()

    def commit(self, req: Request) -> None:
        pass

    def free(self, req: Request, keep: bool = False) -> None:
        pass

    def most_blocks(self, num_slots: int) -> int:
        return 0

    def check(self) -> None:
        assert self.usage == KVUsage(num_total=0, num_free=0), "there are no blocks, and some are counted"

    # --- what an onlooker may ask of any manager

    def block_map(self) -> bytes:
        return b""

    def blocks_of(self, req_id: str) -> Sequence[int]:
        return ()
