"""QuantMethods that keep weights in few bits, alone or beside a dense copy: on a CPU, and in 4 bits on a GPU.

Few tokens: the time of a product is the time to read its matrix, so 4 bits win over 16. Many tokens: it is the time to
multiply, and what a library does with bf16 on the CPU's matrix units wins. `dual` keeps both and chooses by the number
of tokens in the step, at a limit that the worker measures (crossover.py).

So in dual the rounding of a token's numbers depends on how many tokens are computed beside it: both products use the
same codes, but the dense one rounds each weight to bf16 and the logits too. Where that must not be, keep packed weights
only (model.dense_copy=false) or dense ones (model.quantization=none); in fp32 there is never a dual.

Every packed weight comes as blocks of a GGUF file, whatever its source, and a kernel makes of them what it multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minivllm.kernels.cpu import blocks as block_kernels
from minivllm.kernels.cpu import dense as dense_kernels
from minivllm.kernels.cpu import linear as kernels
from minivllm.kernels.cpu.blocks import BlockMatrix, Blocks
from minivllm.kernels.cpu.linear import PackedMatrix
from minivllm.layers.linear import QuantMethod, Unquantized
from minivllm.layers.stored import TensorSpec
from minivllm.quantization.base import Scheme
from minivllm.quantization.formats import STORED_BITS, dequantise, from_blocks, quantise, to_blocks

NEVER = 1 << 62
TYPICAL = 16  # what quiet machines gave (bench/LOG.md); until a limit has been measured


@dataclass(slots=True, eq=False)
class Limit:
    """From this many tokens on the dense copy is used. One for the stack of layers, and one for the LM head, which is
    given the sampled tokens alone."""

    tokens: int = NEVER


class Kernel(NamedTuple):
    """Whose products with packed weights are called. parts: the blocks of a layer's matrices, in the order of rows."""

    takes: Callable[[Sequence[Blocks]], bool]  # whether it multiplies with these
    kinds: tuple[str, ...]  # of blocks of which it takes those whose numbers fit
    make: Callable[[Sequence[Blocks], int, Tensor | None, torch.dtype], Any]  # (parts, n_in, bias, activations' dtype)
    bits: tuple[int, ...]  # to which it takes rounded weights
    copied: Callable[[Iterable[str], torch.dtype], bool]  # whether beside these kinds a dense copy is worth its memory
    looks_up: bool  # whether the embedding's rows are taken out of blocks
    activation_bits: int | None = None  # to which it rounds the products' inputs; None: it does not


def _in_vnni_form(kinds: Iterable[str], dtype: torch.dtype) -> bool:
    """Whether PackedMatrix multiplies: with AVX-512 VNNI, or AMX, and activations of 16 bits."""
    bits = {STORED_BITS.get(kind) for kind in kinds}
    return dtype is torch.bfloat16 and len(bits) == 1 and None not in bits and kernels.best_path() == kernels.VNNI


def _matrix_on_cpu(parts: Sequence[Blocks], n_in: int, bias: Tensor | None, dtype: torch.dtype) -> Any:
    if _in_vnni_form((blocks.kind for blocks in parts), dtype) and (packed := PackedMatrix(parts, bias)).is_finite:
        return packed
    return BlockMatrix(parts, n_in, bias)


def _matrix_of_8_bits(parts: Sequence[Blocks], n_in: int, bias: Tensor | None, dtype: torch.dtype) -> Any:
    return BlockMatrix(parts, n_in, bias, activation_bits=8)


def _exact_matrix(parts: Sequence[Blocks], n_in: int, bias: Tensor | None, dtype: torch.dtype) -> Any:
    return PackedMatrix(parts, bias)


def _copied_on_cpu(kinds: Iterable[str], dtype: torch.dtype) -> bool:
    """Where the CPU multiplies bf16, and only beside the kinds for which whole steps were timed in both forms. The
    other kinds have none: it takes four times the memory of such a file's weights, and nobody has measured what for."""
    return _in_vnni_form(kinds, dtype) and dense_kernels.unsupported_reason() is None


def _four_bits(parts: Sequence[Blocks]) -> bool:
    is_known = all(STORED_BITS.get(blocks.kind) == 4 for blocks in parts)
    return is_known and bool(from_blocks(parts).minima.isfinite().all())


def _matrix_on_gpu(parts: Sequence[Blocks], n_in: int, bias: Tensor | None, dtype: torch.dtype) -> Any:
    from minivllm.kernels.triton.w4a16 import Matrix

    return Matrix(from_blocks(parts), bias)


CPU = Kernel(
    takes=lambda parts: all(blocks.kind in block_kernels.KINDS for blocks in parts),
    kinds=block_kernels.KINDS,
    make=_matrix_on_cpu,
    bits=(4, 8),
    copied=_copied_on_cpu,
    looks_up=True,
    activation_bits=16,
)
CPU_BY_BITS = {16: CPU, 8: CPU._replace(make=_matrix_of_8_bits, activation_bits=8)}
# Of weights rounded to 4 or 8 bits where fp32 was asked for by name: plain loops, which round no input. So two ways to
# compute the same differ by the order of sums alone, which is what the conformance tests compare.
EXACT = CPU._replace(make=_exact_matrix, activation_bits=None)
TRITON = Kernel(  # no dense copies: a GPU's memory is what packing is there to save
    takes=_four_bits, kinds=("Q4_0", "Q4_1"), make=_matrix_on_gpu, bits=(4,), copied=lambda *_: False, looks_up=False
)


def proves_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """One token and many, of a matrix whose last columns fill no block."""
    generator = torch.Generator().manual_seed(0)
    packed = quantise(torch.randn(200, 128, generator=generator) / 8, 4)
    blocks = to_blocks(packed)
    matrix = TRITON.make([Blocks(blocks.kind, blocks.rows.to(device))], 128, None, dtype)
    # Sums are in float32, of 128 products of about 1/8, and rounded once.
    near = {"atol": 64 * torch.finfo(torch.float32).eps, "rtol": 2 * torch.finfo(dtype).eps}
    weight = dequantise(packed).double().to(device)
    return all(
        torch.allclose(matrix(x).double(), x.double() @ weight.T, **near)
        for x in (torch.randn(n, 128, generator=generator).to(device, dtype) for n in (1, 70))
    )


class PackedMethod:
    """Products with a layer's packed weight; from `limit` tokens on with the copy that `dense` keeps, if any."""

    traceable = False  # by C++ calls, or by launches that the number of tokens chooses

    def __init__(self, dense: QuantMethod | None = None, limit: Limit | None = None, kernel: Kernel = CPU):
        self.dense, self.limit, self.kernel = dense, limit or Limit(), kernel

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        if x.shape[0] >= self.limit.tokens:
            return self.dense.apply(layer, x)
        return layer.matrix(x, layer.output_dtype)

    def keep(self, layer: nn.Module, parts: Sequence[Blocks], n_in: int, dtype: torch.dtype) -> None:
        """parts: on the layer's device. dtype: of activations."""
        layer.matrix = self.kernel.make(parts, n_in, layer.bias, dtype)
        layer.weight = None
        if self.dense is not None:
            weight = block_kernels.dequantise_stacked(parts, torch.bfloat16)
            layer.weight = nn.Parameter(weight, requires_grad=False)
            self.dense.finish(layer)


class QuantisedAtLoad(PackedMethod, Unquantized):
    """The checkpoint's matrix, rounded to `bits` once it is loaded; then the dense one is dropped or packed too."""

    def __init__(self, bits: int, dense: QuantMethod | None = None, limit: Limit | None = None, kernel: Kernel = CPU):
        super().__init__(dense, limit, kernel)
        self.bits = bits

    def finish(self, layer: nn.Module) -> None:
        weight = layer.weight.data
        self.keep(layer, [to_blocks(quantise(weight, self.bits))], weight.shape[1], weight.dtype)


class KeptPacked(PackedMethod):
    """Products with the checkpoint's own codes, of whatever kinds of blocks: nothing is rounded."""


class AsStored:
    """What a layer has until it is finished, if its checkpoint keeps a matrix of it otherwise than as [n_out, n_in]:
    the tensors that its schemes declare, as they are read (of a mapped file, views). They become blocks for `packed`
    to multiply; without it, or where the numbers fit none of its blocks, a dense weight for `then`."""

    def __init__(
        self,
        schemes: Mapping[str, Scheme],
        then: QuantMethod,
        packed: KeptPacked | None = None,
        unfit: Callable[[nn.Module], None] = lambda layer: None,
    ):
        """schemes: of the layer's parts, in the order of its rows. unfit: told of a layer that is dense after all."""
        self.schemes, self.then, self.packed, self.unfit = schemes, then, packed, unfit

    def tensors(self, part: str, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        return self.schemes[part].tensors(n_out, n_in)

    def create(self, layer: nn.Module, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        self.n_in, self.dtype, self.device = n_in, dtype, torch.get_default_device()
        layer.held = {part: {} for part in self.schemes}
        layer.weight = None

    def finish(self, layer: nn.Module) -> None:
        held, layer.held = layer.held, None
        parts = self._blocks(held)
        if parts and self.packed:
            layer.method = self.packed
            here = [Blocks(kind, rows.to(self.device)) for kind, rows in parts]
            return self.packed.keep(layer, here, self.n_in, self.dtype)
        self.unfit(layer)
        rows = [self._dense(scheme, held[part]) for part, scheme in self.schemes.items()]
        layer.weight, layer.method = nn.Parameter(torch.cat(rows), requires_grad=False), self.then
        self.then.finish(layer)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        raise AssertionError("the layer is not finished")

    def _dense(self, scheme: Scheme, held: Mapping[str, Tensor]) -> Tensor:
        return scheme.dequantise(held, self.dtype).to(self.device, self.dtype)

    def _blocks(self, held: Mapping[str, Mapping[str, Tensor]]) -> list[Blocks] | None:
        """What the kernel multiplies, or None."""
        if self.packed is None:
            return None
        blocks = [found for part, scheme in self.schemes.items() if (found := scheme.blocks(held[part])) is not None]
        return blocks if len(blocks) == len(self.schemes) and self.packed.kernel.takes(blocks) else None


class StackAsStored(AsStored):
    """The same of a stack of experts' matrices, which are multiplied dense: no kernel takes blocks of them."""

    def create(self, layer: nn.Module, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        super().create(layer, n_in, n_out, dtype)
        self.shape = layer.shape

    def finish(self, layer: nn.Module) -> None:
        held, layer.held = layer.held, None
        with self.device:
            weight = torch.empty(self.shape, dtype=self.dtype)
        for part, scheme in self.schemes.items():  # one after the other: only the result is held in full
            weight[layer.rows[part]] = self._dense(scheme, held.pop(part))
        layer.weight, layer.method = nn.Parameter(weight, requires_grad=False), self.then
        self.then.finish(layer)
