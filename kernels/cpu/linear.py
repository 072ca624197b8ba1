"""Products with a matrix kept in 4- or 8-bit codes (packed_linear.cpp), for CPUs. The layout is the C++ file's affair.

Its reference, slow and obviously right, is `minivllm.quantization.formats.dequantise` and a float64 product.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.kernels.cpu import build, memory
from minivllm.kernels.cpu.blocks import SIZES, Blocks

NAME = "packed_linear"
GROUP = 32  # inputs that share a scale
PORTABLE, VNNI = 0, 1
DTYPES = (torch.bfloat16, torch.float32)
OUTPUTS = 16  # of a block of this layout
# The kinds of blocks that have this form: their bits, and fp16 numbers ahead of the codes.
FORMS = {"Q4_0": (4, 1), "Q4_1": (4, 2), "Q8_0": (8, 1)}


_Matrix = build.matrix_struct("outputs", "inputs", "bits")


def unsupported_reason() -> str | None:
    """Why the kernels cannot be used here, or None. The first call may compile."""
    return build.unsupported_reason(NAME)


@functools.cache
def _library() -> ctypes.CDLL:
    lib, pointer, number = build.library(NAME), ctypes.c_void_p, ctypes.c_int64
    lib.minivllm_packed_bytes.argtypes = [number] * 3
    lib.minivllm_pack.argtypes = [pointer, *[number] * 5, *[pointer] * 2, number]
    lib.minivllm_pack.restype = ctypes.c_bool
    lib.minivllm_linear.argtypes = [*[pointer] * 3, *[number] * 4, pointer, number]
    lib.minivllm_unpack.argtypes = [pointer] * 3 + [number]
    lib.minivllm_unpack.restype = None
    lib.minivllm_packed_bytes.restype = lib.minivllm_best_path.restype = number
    lib.minivllm_linear.restype = None
    return lib


def best_path() -> int:
    return _library().minivllm_best_path()


class PackedMatrix:
    """W [n_out, n_in], made of `parts` one above the other: w = scale * code + minimum, with one scale (and minimum)
    for GROUP inputs of an output.

    parts: of the kinds in FORMS, with equal bits. The minimum of a block that has none is 0 in 8 bits, and -8 scales in
    4. It keeps a copy of its own, so that what it was given may be dropped. bias: [n_out], or None.

    is_finite: whether fp16 holds all minima: not those of Q4_0 with a scale above 8191. Else products are no numbers.
    """

    traceable = False  # it holds addresses

    def __init__(self, parts: Sequence[Blocks], bias: Tensor | None = None):
        (self.bits,) = {FORMS[part.kind][0] for part in parts}
        (self.n_in,) = {part.n_in for part in parts}
        self.n_out = sum(len(part.rows) for part in parts)
        for kind, rows in parts:
            assert rows.dtype is torch.uint8 and rows.dim() == 2 and rows.device.type == "cpu", (rows.dtype, rows.shape)
            assert rows.is_contiguous() and rows.shape[1] % SIZES[kind][1] == 0, (kind, rows.shape)
        lib, self._parallel = _library(), build.torch_parallel()
        self.data = memory.empty(lib.minivllm_packed_bytes(self.n_out, self.n_in, self.bits))
        if self.n_out % OUTPUTS:
            self.data[lib.minivllm_packed_bytes(self.n_out // OUTPUTS * OUTPUTS, self.n_in, self.bits) :] = 0
        to, threads, first, self.is_finite = self.data.data_ptr(), torch.get_num_threads(), 0, True
        for kind, rows in parts:
            where = rows.data_ptr(), first, len(rows), self.n_in, *FORMS[kind], to
            self.is_finite &= lib.minivllm_pack(*where, self._parallel, threads)
            first += len(rows)
        self.bias = None if bias is None else bias.float().contiguous()
        bias_at = None if bias is None else self.bias.data_ptr()
        self._matrix = _Matrix(self.data.data_ptr(), bias_at, self.n_out, self.n_in, self.bits)
        self.address = ctypes.addressof(self._matrix)
        self._linear, self._best = lib.minivllm_linear, lib.minivllm_best_path()

    def dense(self) -> Tensor:
        """bf16 [n_out, n_in], each weight rounded once."""
        weight = torch.empty((self.n_out, self.n_in), dtype=torch.bfloat16)
        _library().minivllm_unpack(self.address, weight.data_ptr(), self._parallel, torch.get_num_threads())
        return weight

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, path: int | None = None) -> Tensor:
        """x [T, n_in] in bf16 or fp32 -> [T, n_out] in out_dtype (bf16 or fp32; x's).

        fp32 takes the path without any rounding of x unless another is asked for; in each path a row of the result
        depends on its row of x alone, bit for bit.
        """
        x = x.contiguous()
        out_dtype = out_dtype or x.dtype
        assert x.dim() == 2 and x.shape[1] == self.n_in, (x.shape, self.n_in)
        assert x.dtype in DTYPES and out_dtype in DTYPES, (x.dtype, out_dtype)
        if path is None:
            path = self._best if x.dtype is torch.bfloat16 else PORTABLE
        assert path <= self._best, path
        y = torch.empty((x.shape[0], self.n_out), dtype=out_dtype)
        if len(x):
            bf16 = torch.bfloat16
            flags = (x.dtype is bf16, out_dtype is bf16, path)
            threads = torch.get_num_threads()
            self._linear(self.address, x.data_ptr(), y.data_ptr(), len(x), *flags, self._parallel, threads)
        return y
