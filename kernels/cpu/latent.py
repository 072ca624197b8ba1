"""Absorbed latent attention over pages (latent.cpp), for CPUs. Its reference is attend_absorbed in
minivllm/attention/latent.py, between the product that absorbs and the one that expands."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from minivllm.kernels.cpu import build

NAME = "latent"
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MOST_HEADS = 24  # of a task: its queries and sums then stay in the caches that are a core's own


class _Latents(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("cache", "tables", "owners", "limits", "q", "out")),
        *((name, c_int64) for name in ("width", "block_size", "size", "rank", "heads", "queries", "heads_each")),
        *(("scale", c_float), ("kind", c_int32)),
    ]


def unsupported_reason() -> str | None:
    """Why the kernel cannot be used here, or None. The first call may compile."""
    return build.unsupported_reason(NAME)


@functools.cache
def _function():
    function = build.library(NAME).minivllm_latent
    function.argtypes, function.restype = [ctypes.POINTER(_Latents), c_void_p, c_int64], None
    return function


def attend(
    q: Tensor, cache: Tensor, tables: np.ndarray, owners: np.ndarray, limits: np.ndarray, rank: int, scale: float
) -> Tensor:
    """q [n, heads, size] float32, cache [num_blocks, block_size, size] -> [n, heads, rank] float32. Query i sees the
    first limits[i] >= 1 tokens of the blocks that tables[owners[i]] names; all three are int32."""
    num_queries, heads, size = q.shape
    assert q.dtype is torch.float32 and q.is_contiguous() and cache.is_contiguous() and cache.shape[2] == size
    assert all(x.dtype == np.int32 and x.flags.c_contiguous for x in (tables, owners, limits))
    assert len(owners) == len(limits) == num_queries and 0 < rank <= size
    if num_queries:
        assert limits.min() >= 1 and limits.max() <= tables.shape[1] * cache.shape[1] and owners.max() < len(tables)
    out, threads = q.new_empty(num_queries, heads, rank), torch.get_num_threads()
    data = (x.ctypes.data for x in (tables, owners, limits))
    sizes = tables.shape[1], cache.shape[1], size, rank, heads, num_queries, _heads_each(heads, num_queries, threads)
    of = _Latents(cache.data_ptr(), *data, q.data_ptr(), out.data_ptr(), *sizes, scale, KINDS[cache.dtype])
    _function()(ctypes.byref(of), build.torch_parallel(), threads)
    return out


def _heads_each(heads: int, num_queries: int, threads: int) -> int:
    """Of a task: few queries are cut by heads, so that there are two tasks for each thread."""
    cuts = -(-2 * threads // max(1, num_queries)) if threads > 1 else 1
    return min(MOST_HEADS, -(-heads // cuts))
