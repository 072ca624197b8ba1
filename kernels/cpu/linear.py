"""Products with a matrix kept in 4- or 8-bit codes (packed_linear.cpp), for CPUs. The layout is the C++ file's affair.

Its reference, slow and obviously right, is `minivllm.quantization.formats.dequantise` and a float64 product.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from minivllm.kernels.cpu import build

NAME = "packed_linear"
GROUP = 32  # inputs that share a scale
PORTABLE, VNNI = 0, 1
DTYPES = (torch.bfloat16, torch.float32)


_Matrix = build.matrix_struct("outputs", "inputs", "bits")


def unsupported_reason() -> str | None:
    """Why the kernels cannot be used here, or None. The first call may compile."""
    return build.unsupported_reason(NAME)


@functools.cache
def _library() -> ctypes.CDLL:
    lib, pointer, number = build.library(NAME), ctypes.c_void_p, ctypes.c_int64
    lib.minivllm_packed_bytes.argtypes = [number] * 3
    lib.minivllm_pack.argtypes = [*[pointer] * 3, *[number] * 3, pointer]
    lib.minivllm_linear.argtypes = [*[pointer] * 3, *[number] * 4, pointer, number]
    lib.minivllm_unpack.argtypes = [pointer] * 3 + [number]
    lib.minivllm_unpack.restype = None
    lib.minivllm_packed_bytes.restype = lib.minivllm_best_path.restype = number
    lib.minivllm_pack.restype = lib.minivllm_linear.restype = None
    return lib


def best_path() -> int:
    return _library().minivllm_best_path()


class PackedMatrix:
    """W [n_out, n_in]: w = scale * code + minimum, with one scale (and minimum) for GROUP inputs of an output.

    8 bits: codes int8 [n_out, n_in], no minima. 4 bits: codes uint8 [n_out, n_in / 2], of which byte i of a group's 16
    holds input i in its low half and input i + 16 in its high half; minima. Scales and minima: fp16 [n_out, groups].
    n_in is a multiple of GROUP. bias: [n_out], or None.
    """

    traceable = False  # it holds addresses

    def __init__(self, codes: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None = None):
        self.bits = 8 if minima is None else 4
        self.n_out, self.n_in = len(codes), scales.shape[1] * GROUP
        given = [codes, scales] if minima is None else [codes, scales, minima]
        assert codes.dtype is (torch.int8 if self.bits == 8 else torch.uint8), codes.dtype
        assert codes.shape == (self.n_out, self.n_in * self.bits // 8), (codes.shape, scales.shape)
        assert all(t.dtype is torch.float16 and t.shape == scales.shape for t in given[1:]), "scales and minima"
        assert all(t.is_contiguous() and t.device.type == "cpu" for t in given), "dense tensors on the CPU"
        lib = _library()
        self.data = torch.zeros(lib.minivllm_packed_bytes(self.n_out, self.n_in, self.bits), dtype=torch.uint8)
        pointers = [t.data_ptr() for t in given] + [None] * (3 - len(given))
        lib.minivllm_pack(*pointers, self.n_out, self.n_in, self.bits, self.data.data_ptr())
        self.bias = None if bias is None else bias.float().contiguous()
        bias_at = None if bias is None else self.bias.data_ptr()
        self._matrix = _Matrix(self.data.data_ptr(), bias_at, self.n_out, self.n_in, self.bits)
        self.address = ctypes.addressof(self._matrix)
        self._linear, self._parallel, self._best = lib.minivllm_linear, build.torch_parallel(), lib.minivllm_best_path()

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
