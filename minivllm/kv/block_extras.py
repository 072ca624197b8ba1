"""What a block's key holds beside its tokens: the one rule for every prefix index, and for whoever routes by prefixes.

Whose the tokens are (adapter, salt) divides the whole space, so it enters a chain once, at its beginning. What stands
in a prompt in the place of tokens (request.Item) enters the keys of the blocks that it lies in, with where in the block
it begins and ends; before the block's beginning that is a negative number. So equal keys mean equal inputs, position
by position, and the same item elsewhere in a block is another key (vLLM's extra keys: hash and offset).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from minivllm.request import EngineRequest, Item, Request


def block_extras(req: Request | EngineRequest, first: int, end: int) -> tuple[Any, ...]:
    """Of the block that holds req's tokens first : end. Plain values, which any encoding keeps apart; () for most."""
    owner = () if first else (req.adapter, req.cache_salt)
    return (*owner, *_within(req.items, first, end)) if req.items else owner


def _within(items: Sequence[Item], first: int, end: int) -> Iterator[tuple[str, int, int]]:
    """(digest, where it begins, where it ends in the block) of each."""
    for item in items:
        if item.offset < end and item.end > first:
            yield item.digest, item.offset - first, min(item.end, end) - first
