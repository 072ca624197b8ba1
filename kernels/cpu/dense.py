"""Products with a bf16 matrix on the CPU's matrix unit (AMX) or vector unit (AVX-512 BF16): dense_linear.cpp. The
layout is dense.h's affair.

Its reference, slow and obviously right, is a float64 product.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from minivllm.kernels.cpu import build, memory

NAME = "dense_linear"
STEP = 32  # the number of inputs is a multiple of it


_Matrix = build.matrix_struct("outputs", "inputs", "halves")


@functools.cache
def unsupported_reason() -> str | None:
    """Why the kernels cannot be used here, or None. The first call may compile."""
    if (why := build.unsupported_reason(NAME)) is not None:
        return why
    return None if _library().minivllm_dense_unit() else "this CPU multiplies no bfloat16 (AMX, AVX-512 BF16)"


def unit() -> str:
    """What multiplies here."""
    assert unsupported_reason() is None, unsupported_reason()
    return ("vector unit, AVX-512 BF16", "matrix unit, AMX")[_library().minivllm_dense_unit() - 1]


@functools.cache
def _library() -> ctypes.CDLL:
    lib, pointer, number = build.library(NAME), ctypes.c_void_p, ctypes.c_int64
    lib.minivllm_dense_bytes.argtypes = [pointer]
    lib.minivllm_dense_pack.argtypes = [*[pointer] * 4, number]
    lib.minivllm_dense_linear.argtypes = [*[pointer] * 3, *[number] * 4, pointer, number]
    lib.minivllm_dense_unit.restype = lib.minivllm_dense_bytes.restype = number
    lib.minivllm_dense_pack.restype = lib.minivllm_dense_linear.restype = None
    return lib


class DenseMatrix:
    """W bf16 [n_out, n_in], packed. n_in is a multiple of STEP. bias: [n_out], or None.

    halves: outputs i and n_out / 2 + i are computed together, for who wants both at once (gate and up).
    """

    traceable = False  # it holds addresses

    def __init__(self, weight: Tensor, bias: Tensor | None = None, halves: bool = False):
        assert unsupported_reason() is None, unsupported_reason()
        assert self.fits(weight) and weight.dtype is torch.bfloat16 and weight.device.type == "cpu"
        lib, weight = _library(), weight.contiguous()
        (self.n_out, self.n_in), self.halves = weight.shape, halves
        assert not halves or self.n_out % 2 == 0, self.n_out
        self.bias = None if bias is None else bias.float().contiguous()
        bias_at = None if bias is None else self.bias.data_ptr()
        self._matrix = _Matrix(None, bias_at, self.n_out, self.n_in, halves)
        self.address = ctypes.addressof(self._matrix)
        self._linear, self._parallel = lib.minivllm_dense_linear, build.torch_parallel()
        self.data = memory.empty(lib.minivllm_dense_bytes(self.address))
        to = self._matrix.weight = self.data.data_ptr()
        lib.minivllm_dense_pack(self.address, weight.data_ptr(), to, self._parallel, torch.get_num_threads())

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    @staticmethod
    def fits(weight: Tensor) -> bool:
        return weight.shape[1] % STEP == 0

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, n_in] bf16 -> [T, n_out] bf16. A row of the result depends on its row of x alone, bit for bit."""
        x = x.contiguous()
        assert x.dim() == 2 and x.shape[1] == self.n_in and x.dtype is torch.bfloat16, (x.shape, x.dtype, self.n_in)
        y = torch.empty((len(x), self.n_out), dtype=torch.bfloat16)
        threads = torch.get_num_threads()
        self._linear(self.address, x.data_ptr(), y.data_ptr(), len(x), 1, 1, 0, self._parallel, threads)
        return y
