"""Products in float32 with a matrix that is kept in the fewest bits that hold it exactly: float_linear.cpp.

Its reference, slow and obviously right, is a float64 product.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from minivllm.kernels.cpu import build, memory

NAME = "float_linear"
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


_Matrix = build.matrix_struct("outputs", "inputs", "kind")


def unsupported_reason() -> str | None:
    """Why the kernels cannot be used here, or None. The first call may compile."""
    return build.unsupported_reason(NAME)


@functools.cache
def _library() -> ctypes.CDLL:
    lib, pointer, number = build.library(NAME), ctypes.c_void_p, ctypes.c_int64
    lib.minivllm_floats_bytes.argtypes, lib.minivllm_floats_bytes.restype = [pointer], number
    lib.minivllm_floats_pack.argtypes = [*[pointer] * 4, number]
    lib.minivllm_floats_linear.argtypes = [*[pointer] * 3, *[number] * 4, pointer, number]
    lib.minivllm_floats_pack.restype = lib.minivllm_floats_linear.restype = None
    return lib


def linear_address() -> int:
    """Of minivllm_floats_linear, for other libraries' calls."""
    return ctypes.cast(_library().minivllm_floats_linear, ctypes.c_void_p).value


def narrowest(weight: Tensor) -> torch.dtype:
    """The dtype of the fewest bits that holds every weight exactly: a checkpoint's own, before it was widened. weight:
    [n_out, n_in], floating-point."""
    if weight.shape[1] % 2:  # 16-bit weights go by in pairs
        return torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(rows.to(dtype).float(), rows.float()) for rows in weight.split(64)):  # ends at the first no
            return dtype
    return torch.float32


class FloatMatrix:
    """W [n_out, n_in] of any floating-point dtype, packed. bias: [n_out], or None. dtype: what it is kept in."""

    traceable = False  # it holds addresses

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None):
        assert unsupported_reason() is None, unsupported_reason()
        assert weight.device.type == "cpu" and weight.dim() == 2
        lib, self.dtype = _library(), dtype or narrowest(weight)
        weight = weight.to(self.dtype).contiguous()
        self.n_out, self.n_in = weight.shape
        assert self.dtype is torch.float32 or self.n_in % 2 == 0, self.n_in
        self.bias = None if bias is None else bias.float().contiguous()
        bias_at = None if bias is None else self.bias.data_ptr()
        self._matrix = _Matrix(None, bias_at, self.n_out, self.n_in, KINDS[self.dtype])
        self.address = ctypes.addressof(self._matrix)
        self._linear, self._parallel = lib.minivllm_floats_linear, build.torch_parallel()
        self.data = memory.empty(lib.minivllm_floats_bytes(self.address))
        to = self._matrix.weight = self.data.data_ptr()
        lib.minivllm_floats_pack(self.address, weight.data_ptr(), to, self._parallel, torch.get_num_threads())

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, n_in] floating-point -> [T, n_out] in out_dtype (x's), summed in float32. A row of the result depends
        on its row of x alone, bit for bit."""
        assert x.dim() == 2 and x.shape[1] == self.n_in, (x.shape, self.n_in)
        out_dtype = out_dtype or x.dtype
        x = (x if x.dtype is torch.bfloat16 else x.float()).contiguous()
        y = torch.empty((len(x), self.n_out), dtype=out_dtype if out_dtype is torch.bfloat16 else torch.float32)
        flags = (x.dtype is torch.bfloat16, y.dtype is torch.bfloat16, 0)
        threads = torch.get_num_threads()
        self._linear(self.address, x.data_ptr(), y.data_ptr(), len(x), *flags, self._parallel, threads)
        return y.to(out_dtype)
