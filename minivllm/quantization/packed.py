"""QuantMethods that keep weights in 4 or 8 bits, alone or beside a dense copy: on a CPU, and in 4 bits on a GPU.

Few tokens: the time of a product is the time to read its matrix, so 4 bits win over 16. Many tokens: it is the time to
multiply, and what a library does with bf16 on the CPU's matrix units wins. `dual` keeps both and chooses by the number
of tokens in the step, at a limit that the worker measures (crossover.py).

So in dual the rounding of a token's numbers depends on how many tokens are computed beside it: both products use the
same codes, but the dense one rounds each weight to bf16 and the logits too. Where that must not be, keep packed weights
only (model.dense_copy=false) or dense ones (model.quantization=none); in fp32 there is never a dual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minivllm.kernels.cpu.linear import PackedMatrix
from minivllm.layers.linear import QuantMethod, empty_parameter
from minivllm.quantization.formats import GROUP, Packed, dequantise, quantise

NEVER = 1 << 62
TYPICAL = 16  # what quiet machines gave (bench/LOG.md); until a limit has been measured


@dataclass(slots=True, eq=False)
class Limit:
    """From this many tokens on the dense copy is used. One for the stack of layers, and one for the LM head, which is
    given the sampled tokens alone."""

    tokens: int = NEVER


class Kernel(NamedTuple):
    """Whose products with packed weights are called."""

    make: Callable[[Packed, Tensor | None], Any]  # codes and bias -> the matrix, called as PackedMatrix is
    bits: tuple[int, ...]  # that it takes
    beside_dense: bool  # whether a dense copy may be kept; a GPU's memory is what packing is there to save


def _matrix_on_gpu(packed: Packed, bias: Tensor | None) -> Any:
    from minivllm.kernels.triton.w4a16 import Matrix

    return Matrix(packed, bias)


CPU = Kernel(lambda packed, bias: PackedMatrix(*packed, bias=bias), (4, 8), True)
TRITON = Kernel(_matrix_on_gpu, (4,), False)


def proves_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """One token and many, of a matrix whose last columns fill no block."""
    generator = torch.Generator().manual_seed(0)
    packed = quantise(torch.randn(200, 128, generator=generator) / 8, 4)
    matrix = TRITON.make(Packed(*(x.to(device) for x in packed)), None)
    # Sums are in float32, of 128 products of about 1/8, and rounded once.
    near = {"atol": 64 * torch.finfo(torch.float32).eps, "rtol": 2 * torch.finfo(dtype).eps}
    weight = dequantise(packed).double().to(device)
    return all(
        torch.allclose(matrix(x).double(), x.double() @ weight.T, **near)
        for x in (torch.randn(n, 128, generator=generator).to(device, dtype) for n in (1, 70))
    )


class QuantisedAtLoad:
    """The checkpoint's matrix, rounded to `bits` when it has been loaded; then the dense one is dropped or packed too.

    dense: the method of the bf16 copy for many tokens, or None.
    """

    traceable = False  # by C++ calls, or by launches that the number of tokens chooses

    def __init__(self, bits: int, dense: QuantMethod | None = None, limit: Limit | None = None, kernel: Kernel = CPU):
        self.bits, self.dense, self.limit, self.kernel = bits, dense, limit or Limit(), kernel

    def create(self, layer: nn.Module, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        layer.weight = empty_parameter(n_out, n_in, dtype=dtype)

    def finish(self, layer: nn.Module) -> None:
        self._keep(layer, quantise(layer.weight.data, self.bits))

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        if x.shape[0] >= self.limit.tokens:
            return self.dense.apply(layer, x)
        return layer.matrix(x, layer.output_dtype)

    def _keep(self, layer: nn.Module, packed: Packed) -> None:
        layer.matrix = self.kernel.make(packed, layer.bias)
        layer.weight = None
        if self.dense is not None:
            layer.weight = nn.Parameter(layer.matrix.dense(), requires_grad=False)
            self.dense.finish(layer)


class KeptPacked(QuantisedAtLoad):
    """The checkpoint's own codes: nothing is rounded. The loader fills `codes`, `scales` and `minima`, row for row."""

    def create(self, layer: nn.Module, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        codes = torch.uint8 if self.bits == 4 else torch.int8
        layer.codes = empty_parameter(n_out, n_in * self.bits // 8, dtype=codes)
        layer.scales = empty_parameter(n_out, n_in // GROUP, dtype=torch.float16)
        layer.minima = empty_parameter(n_out, n_in // GROUP, dtype=torch.float16) if self.bits == 4 else None
        layer.weight = None

    def finish(self, layer: nn.Module) -> None:
        self._keep(layer, Packed(layer.codes.data, layer.scales.data, layer.minima.data if self.bits == 4 else None))
        layer.codes = layer.scales = layer.minima = None
