"""Launching the attention kernels: shapes and strides are checked here, constants and tiles chosen."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.kernels.triton import attention
from minivllm.kernels.triton.elementwise import KINDS
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


def constants(head: Head, page: int, tile: Tile, upcast: bool, kind: int = 0) -> dict[str, Any]:
    """What decode_kernel and prefill_kernel are compiled with. kind: of the cache, see quantised_kv.py."""
    return {
        "KV_HEADS": head.num_kv_heads,
        "GROUP": head.num_heads // head.num_kv_heads,
        "HEAD_SIZE": head.head_size,
        "WIDTH": power_of_two(head.head_size),
        "PAGE": page,
        "WINDOW": head.window,
        "SOFT_CAP": head.soft_cap > 0,
        "KIND": kind,
        "UPCAST": upcast,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }


class Scratch:
    """What splits leave for the join: grows to the largest batch seen, which the warm-up's is. What it has outgrown is
    kept, since captured launches go on writing there."""

    def __init__(self, device: torch.device):
        self.device = device
        self.memory = torch.empty(0, dtype=torch.float32, device=device)
        self._outgrown: list[Tensor] = []

    def take(self, places: int, head_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """partial [places, head_size], peaks [places], norms [places]."""
        size = places * (head_size + 2)
        if self.memory.numel() < size:
            self._outgrown.append(self.memory)
            self.memory = torch.empty(size, dtype=torch.float32, device=self.device)
        return self.memory[:size].split([places * head_size, places, places])


class Requests(NamedTuple):
    """One launch's. All int32 on the device."""

    rows: Tensor  # [requests]: the first query row of each
    seq_lens: Tensor  # [requests]
    tables: Tensor  # [requests, blocks]
    starts: Tensor  # [requests + 1]: queries of the requests before each
    num_queries: int  # of all


class ByHead(NamedTuple):
    """What a layer may add to the scores of each head: fp32 [heads] on the device."""

    slopes: Tensor | None = None  # ALiBi's
    sinks: Tensor | None = None


NOTHING = ByHead()


def _page(k_cache: Tensor, head: Head) -> int:
    """Block size of a cache of numbers or of codes."""
    return k_cache.shape[2] // (head.head_size + 4) if k_cache.dtype in KINDS else k_cache.shape[2]


def _bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.int8) if cache.dtype in KINDS else cache


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, requests: Requests, head: Head, out: Tensor, by_head: ByHead
) -> None:
    page = _page(k_cache, head)
    inner = (page * (head.head_size + 4),) if k_cache.dtype in KINDS else (page, head.head_size)
    assert k_cache.shape == (len(k_cache), head.num_kv_heads, *inner), k_cache.shape
    assert k_cache.shape == v_cache.shape and k_cache.is_contiguous() and v_cache.is_contiguous()
    assert q.shape == out.shape == (len(q), head.num_heads, head.head_size) and out.is_contiguous()
    assert q.stride(1) == head.head_size and q.stride(2) == 1, q.stride()
    assert q.dtype == out.dtype and q.dtype in DTYPES and k_cache.dtype == v_cache.dtype, q.dtype
    assert k_cache.dtype in (q.dtype, *KINDS), k_cache.dtype
    assert requests.tables.stride(1) == 1 and len(requests.tables) == len(requests.rows) == len(requests.seq_lens)
    for values in by_head:
        assert values is None or (values.shape == (head.num_heads,) and values.dtype == torch.float32), by_head


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
    by_head: ByHead = NOTHING,
) -> None:
    """One query for each request. q and out [T, heads, head_size], caches [num_blocks, kv_heads, block_size, head_size]
    of q's dtype, or of codes, see quantised_kv.py."""
    _check(q, k_cache, v_cache, requests, head, out, by_head)
    assert 1 <= num_splits <= attention.MAX_SPLITS and tile.block_m * head.num_kv_heads >= head.num_heads
    count, split = len(requests.rows), num_splits > 1
    partial, peaks, norms = scratch.take(count * head.num_heads * num_splits if split else 1, head.head_size)
    fixed = _constants(q, k_cache, head, tile)
    attention.decode_kernel[(count, head.num_kv_heads, num_splits)](
        *(q, _bytes(k_cache), _bytes(v_cache), requests.rows, requests.seq_lens, requests.tables, out),
        *(partial, peaks, norms, *by_head),
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


def _constants(q: Tensor, k_cache: Tensor, head: Head, tile: Tile) -> dict[str, Any]:
    upcast = INTERPRETED and q.dtype == torch.bfloat16
    return constants(head, _page(k_cache, head), tile, upcast, KINDS.get(k_cache.dtype, 0))


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
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    requests: Requests,
    head: Head,
    out: Tensor,
    tile: Tile,
    by_head: ByHead = NOTHING,
) -> None:
    """Any number of queries for each request. Shapes as in decode()."""
    _check(q, k_cache, v_cache, requests, head, out, by_head)
    count, block_q = len(requests.rows), tile.block_m * head.num_kv_heads // head.num_heads
    assert block_q >= 1 and len(requests.starts) == count + 1
    attention.prefill_kernel[(requests.num_queries // block_q + count, head.num_kv_heads)](
        *(q, _bytes(k_cache), _bytes(v_cache)),
        *(requests.starts, requests.rows, requests.seq_lens, requests.tables, out, *by_head),
        *head.scales(),
        q.stride(0),
        requests.tables.stride(0),
        count,
        **_constants(q, k_cache, head, tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
