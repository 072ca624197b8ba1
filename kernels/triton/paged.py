"""Launching the attention kernels: shapes and strides are checked here, constants and tiles chosen."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.kernels.triton import attention
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.kernels.triton.tiles import Tile, power_of_two

LOG2E = math.log2(math.e)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Head(NamedTuple):
    """One attention layer, as the kernels are compiled for it."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int  # 0: none
    soft_cap: float  # 0: none

    def scales(self) -> tuple[float, float]:
        """(scale, cap) as the kernels take them: scores come out in powers of two."""
        if self.soft_cap:
            return self.scale / self.soft_cap, self.soft_cap * LOG2E
        return self.scale * LOG2E, 0.0


def constants(head: Head, page: int, tile: Tile, upcast: bool) -> dict[str, Any]:
    """What decode_kernel and prefill_kernel are compiled with."""
    return {
        "KV_HEADS": head.num_kv_heads,
        "GROUP": head.num_heads // head.num_kv_heads,
        "HEAD_SIZE": head.head_size,
        "WIDTH": power_of_two(head.head_size),
        "PAGE": page,
        "WINDOW": head.window,
        "SOFT_CAP": head.soft_cap > 0,
        "UPCAST": upcast,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }


class Scratch:
    """What splits leave for the join: grows to the largest batch seen, which the warm-up's is."""

    def __init__(self, device: torch.device):
        self.device = device
        self.memory = torch.empty(0, dtype=torch.float32, device=device)

    def take(self, places: int, head_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """partial [places, head_size], peaks [places], norms [places]."""
        size = places * (head_size + 2)
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.float32, device=self.device)
        return self.memory[:size].split([places * head_size, places, places])


class Requests(NamedTuple):
    """One launch's. All int32 on the device."""

    rows: Tensor  # [requests]: the first query row of each
    seq_lens: Tensor  # [requests]
    tables: Tensor  # [requests, blocks]
    starts: Tensor  # [requests + 1]: queries of the requests before each
    num_queries: int  # of all


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, requests: Requests, head: Head, out: Tensor) -> None:
    num_blocks, kv_heads, _, head_size = k_cache.shape
    assert (kv_heads, head_size) == (head.num_kv_heads, head.head_size), k_cache.shape
    assert k_cache.shape == v_cache.shape and k_cache.is_contiguous() and v_cache.is_contiguous()
    assert q.shape == out.shape == (len(q), head.num_heads, head_size) and out.is_contiguous()
    assert q.stride(1) == head_size and q.stride(2) == 1, q.stride()
    assert q.dtype == out.dtype == k_cache.dtype == v_cache.dtype and q.dtype in DTYPES, q.dtype
    assert requests.tables.stride(1) == 1 and len(requests.tables) == len(requests.rows) == len(requests.seq_lens)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    requests: Requests,
    head: Head,
    out: Tensor,
    scratch: Scratch,
    tile: Tile,
    num_splits: int,
) -> None:
    """One query for each request. q and out [T, heads, head_size], caches [num_blocks, kv_heads, block_size,
    head_size]."""
    _check(q, k_cache, v_cache, requests, head, out)
    assert 1 <= num_splits <= attention.MAX_SPLITS and tile.block_m * head.num_kv_heads >= head.num_heads
    count, split = len(requests.rows), num_splits > 1
    partial, peaks, norms = scratch.take(count * head.num_heads * num_splits if split else 1, head.head_size)
    fixed = constants(head, k_cache.shape[2], tile, INTERPRETED and q.dtype == torch.bfloat16)
    attention.decode_kernel[(count, head.num_kv_heads, num_splits)](
        *(q, k_cache, v_cache, requests.rows, requests.seq_lens, requests.tables, out, partial, peaks, norms),
        *head.scales(),
        q.stride(0),
        requests.tables.stride(0),
        **fixed,
        SPLIT=split,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        attention.join_kernel[(count, head.num_heads)](
            *(requests.rows, requests.seq_lens, out, partial, peaks, norms, num_splits),
            **join_constants(head, tile),
            num_warps=4,
        )


def join_constants(head: Head, tile: Tile) -> dict[str, Any]:
    return {
        "HEADS": head.num_heads,
        "HEAD_SIZE": head.head_size,
        "WIDTH": power_of_two(head.head_size),
        "WINDOW": head.window,
        "BLOCK_N": tile.block_n,
        "SPLITS": attention.MAX_SPLITS,
    }


def prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, requests: Requests, head: Head, out: Tensor, tile: Tile
) -> None:
    """Any number of queries for each request. Shapes as in decode()."""
    _check(q, k_cache, v_cache, requests, head, out)
    count, block_q = len(requests.rows), tile.block_m * head.num_kv_heads // head.num_heads
    assert block_q >= 1 and len(requests.starts) == count + 1
    attention.prefill_kernel[(requests.num_queries // block_q + count, head.num_kv_heads)](
        *(q, k_cache, v_cache, requests.starts, requests.rows, requests.seq_lens, requests.tables, out),
        *head.scales(),
        q.stride(0),
        requests.tables.stride(0),
        count,
        **constants(head, k_cache.shape[2], tile, INTERPRETED and q.dtype == torch.bfloat16),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
