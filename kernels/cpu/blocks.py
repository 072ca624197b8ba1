"""Products with the weights of a GGUF file as it stores them, for CPUs (block_linear.cpp, block_kind.cpp): each code,
scale and minimum is the file's. The layouts are the C++ files' affair.

Its reference, slow and obviously right, is `gguf.quants.dequantize` and a float64 product.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.kernels.cpu import build, memory

NAME, KIND_NAME = "block_linear", "block_kind"
# Names of gguf.GGMLQuantizationType and of block_formats.h: weights in a block, bytes of one.
SIZES = {
    **{"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)},
    **{"Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)},
    **{"IQ4_NL": (32, 18), "IQ4_XS": (256, 136)},
}
KINDS = tuple(SIZES)
DTYPES = (torch.bfloat16, torch.float32)
ACTIVATION_BITS = (16, 8)  # of the integers that inputs become
UNITS = ("plain loops", "AVX2", "AVX-VNNI in 256 bits", "ARM's dot product", "ARM's int8 matrix product")


class Blocks(NamedTuple):
    """Rows of a matrix as a GGUF file holds them."""

    kind: str  # of KINDS
    rows: Tensor  # uint8 [rows, bytes a row]; may be a view of the mapped file

    @property
    def n_in(self) -> int:
        weights, size = SIZES[self.kind]
        return self.rows.shape[1] // size * weights


class _Part(ctypes.Structure):
    _fields_ = (("tiles", ctypes.c_void_p), ("multiply", ctypes.c_void_p), ("rows", ctypes.c_int64))


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("parts", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("bits", ctypes.c_int64),
    )


def unsupported_reason() -> str | None:
    """Why the kernels cannot be used here, or None. The first call may compile."""
    return build.unsupported_reason(NAME)


def unit() -> str:
    """What multiplies here."""
    return UNITS[_library().minivllm_blocks_unit()]


@functools.cache
def _library() -> ctypes.CDLL:
    lib, pointer, number = build.library(NAME), ctypes.c_void_p, ctypes.c_int64
    lib.minivllm_blocks_linear.argtypes = [*[pointer] * 3, *[number] * 4, pointer, number]
    lib.minivllm_blocks_linear.restype, lib.minivllm_blocks_unit.restype = None, number
    return lib


@functools.cache
def _library_of(kind: str) -> ctypes.CDLL:
    lib, pointer, number = build.library(KIND_NAME, kind), ctypes.c_void_p, ctypes.c_int64
    lib.minivllm_kind_packed_bytes.argtypes, lib.minivllm_kind_packed_bytes.restype = [number] * 2, number
    lib.minivllm_kind_pack.argtypes = [pointer, number, number, pointer, pointer, number]
    lib.minivllm_kind_rows.argtypes = [pointer, pointer, number, number, pointer, number, pointer, number]
    lib.minivllm_kind_pack.restype = lib.minivllm_kind_rows.restype = None
    return lib


def linear_address() -> int:
    """Of minivllm_blocks_linear, for other libraries' calls."""
    return _address(_library().minivllm_blocks_linear)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value


class BlockMatrix:
    """y = x W^T + b, W [n_out, n_in] made of `parts` one above the other, whose kinds may differ. It keeps a copy of
    its own, so that what it was given may be dropped. bias: [n_out], or None.

    Inputs become integers, with a scale for each 32 of them: with activation_bits of 16 an input errs by at most 2^-15
    of the largest of the 32, with 8 by 2^-8. llama.cpp has 8, with a scale for 32 or, beside K-quants, for 256.
    """

    traceable = False  # it holds addresses

    def __init__(self, parts: Sequence[Blocks], n_in: int, bias: Tensor | None = None, activation_bits: int = 16):
        assert activation_bits in ACTIVATION_BITS, activation_bits
        assert all(part.n_in == n_in and n_in % SIZES[part.kind][0] == 0 for part in parts), (n_in, parts)
        self.n_in, self.n_out = n_in, sum(len(part.rows) for part in parts)
        self.kinds = tuple(part.kind for part in parts)
        self._tiles = [_pack(part) for part in parts]
        multiply = [_address(getattr(_library_of(p.kind), f"minivllm_kind_multiply_{activation_bits}")) for p in parts]
        self._parts = (_Part * len(parts))(
            *(_Part(t.data_ptr(), at, len(p.rows)) for t, at, p in zip(self._tiles, multiply, parts, strict=True))
        )
        self.bias = None if bias is None else bias.float().contiguous()
        bias_at = None if bias is None else self.bias.data_ptr()
        self._matrix = _Matrix(ctypes.addressof(self._parts), len(parts), bias_at, self.n_out, n_in, activation_bits)
        self.address = ctypes.addressof(self._matrix)
        self._linear, self._parallel = _library().minivllm_blocks_linear, build.torch_parallel()

    @property
    def num_bytes(self) -> int:
        return sum(tiles.nbytes for tiles in self._tiles)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, n_in] in bf16 or fp32 -> [T, n_out] in out_dtype (bf16 or fp32; x's).

        A row of the result depends on its row of x alone, bit for bit.
        """
        x = x.contiguous()
        out_dtype = out_dtype or x.dtype
        assert x.dim() == 2 and x.shape[1] == self.n_in, (x.shape, self.n_in)
        assert x.dtype in DTYPES and out_dtype in DTYPES, (x.dtype, out_dtype)
        y = torch.empty((x.shape[0], self.n_out), dtype=out_dtype)
        flags = (x.dtype is torch.bfloat16, out_dtype is torch.bfloat16, 0)
        threads = torch.get_num_threads()
        self._linear(self.address, x.data_ptr(), y.data_ptr(), len(x), *flags, self._parallel, threads)
        return y


def _pack(part: Blocks) -> Tensor:
    rows = part.rows.contiguous()
    assert rows.dtype is torch.uint8 and rows.dim() == 2 and rows.device.type == "cpu", (rows.dtype, rows.shape)
    lib, threads = _library_of(part.kind), (build.torch_parallel(), torch.get_num_threads())
    tiles = memory.empty(lib.minivllm_kind_packed_bytes(len(rows), part.n_in))
    lib.minivllm_kind_pack(rows.data_ptr(), len(rows), part.n_in, tiles.data_ptr(), *threads)
    return tiles


def dequantise(blocks: Blocks, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, n_in] in fp32, as gguf's own decoder gives them bit for bit, or in bf16, each rounded once."""
    return dequantise_stacked([blocks], dtype)


def dequantise_stacked(parts: Sequence[Blocks], dtype: torch.dtype = torch.float32) -> Tensor:
    """The same of several, one above the other."""
    to = torch.empty((sum(len(part.rows) for part in parts), parts[0].n_in), dtype=dtype)
    first = 0
    for part in parts:
        _read_rows(part, None, to[first : first + len(part.rows)])
        first += len(part.rows)
    return to


def look_up(blocks: Blocks, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """ids [T] int64, rows of an embedding -> [T, n_in]."""
    assert ids.dtype is torch.int64 and ids.dim() == 1, (ids.dtype, ids.shape)
    to = torch.empty((len(ids), blocks.n_in), dtype=dtype)
    _read_rows(blocks, ids.contiguous(), to)
    return to


def _read_rows(blocks: Blocks, ids: Tensor | None, to: Tensor) -> None:
    """to [rows, n_in]: those of `ids`, or all."""
    assert to.dtype in DTYPES and blocks.rows.is_contiguous() and blocks.rows.dtype is torch.uint8
    assert to.is_contiguous() and to.shape[1] == blocks.n_in, (to.shape, blocks.n_in)
    at = None if ids is None else ids.data_ptr()
    where = blocks.rows.data_ptr(), at, len(to), blocks.n_in, to.data_ptr()
    threads = build.torch_parallel(), torch.get_num_threads()
    _library_of(blocks.kind).minivllm_kind_rows(*where, to.dtype is torch.bfloat16, *threads)
