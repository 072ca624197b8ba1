"""Weights in 4 or 8 bits: w = scale * code + minimum, one scale (and minimum) for 32 inputs of an output.

These are llama.cpp's Q8_0 (8 bits, no minimum) and Q4_1 (4 bits), and Q4_0 with -8 * scale as its minimum: such a GGUF
file's numbers are taken over as they are. Scales and minima are fp16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
BITS = (4, 8)


class Packed(NamedTuple):
    codes: Tensor  # 8 bits: int8 [n_out, n_in]; 4 bits: uint8 [n_out, n_in / 2], see pack_nibbles
    scales: Tensor  # fp16 [n_out, n_in / GROUP]
    minima: Tensor | None  # fp16, like scales; None: 8 bits

    @property
    def bits(self) -> int:
        return 8 if self.minima is None else 4


def quantise(weight: Tensor, bits: int) -> Packed:
    """Round each weight to the nearest code. weight [n_out, n_in] of any float dtype, n_in a multiple of GROUP.

    No weight moves by more than half a scale, apart from the rounding of scales and minima to fp16 (2^-11 of them).
    A group's scale is its range / 15 (4 bits), its largest magnitude / 127 (8 bits).
    """
    assert weight.dim() == 2 and weight.shape[1] % GROUP == 0 and bits in BITS, (weight.shape, bits)
    groups = weight.float().unflatten(1, (-1, GROUP))  # [n_out, groups, GROUP]
    if bits == 8:
        scales = (groups.abs().amax(-1) / 127).half()
        codes = _nearest(groups, scales).clamp_(-127, 127).to(torch.int8)
        return Packed(codes.flatten(1), scales, None)
    low, high = groups.aminmax(dim=-1)
    scales, minima = ((high - low) / 15).half(), low.half()
    codes = _nearest(groups - minima.float()[..., None], scales).clamp_(0, 15).to(torch.uint8)
    return Packed(pack_nibbles(codes.flatten(1)), scales, minima)


def _nearest(values: Tensor, scales: Tensor) -> Tensor:
    scales = scales.float()[..., None]
    return torch.where(scales > 0, values / scales, 0).round_()


def dequantise(packed: Packed) -> Tensor:
    """fp32 [n_out, n_in]: scale * code + minimum, each step rounded as fp32 does."""
    codes = packed.codes if packed.minima is None else unpack_nibbles(packed.codes)
    groups = codes.float().unflatten(1, (-1, GROUP)) * packed.scales.float()[..., None]
    return (groups if packed.minima is None else groups + packed.minima.float()[..., None]).flatten(1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 0..15 [n_out, n_in] -> [n_out, n_in / 2]: byte i of a group's 16 holds inputs i (low) and i + 16 (high)."""
    low, high = codes.unflatten(1, (-1, 2, GROUP // 2)).unbind(2)
    return (low | high << 4).flatten(1)


def unpack_nibbles(nibbles: Tensor) -> Tensor:
    groups = nibbles.unflatten(1, (-1, GROUP // 2))
    return torch.cat((groups & 15, groups >> 4), -1).flatten(1)
