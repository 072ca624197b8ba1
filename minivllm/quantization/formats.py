"""Weights in 4 or 8 bits: w = scale * code + minimum, one scale (and minimum) for 32 inputs of an output.

These are llama.cpp's Q8_0 (8 bits, no minimum) and Q4_1 (4 bits), and Q4_0 with -8 * scale as its minimum. Scales and
minima are fp16. `to_blocks` and `from_blocks` go between this form and blocks as a GGUF file has them, each of which is
an fp16 scale, for Q4_1 an fp16 minimum, then the codes: nothing is lost either way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.kernels.cpu.blocks import Blocks
from minivllm.kernels.cpu.linear import FORMS, GROUP

BITS = (4, 8)
STORED_BITS = {kind: bits for kind, (bits, _) in FORMS.items()}  # of the kinds of blocks that have this form


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


def to_blocks(packed: Packed) -> Blocks:
    """Q8_0, or Q4_1."""
    n_out, num_groups = packed.scales.shape
    parts = [packed.scales, packed.codes] if packed.minima is None else [packed.scales, packed.minima, packed.codes]
    groups = [part.view(torch.uint8).view(n_out, num_groups, -1) for part in parts]
    return Blocks("Q8_0" if packed.minima is None else "Q4_1", torch.cat(groups, 2).flatten(1))


def from_blocks(parts: Iterable[Blocks]) -> Packed:
    """The rows of all parts, whose kinds are among those of STORED_BITS with equal bits. A Q4_0 scale above 8191 has a
    minimum that fp16 cannot hold: an infinite one."""
    split = [_split(blocks) for blocks in parts]
    assert len({packed.bits for packed in split}) == 1, "equal bits"
    codes, scales, minima = zip(*split, strict=True)
    return Packed(torch.cat(codes), torch.cat(scales), None if minima[0] is None else torch.cat(minima))


def _split(blocks: Blocks) -> Packed:
    bits, num_halves = FORMS[blocks.kind]
    groups = blocks.rows.unflatten(1, (-1, 2 * num_halves + GROUP * bits // 8))
    halves = groups[..., : 2 * num_halves].contiguous().view(torch.float16)  # [n_out, groups, halves]
    codes = groups[..., 2 * num_halves :].flatten(1)
    if blocks.kind == "Q8_0":
        return Packed(codes.view(torch.int8), halves[..., 0].contiguous(), None)
    scales = halves[..., 0].contiguous()
    return Packed(codes, scales, scales * -8 if blocks.kind == "Q4_0" else halves[..., 1].contiguous())
