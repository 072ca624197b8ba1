"""Weights as floats of 8 or 4 bits with scales: what the formats of them share.

FP8 is e4m3 (torch.float8_e4m3fn), with a scale for the matrix, for each output, or for a block of outputs and inputs.
FP4 is e2m1: two in a byte, the first in the low nibble. MXFP4 (OCP's microscaling, 2023) has a power of two for 32 of
them, as an exponent of 8 bits; NVFP4 an e4m3 scale for 16 and a float32 for the whole matrix.

Products are exact in float32 before they are rounded: 4 bits of a code by 24 of a scale. No kernel multiplies FP8 as it
is stored, nor NVFP4; MXFP4 with scales that fp16 holds is Q5_0 unrounded, because twice an e2m1 is an integer to 12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.kernels.cpu.blocks import Blocks
from minivllm.layers.stored import Axis, TensorSpec
from minivllm.quantization.codes import in_blocks

E4M3 = torch.float8_e4m3fn
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127  # of an exponent of 8 bits
MX, NV = 32, 16  # FP4 numbers with a scale


def unpack_e2m1(pairs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 [..., n] -> [..., 2 * n]."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=dtype, device=pairs.device)
    return table[torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).int()]


def power(exponents: Tensor) -> Tensor:
    """uint8 -> float32: 2^(e - 127)."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - BIAS)


def by_group(values: Tensor, scales: Tensor) -> Tensor:
    """[n_out, n_in] times [n_out, groups]."""
    return (values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


def beside(*names: str, shape: tuple[int, ...] = (1,), dtype: torch.dtype | None = None) -> tuple[TensorSpec, ...]:
    """What files keep of activations, which stay in the model's dtype here."""
    return tuple(TensorSpec(name, shape, dtype, None, None, optional=True) for name in names)


@dataclass(frozen=True, slots=True)
class FP8:
    """weight [n_out, n_in], and its scales: `scale_name`."""

    scale_name: str
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale; None: see `scale_shape`
    scale_shape: tuple[int, ...] | None = None  # of the matrix's one scale; None: [n_out, 1]
    others: Sequence[TensorSpec] = ()
    dense_because = "no kernel multiplies FP8"

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        name = self.scale_name
        if self.block:
            rows, columns = (Axis(axis, size) for axis, size in enumerate(self.block))
            scales = TensorSpec(name, (rows.size(n_out), columns.size(n_in)), None, rows, columns)
        elif self.scale_shape is not None:
            scales = TensorSpec(name, self.scale_shape, None, None, None)
        else:
            scales = TensorSpec(name, (n_out, 1), None, Axis(0), None)
        return (TensorSpec("weight", (n_out, n_in), E4M3), scales, *self.others)

    def kind(self, n_in: int) -> str | None:
        return None

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        return None

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Rounded once to the scales' dtype; float32 for scales of 8 bits, which are powers of two."""
        weight, scales = held["weight"].float(), held[self.scale_name]
        wide = scales.float()
        if self.block:
            (n_out, n_in), (rows, columns) = weight.shape, self.block
            wide = wide.repeat_interleave(rows, 0)[:n_out].repeat_interleave(columns, 1)[:, :n_in]
        return (weight * wide).to(scales.dtype if scales.dtype.itemsize > 1 else torch.float32)


@dataclass(frozen=True, slots=True)
class MXFP4:
    """codes: uint8 [n_out, n_in / 2], or [n_out, n_in / 32, 16] `in_groups`; scales: uint8 [n_out, n_in / 32]."""

    codes: str
    scales: str
    in_groups: bool = False
    others: Sequence[TensorSpec] = ()
    dense_because = f"no block fits: its inputs are no multiple of {MX}"

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        if n_in % MX:
            raise ModelError(f"MXFP4: a matrix of {n_in} inputs does not fill its groups of {MX}")
        groups, pairs = Axis(1, MX), (Axis(1, MX) if self.in_groups else Axis(1, 2))
        shape = (n_out, n_in // MX, MX // 2) if self.in_groups else (n_out, n_in // 2)
        codes = TensorSpec(self.codes, shape, torch.uint8, inputs=pairs)
        return (codes, TensorSpec(self.scales, (n_out, n_in // MX), torch.uint8, inputs=groups), *self.others)

    def kind(self, n_in: int) -> str | None:
        return "Q5_0"

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        codes = unpack_e2m1(held[self.codes].flatten(1)).mul_(2).short()
        return in_blocks("Q5_0", codes, power(held[self.scales]) / 2)

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """bf16: exact, as long as it is a normal number."""
        codes = unpack_e2m1(held[self.codes].flatten(1), torch.bfloat16)
        return by_group(codes, power(held[self.scales]).bfloat16())


@dataclass(frozen=True, slots=True)
class NVFP4:
    """codes: uint8 [n_out, n_in / 2]; scales: e4m3 [n_out, n_in / 16]; and the matrix's own, `whole`."""

    codes: str
    whole: str
    whole_shape: tuple[int, ...]
    divides: bool
    gives: torch.dtype = torch.float32
    others: Sequence[TensorSpec] = ()
    dense_because = f"groups of {NV} fill no block"

    def tensors(self, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        if n_in % NV:
            raise ModelError(f"NVFP4: a matrix of {n_in} inputs does not fill its groups of {NV}")
        return (
            TensorSpec(self.codes, (n_out, n_in // 2), torch.uint8, inputs=Axis(1, 2)),
            TensorSpec("weight_scale", (n_out, n_in // NV), E4M3, inputs=Axis(1, NV)),
            TensorSpec(self.whole, self.whole_shape, torch.float32, None, None),
            *self.others,
        )

    def kind(self, n_in: int) -> str | None:
        return None

    def blocks(self, held: Mapping[str, Tensor]) -> Blocks | None:
        return None

    def dequantise(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        scales, whole = held["weight_scale"].float(), held[self.whole]
        scales = scales / whole if self.divides else scales * whole
        return by_group(unpack_e2m1(held[self.codes]), scales).to(self.gives)
