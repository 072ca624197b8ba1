"""The tests of chapter 7's exercise. They need no model."""

from __future__ import annotations

import torch
from exercise import attend

D, BLOCK_SIZE, NUM_BLOCKS = 16, 4, 8
SCALE = D**-0.5


class Cache:
    """Blocks of NaN, some of which hold a past; it counts who reads what."""

    def __init__(self, length: int, table: list[int], spread: float = 1.0, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(D, generator=generator)
        self.keys = spread * torch.randn(length, D, generator=generator)
        self.values = torch.randn(length, D, generator=generator)
        self.blocks = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, D), torch.nan)
        for i in range(length):
            at = table[i // BLOCK_SIZE], i % BLOCK_SIZE
            self.blocks[0][at], self.blocks[1][at] = self.keys[i], self.values[i]
        self.table = table
        self.reads: list[int] = []

    def read(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads.append(block)
        return self.blocks[0, block], self.blocks[1, block]

    def attend(self) -> torch.Tensor:
        return attend(self.q, self.read, self.table, len(self.keys), SCALE)

    def wanted(self) -> torch.Tensor:
        return torch.softmax(SCALE * (self.keys @ self.q), 0) @ self.values


def assert_attends(cache: Cache, atol: float = 1e-5) -> None:
    out, wanted = cache.attend(), cache.wanted()
    assert not out.isnan().any(), f"NaN came out, over {len(cache.keys)} tokens"
    assert out.isfinite().all(), "something overflowed"
    off = float((out - wanted).abs().max())
    assert off < atol, f"off by {off:.2g}, over {len(cache.keys)} tokens in blocks {cache.table}"


def test_it_is_attention():
    for length in (1, 3, 4, 5, 8, 15, 16):
        assert_attends(Cache(length, [0, 1, 2, 3], seed=length))


def test_the_blocks_may_lie_anywhere():
    assert_attends(Cache(14, [6, 1, 7, 2]))


def test_what_lies_behind_the_end_is_not_used():
    for length in (1, 6, 13):
        assert not Cache(length, [3, 0, 5, 4]).attend().isnan().any(), f"{length} tokens"


def test_large_scores_do_not_overflow():
    assert_attends(Cache(11, [2, 5, 0], spread=200.0), atol=1e-4)


def test_each_block_that_is_needed_is_read_once():
    cache = Cache(9, [6, 1, 7, 2, 4])
    cache.attend()
    assert cache.reads == [6, 1, 7], "the blocks that were read; nine tokens are in the first three of the table"
