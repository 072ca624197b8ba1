"""Codes of a few bits: how they lie in words, what they are worth with a scale, and which blocks hold them unrounded.

Formats that round to integers differ in where the words lie and in what zero is; the rest is here, once. w = (q - zero)
* scale: `centred` codes are q - zero, which small integers hold exactly, so a weight is rounded once, by the product.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minivllm.kernels.cpu.blocks import Blocks
from minivllm.layers.stored import Axis
from minivllm.quantization.formats import GROUP, pack_nibbles

WORD = 32
NO_BLOCK = f"no block fits: its groups are no multiples of {GROUP} inputs"
RANGES = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}  # of the codes that a kind of block holds


def in_words(axis: int, bits: int) -> Axis:
    """Codes along an axis of int32 words, without gaps: 8 of 4 bits in a word, 32 of 3 bits in three."""
    common = math.gcd(WORD, bits)
    return Axis(axis, WORD // common, bits // common)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, 32 * words / bits]: one stream of bits, the first code in the lowest."""
    mask = (1 << bits) - 1
    if WORD % bits == 0:
        shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
        return (words[..., None] >> shifts & mask).to(torch.uint8).flatten(1)
    _, count, taken = in_words(1, bits)
    groups = (words.long() & 0xFFFFFFFF).unflatten(1, (-1, taken))
    starts = torch.arange(count, device=words.device) * bits
    word, shift = starts // WORD, starts % WORD
    low = groups[..., word] >> shift
    high = groups[..., (word + 1).clamp_(max=taken - 1)] << (WORD - shift)  # beyond the mask where nothing straddles
    return ((low | high) & mask).to(torch.uint8).flatten(1)


def centred(codes: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """int16 [n_out, n_in]: codes [n_out, n_in] less zeros [n_out, groups]; groups [n_in]: each input's."""
    return codes.short() - zeros.short()[:, groups]


def evenly(n_in: int, num_groups: int, device: torch.device) -> Tensor:
    """int64 [n_in]: the group of each input, all of one size."""
    return torch.arange(n_in, device=device) // (n_in // num_groups)


def scaled(codes: Tensor, scales: Tensor) -> Tensor:
    """Centred codes [n_out, n_in] times scales [n_out, groups], of one size; rounded once to the scales' dtype."""
    return (codes.to(scales.dtype).unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


def kind_for(low: int, high: int, n_in: int, group_size: int | None) -> str | None:
    """The narrowest kind of block for centred codes from `low` to `high`, or the widest; None: groups fill no blocks.
    group_size None: one scale for all inputs."""
    if n_in % GROUP or (group_size or n_in) % GROUP:
        return None
    fitting = (kind for kind, (lowest, highest) in RANGES.items() if lowest <= low and high <= highest)
    return next(fitting, "Q8_0")


def in_blocks(kind: str, codes: Tensor, scales: Tensor) -> Blocks | None:
    """Centred codes [n_out, n_in] with scales [n_out, groups]; None if a code, or a scale in fp16, would be another."""
    halves, (low, high) = scales.half(), RANGES[kind]
    if not torch.equal(halves.to(scales.dtype), scales) or codes.min() < low or codes.max() > high:
        return None
    halves = halves.repeat_interleave(codes.shape[1] // halves.shape[1] // GROUP, 1)
    if kind == "Q8_0":
        return Blocks(kind, _rows(halves, codes.to(torch.int8)))
    shifted = (codes - low).to(torch.uint8)
    if kind == "Q4_0":
        return Blocks(kind, _rows(halves, pack_nibbles(shifted)))
    # The fifth bits of a block's 32 codes are a word of their own.
    bits = (shifted >> 4).unflatten(1, (-1, 8)) << torch.arange(8, dtype=torch.uint8, device=codes.device)
    fifths = bits.sum(-1, dtype=torch.uint8)  # [n_out, n_in / 8]
    return Blocks(kind, _rows(halves, fifths, pack_nibbles(shifted & 15)))


def _rows(scales: Tensor, *parts: Tensor) -> Tensor:
    """uint8 [n_out, bytes a row]: of each block its scale, then what it has of each part."""
    n_out, num_blocks = scales.shape
    groups = [part.contiguous().view(torch.uint8).view(n_out, num_blocks, -1) for part in (scales, *parts)]
    return torch.cat(groups, 2).flatten(1)
