"""Paged attention in C++ (kernels/cpu): reads K and V where they lie, in their blocks, and writes new ones on the way.

Layout, one page a block and KV head: [num_blocks, kv_heads, page]. A page is opaque here. K is stored as words of
adjacent elements with the keys side by side, V row by row (bfloat16: in pairs of keys), so that both products run down
whole vectors without shuffles; see kernels/cpu/plan.h. Heads of a block lie together, which is what block moves move.

A quantised cache (int8, e4m3) has a float32 scale for each token and head, for K and for V, inside the page.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec, KVSpec, check_layers
from minivllm.attention.quantised_kv import HALVES, QUANTISED
from minivllm.attention.rows import with_dense_heads
from minivllm.kernels.cpu import build

if TYPE_CHECKING:
    from minivllm.batch import InputBatch

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


class _View(ctypes.Structure):
    _fields_ = [
        *(("num_heads", c_int32), ("window", c_int32), ("scale", c_float), ("soft_cap", c_float)),
        *(("row_wise", c_int32), ("slopes", c_void_p)),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query_start", "seq_lens", "block_tables", "slots")),
        *((name, c_int32) for name in ("num_requests", "table_width", "num_tokens", "padded_tokens")),
    ]


class _Tensors(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "kv", "out")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        ("kind", c_int32),
    ]


SIGNATURES = {
    "minivllm_layout": (c_void_p, [c_int, c_int, c_int, c_int]),
    "minivllm_layout_free": (None, [c_void_p]),
    "minivllm_page_bytes": (c_int64, [c_void_p]),
    "minivllm_plan": (c_void_p, [c_void_p, c_void_p, c_int, c_void_p]),
    "minivllm_plan_free": (None, [c_void_p]),
    "minivllm_attend": (None, [c_void_p, c_int, ctypes.POINTER(_Tensors), c_void_p, c_int]),
}


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.__array_interface__["data"][0]


class _Owned:
    """An object of the library, freed with this one."""

    __slots__ = ("free", "handle")

    def __init__(self, handle: int, free):
        self.handle, self.free = handle, free

    def __del__(self):
        self.free(self.handle)


class CPUAttention:
    adds_slopes: ClassVar[bool] = True
    graphs: ClassVar[Literal["none", "decode", "uniform", "any"]] = "none"
    block_axis: ClassVar[int] = 0
    kv_layout: ClassVar[str] = "pages of kernels/cpu"
    kv_dtypes: ClassVar[frozenset[torch.dtype]] = QUANTISED | HALVES
    host_tables: ClassVar[bool] = True

    def __init__(self, layers: list[AttentionSpec], spec: KVSpec, num_blocks: int, device: torch.device):
        check_layers(layers, spec)
        self.spec = spec
        self.lib = lib = build.library()
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        layout = lib.minivllm_layout(spec.num_kv_heads, spec.head_size, spec.block_size, KINDS[spec.dtype])
        self.layout = _Owned(layout, lib.minivllm_layout_free)
        self.page = lib.minivllm_page_bytes(layout) // spec.dtype.itemsize
        kinds = list(dict.fromkeys(layers))
        self.view_of = {layer: i for i, layer in enumerate(kinds)}
        self.slopes = [None if x.slopes is None else np.array(x.slopes, np.float32) for x in kinds]  # views point there
        self.views = (_View * len(kinds))(
            *(
                _View(x.num_heads, x.sliding_window or 0, x.scale, x.soft_cap or 0.0, x.row_wise, _address(slopes))
                for x, slopes in zip(kinds, self.slopes, strict=True)
            )
        )
        self.parallel = build.torch_parallel()
        # The matrix unit, which takes many rows and not few, adds in another order.
        on_matrix_unit = spec.dtype is torch.bfloat16 and "AMX" in build.isa()
        self.is_by_row = not on_matrix_unit or all(layer.row_wise for layer in layers)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"its kernels run on a CPU, not on {device.type}"
        return build.unsupported_reason()

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, self.spec.num_kv_heads, self.page)

    def prepare(self, batch: InputBatch) -> _Owned:
        arrays = (
            np.ascontiguousarray(batch.query_start, np.int32),
            np.ascontiguousarray(batch.seq_lens, np.int32),
            np.ascontiguousarray(batch.block_tables, np.int32),
            np.ascontiguousarray(batch.slot_mapping, np.int64),
        )
        counts = (batch.num_requests, arrays[2].shape[1], batch.num_tokens, batch.padded_tokens)
        step = _Batch(*(array.__array_interface__["data"][0] for array in arrays), *counts)
        plan = self.lib.minivllm_plan(self.layout.handle, self.views, len(self.views), ctypes.byref(step))
        return _Owned(plan, self.lib.minivllm_plan_free)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: _Owned, layer: AttentionSpec, out: Tensor
    ) -> None:
        q, k, v = with_dense_heads(q), with_dense_heads(k), with_dense_heads(v)
        assert out.is_contiguous() and kv.is_contiguous()
        assert q.dtype == k.dtype == v.dtype == out.dtype
        assert kv.dtype == self.spec.dtype and kv.dtype in (q.dtype, *self.kv_dtypes)
        tensors = _Tensors(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), kv.data_ptr(), out.data_ptr()),
            *(q.stride(0), k.stride(0), v.stride(0), KINDS[q.dtype]),
        )
        view, threads = self.view_of[layer], torch.get_num_threads()
        self.lib.minivllm_attend(meta.handle, view, tensors, self.parallel, threads)
