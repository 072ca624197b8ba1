"""The solution of chapter 14's exercise."""

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
    large_enough = [size for size in sizes if size >= len(step.token_ids)]
    if not large_enough:
        return step
    num_added = min(large_enough) - len(step.token_ids)
    tables = step.tables + [[spare]] * num_added
    return Decodes(
        token_ids=step.token_ids + [0] * num_added,
        positions=step.positions + [0] * num_added,
        slots=step.slots + [spare * block_size] * num_added,
        lengths=step.lengths + [1] * num_added,
        tables=[table + [spare] * (max_blocks - len(table)) for table in tables],
    )
