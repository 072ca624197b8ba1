"""KV managers of engines that hand requests over: one computes prompts, the other goes on from their K and V.

    SendingKV     keeps the blocks of a request that has ended, until they have been sent
    ReceivingKV   has blocks for a request before it comes; then its prompt is found there, as a cached beginning is

So no scheduler knows of either: a request that comes with its K and V is one whose lookup() finds nearly all. What each
promises is what vLLM's KV connectors do (`request_finished`: who frees; `get_num_new_matched_tokens`: what need not be
computed), and DistServe's pull of a prompt's K and V when there is room (Zhong et al., OSDI 2024, section 4.3).

The blocks in between are lent: no request that runs names them, and yet they are not free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.kv.manager import PagedKVManager
from minivllm.request import Request


class SendingKV(PagedKVManager):
    """Of an engine whose requests end with their first token."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._ended: dict[str, None] = {}  # whose blocks are to be sent, in the order of their ends
        self._num_wanted = 0  # blocks that were asked for last, those apart that were found
        self._is_short = False  # there were not so many, and have not been since

    @property
    def num_lent(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._num_distinct(self._ended)

    @property
    def waits(self) -> bool:
        """Whether nothing can be admitted before more has been sent."""
        return self._is_short and bool(self._ended)

    def allocate(self, req: Request, new_tokens: int, lookahead: int = 0) -> Sequence[int] | None:
        blocks = super().allocate(req, new_tokens, lookahead)
        self._num_wanted, self._is_short = self._blocks_for(new_tokens + lookahead), blocks is None
        return blocks

    def free(self, req: Request, keep: bool = False) -> None:
        """Of a request whose prompt is computed and that is not to come back: nothing yet, see sent()."""
        if keep or req.id not in self.tables or req.num_computed_tokens < req.num_prompt_tokens:
            super().free(req, keep)
        else:
            self._ended[req.id] = None

    def sent(self, req_id: str) -> None:
        """Its K and V are elsewhere, or nobody wants them."""
        del self._ended[req_id]
        self._give_back(reversed(self._held(self.tables.pop(req_id).blocks)))
        self._is_short = self._is_short and self.pool.num_free < self._num_wanted


class ReceivingKV(PagedKVManager):
    """Of an engine whose requests come with their K and V, and with one token behind."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.num_given_up = 0  # requests whose room was taken away again: their prompts are computed here
        self._coming: dict[str, int] = {}  # request -> its tokens whose K and V are sent or found, oldest first

    @property
    def num_lent(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._num_distinct(self._coming)

    def reserve(self, req: Request, spare: int = 0) -> int | None:
        """Room for all tokens of a request that will come -> of how many the K and V must be sent: those but for the
        last one that no prefix cache has here. None if fewer than `spare` blocks would stay free."""
        num_found = super().lookup(req)
        enough = self._blocks_for(req.num_tokens) + spare <= self.pool.num_free
        if not enough or super().allocate(req, req.num_tokens - num_found) is None:
            self._found.pop(req.id, None)
            return None
        self._coming[req.id] = req.num_tokens - 1
        return req.num_tokens - 1 - num_found

    def lookup(self, req: Request) -> int:
        num_there = self._coming.get(req.id)
        return super().lookup(req) if num_there is None else num_there

    def allocate(self, req: Request, new_tokens: int, lookahead: int = 0) -> Sequence[int] | None:
        num_there = self._coming.get(req.id)
        if num_there is None:
            blocks = super().allocate(req, new_tokens, lookahead)
            if blocks is None and len(self._coming) == len(self.tables):  # nobody runs whose end would make room
                self._give_up(self._blocks_for(req.num_tokens + lookahead))
            return blocks
        if super().allocate(req, num_there + new_tokens, lookahead) is None:
            return None
        del self._coming[req.id]
        return list(self.tables[req.id].blocks)

    def free(self, req: Request, keep: bool = False) -> None:
        self._coming.pop(req.id, None)
        super().free(req, keep)

    def _give_up(self, num_wanted: int) -> None:
        """For the next step, which asks again: who came last comes for nothing, until there is room."""
        while self._coming and self.pool.num_free < num_wanted:
            req_id, _ = self._coming.popitem()
            self.num_given_up += 1
            self._give_back(reversed(self._held(self.tables.pop(req_id).blocks)))
