"""K and V in 8 bits: int8, or e4m3 (Micikevicius et al. 2022), with a float32 scale for each token and head.

A code times its scale is the number; the largest number of a head gets the largest code. Who keeps codes where is each
backend's own affair: here, they lie before their scale, head by head (the reference's cache).

Relative error of attention's outputs over 512 random keys (tests/attention/test_quantised_kv.py): int8 0.9 %, e4m3
3.7 %; with two of 64 channels 30 times as large as the others, as outliers are, 9 % and 3.1 %.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}
QUANTISED = frozenset(LARGEST)
HALVES = frozenset({torch.float16})  # what K and V can be rounded to without a scale
MODELS_OWN: frozenset[torch.dtype] = frozenset()  # K and V as the model computes them, and nothing else
SCALE_BYTES = 4


def quantise_heads(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., head_size] -> codes in dtype (int8 or e4m3), and a scale fp32 [...] for each head, by which they are
    multiplied to get x back."""
    largest = x.float().abs().amax(-1, keepdim=True)
    limit = torch.full_like(largest, LARGEST[dtype])  # a number / a tensor would multiply by the reciprocal
    codes = x.float() * torch.where(largest > 0, limit / largest, 0)
    codes = codes.round() if dtype == torch.int8 else codes.clamp(-448, 448)
    return codes.to(dtype), (largest / limit)[..., 0]


def pack(x: Tensor, kind: torch.dtype) -> Tensor:
    """x [..., head_size] -> uint8 [..., head_size + 4]: codes of that kind, then the bytes of their scale."""
    codes, scales = quantise_heads(x, kind)
    return torch.cat([codes.view(torch.uint8), scales[..., None].contiguous().view(torch.uint8)], -1)


def unpack(packed: Tensor, kind: torch.dtype, dtype: torch.dtype) -> Tensor:
    """What `pack` made -> the numbers [..., head_size] in a floating-point dtype."""
    codes, scales = packed[..., :-SCALE_BYTES], packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return codes.view(kind).to(dtype) * scales.to(dtype)
