"""The draw and the filters in the interpreter choose exactly the tokens of sampling/draw.py. Run by
test_interpreter.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm.kernels.triton import draw as kernels
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.sampling import draw as reference

assert INTERPRETED
SEEDS = np.array([0, 1, 2**64 - 1, 2**63, 12345, 12345], np.uint64)
POSITIONS = np.array([0, 5, 131_000, 1, 9, 10])


def distributions(size: int, sharpness: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return reference.pad_to_blocks(torch.randn(len(SEEDS), size, generator=generator) * sharpness).softmax(-1)


def drawn(probs: torch.Tensor, cuts: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.draw(probs, torch.from_numpy(SEEDS.view(np.int64)), torch.from_numpy(POSITIONS), cuts)


@pytest.mark.parametrize("size", [64, 65, 1000, 9000])
@pytest.mark.parametrize("sharpness", [0.0, 3.0])
def test_tokens_equal_the_references(size, sharpness):
    probs = distributions(size, sharpness)
    for got, wanted in zip(drawn(probs), reference.draw(probs, SEEDS, POSITIONS), strict=True):
        assert torch.equal(got, wanted)


def test_rows_without_a_distribution_are_not_valid():
    probs = distributions(200)
    probs[1] = 0
    probs[2, 7] = torch.nan
    probs[3, 150] = torch.inf
    tokens, valid = drawn(probs)
    wanted, wanted_valid = reference.draw(probs, SEEDS, POSITIONS)
    assert torch.equal(tokens, wanted) and torch.equal(valid, wanted_valid)
    assert valid.tolist() == [True, False, False, False, True, True]


FILTERS = [(0, 1.0, 0.0), (1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.5, 0.0), (50, 0.9, 0.01), (10**6, 0.999, 0.2)]


@pytest.mark.parametrize("size", [100, 3000])
@pytest.mark.parametrize("ties", [False, True])
def test_cuts_and_filtered_tokens_equal_the_references(size, ties):
    probs = distributions(size)
    if ties:
        probs = (probs * 64).ceil() / 64
        probs[:, size:] = 0
    top_k, top_p, min_p = (torch.tensor(x) for x in zip(*FILTERS, strict=True))
    wanted = reference.find_cuts_by_sort(probs, top_k, top_p.double(), min_p.double())[:, 0]
    cuts = kernels.find_cuts(probs, top_k, top_p.double(), min_p.float())
    kept = probs >= cuts[:, None]
    assert torch.equal(kept, probs >= wanted[:, None])
    assert kept[0].all() and kept[1].sum() >= 1 and (ties or kept[2].sum() == 7)
    filtered = probs.masked_fill(~kept, 0)
    for got, want in zip(drawn(probs, cuts), reference.draw(filtered, SEEDS, POSITIONS), strict=True):
        assert torch.equal(got, want)
