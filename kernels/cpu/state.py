"""Recurrent states in pages (state.cpp), for CPUs. Its reference is StateReference in minivllm/attention/state.py."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from minivllm.kernels.cpu import build
from minivllm.kv_groups import StateSpec

NAME = "state"
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _States(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "gates", "weights", "pages", "out", "spans", "starts")),
        *((name, c_int64) for name in ("qkv_stride", "page_bytes", "requests", "key_heads", "value_heads")),
        *((name, c_int64) for name in ("keys", "values", "kernel", "q_at", "k_at", "v_at")),
        ("kind", c_int32),
        ("corrects", c_int32),
    ]


def unsupported_reason() -> str | None:
    """Why the kernel cannot be used here, or None. The first call may compile."""
    return build.unsupported_reason(NAME)


@functools.cache
def _function():
    function = build.library(NAME).minivllm_take
    function.argtypes, function.restype = [ctypes.POINTER(_States), c_void_p, c_int64], None
    return function


def take(
    qkv: Tensor,
    gates: Tensor,
    weights: Tensor,
    pages: Tensor,
    spans: np.ndarray,
    starts: np.ndarray,
    state: StateSpec,
    out: Tensor,
) -> None:
    """As StateBackend.forward. pages [num_blocks, ..], each block one run of memory; spans [n, 4] int32, as
    state.Span; starts [requests + 1] int32: spans starts[r] : starts[r + 1] are of request r, in the order of its
    tokens."""
    assert qkv.stride(1) == 1 and qkv.shape[1] == state.channels and pages.is_contiguous()
    assert all(x.dtype is torch.float32 and x.is_contiguous() for x in (gates, weights, out))
    assert gates.shape[1:] == (2, state.num_v_heads) and weights.shape == state.weights_shape
    assert out.shape == (len(gates), state.num_v_heads, state.v_size)
    assert spans.dtype == starts.dtype == np.int32 and spans.flags.c_contiguous and spans.shape == (starts[-1], 4)
    page_bytes = pages.stride(0) * pages.itemsize
    assert page_bytes >= 4 * state.num_floats and page_bytes % 4 == 0, "a state does not fit a block"
    if len(spans):
        assert spans[:, 1].max() <= len(qkv) and spans[:, 2:].min() >= -1 and spans[:, 2:].max() < len(pages)
    data = (qkv.data_ptr(), gates.data_ptr(), weights.data_ptr(), pages.data_ptr(), out.data_ptr())
    sizes = qkv.stride(0), page_bytes, len(starts) - 1, state.num_k_heads, state.num_v_heads, state.k_size, state.v_size
    how = *(place.start or 0 for place in state.places), KINDS[qkv.dtype], state.rule == "gated_delta"
    of = _States(*data, spans.ctypes.data, starts.ctypes.data, *sizes, state.kernel, *how)
    _function()(ctypes.byref(of), build.torch_parallel(), torch.get_num_threads())
