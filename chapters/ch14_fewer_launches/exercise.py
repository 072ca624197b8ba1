"""Chapter 14: pad a step to a size that was captured. Fill in `pad`, then run the tests:

python -m minivllm chapter 14 --exercise
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Decodes:
    """A step in which each request computes one token. Every list has an entry for each request."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]  # where each token's K and V are written: block * block_size + offset
    lengths: list[int]  # tokens of each request in the cache, this one included
    tables: list[list[int]]  # the blocks of each request


def pad(step: Decodes, sizes: Sequence[int], spare: int, block_size: int, max_blocks: int) -> Decodes:
    """The step with as many rows as the smallest of `sizes`, given in any order, that holds it.

    Every shape follows from that size alone, so each table has max_blocks entries. A row that is
    added is a request of one token: it writes to the block `spare`, which no request has, and
    reads what it wrote. The rows that were there stay as they are, and so does `step` itself. A
    step that is larger than all sizes comes back unpadded.
    """
    raise NotImplementedError("yours to write")
