"""A layer of experts in the interpreter against its reference, token by token. Run by test_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from tolerances import PRODUCT

from minivllm.kernels import reference
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.kernels.triton.moe import moe, sort_pairs

assert INTERPRETED
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RESULT = {torch.bfloat16: torch.float32}  # the interpreter truncates to bfloat16 where a GPU rounds


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("num_tokens, num_experts", [(1, 5), (40, 3), (600, 7)])
def test_every_pair_has_one_place_in_a_tile_of_its_expert(num_tokens, num_experts, block_m):
    """Some experts have no pair, one has most; ids are read in more than one piece."""
    ids = torch.randint(0, num_experts - 1, (num_tokens, 2))
    ids[num_tokens // 3 :] = 1
    pairs, tile_experts, _ = sort_pairs(ids, num_experts, block_m)
    count, flat = ids.numel(), ids.flatten()
    tiles = pairs.view(-1, block_m)[tile_experts >= 0]
    rows = [tile[tile < count] for tile in tiles]
    assert all((flat[row] == e).all() for row, e in zip(rows, tile_experts[tile_experts >= 0], strict=True))
    assert torch.equal(torch.cat(rows), flat.sort(stable=True).indices.to(torch.int32))
    assert ((tiles < count) | (tiles == count)).all() and (tile_experts[len(tiles) :] == -1).all()
    assert len(tiles) == (-(-flat.bincount() // block_m)).sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens, hidden, size, num_experts, top_k", [(1, 20, 16, 4, 1), (9, 100, 70, 6, 3)])
def test_the_layer_equals_its_reference(dtype, num_tokens, hidden, size, num_experts, top_k):
    right(dtype, num_tokens, hidden, size, num_experts, top_k)


def test_many_tokens_take_large_tiles():
    right(torch.float32, 30, 32, 16, 2, 2)


def right(dtype, num_tokens: int, hidden: int, size: int, num_experts: int, top_k: int) -> None:
    """Products of unit size; what is rounded between them is silu(gate) * up, which is smaller."""
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(num_tokens, hidden + 16, generator=generator).to(dtype)[:, :hidden]
    gate_up = (torch.randn(num_experts, 2 * size, hidden, generator=generator) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, size, generator=generator) / size**0.5).to(dtype)
    weights, ids = torch.randn(num_tokens, num_experts, generator=generator).softmax(-1).topk(top_k)
    out = torch.full((num_tokens, hidden), torch.nan, dtype=RESULT.get(dtype, dtype))
    got = moe(x, ids, weights, gate_up, down, out)
    assert got is out
    torch.testing.assert_close(got.double(), reference.experts(x, ids, weights, gate_up, down), **PRODUCT[dtype])
