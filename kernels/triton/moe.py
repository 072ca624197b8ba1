"""Launching a layer of experts."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from minivllm.kernels.triton import experts
from minivllm.kernels.triton.interpreted import INTERPRETED

BLOCK = 1024  # ids, or columns, at a time


class Sorted(NamedTuple):
    """The pairs (token, one of its experts) of a step, by expert: pair p is of token p // top_k."""

    pairs: Tensor  # [tiles * block_m] int32; the number of pairs where a tile is padded
    tile_experts: Tensor  # [tiles] int32; -1: no tile
    block_m: int


def sort_pairs(ids: Tensor, num_experts: int, block_m: int) -> Sorted:
    """ids [T, top_k] int64, each in 0 .. num_experts - 1."""
    assert ids.dtype == torch.int64 and ids.is_contiguous()
    count = ids.numel()
    num_tiles = count // block_m + min(num_experts, count)
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    pairs = torch.empty(num_tiles * block_m, dtype=torch.int32, device=ids.device)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
    experts.count_kernel[(num_experts,)](ids, counts, count, BLOCK=BLOCK, num_warps=4)
    experts.place_kernel[(num_experts,)](
        *(ids, counts, pairs, tile_experts, count, num_tiles),
        **place_constants(num_experts, block_m),
        num_warps=4,
    )
    return Sorted(pairs, tile_experts, block_m)


def place_constants(num_experts: int, block_m: int) -> dict[str, Any]:
    width = triton.next_power_of_2(num_experts)
    return {"EXPERTS": num_experts, "WIDTH": width, "BLOCK_M": block_m, "BLOCK": BLOCK}


def product_constants(n: int, size_k: int, top_k: int, gated: bool, block_m: int, upcast: bool) -> dict[str, Any]:
    fixed = {"N": n, "SIZE_K": size_k, "TOP_K": top_k, "GATED": gated, "UPCAST": upcast}
    return fixed | {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": 64}


def moe(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, out: Tensor | None = None) -> Tensor:
    """x [T, hidden]; ids [T, top_k] int64 and weights [T, top_k] fp32: of each token's experts; gate_up [experts, 2 *
    size, hidden], down [experts, hidden, size] -> [T, hidden], in out or like x: the sum of weight * down(silu(gate) *
    up) over a token's experts."""
    (num_tokens, hidden), (num_experts, _, size), top_k = x.shape, down.shape, ids.shape[1]
    assert x.stride(1) == 1 and gate_up.shape == (num_experts, 2 * size, hidden) and down.shape[1] == hidden
    assert ids.shape == weights.shape == (num_tokens, top_k) and weights.dtype == torch.float32
    assert all(tensor.is_contiguous() for tensor in (weights, gate_up, down))
    assert x.dtype == gate_up.dtype == down.dtype
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == x.shape and out.is_contiguous()
    upcast = INTERPRETED and x.dtype == torch.bfloat16  # then what lies between is not rounded to it either
    dtype, count = torch.float32 if upcast else x.dtype, ids.numel()
    order = sort_pairs(ids, num_experts, 16 if count <= 16 * num_experts else 64)
    middle, parts = x.new_empty(count, size, dtype=dtype), x.new_empty(count, hidden, dtype=dtype)
    _product(x, gate_up, middle, order, None, top_k, upcast)
    _product(middle, down, parts, order, weights, 1, upcast)
    experts.combine_kernel[(num_tokens, triton.cdiv(hidden, BLOCK))](
        parts, out, SIZE=hidden, TOP_K=top_k, BLOCK=BLOCK, num_warps=4
    )
    return out


def _product(
    x: Tensor, w: Tensor, out: Tensor, order: Sorted, weights: Tensor | None, top_k: int, upcast: bool
) -> None:
    """weights: None in the first of the two products, which is gated."""
    (count, n), size_k = out.shape, x.shape[1]
    constants = product_constants(n, size_k, top_k, weights is None, order.block_m, upcast)
    experts.grouped_kernel[(len(order.tile_experts), triton.cdiv(n, constants["BLOCK_N"]))](
        *(x, w, out, order.pairs, order.tile_experts, weights, count, x.stride(0)),
        **constants,
        num_warps=4,
    )
