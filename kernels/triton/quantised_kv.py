"""K and V in 8 bits: int8, or e4m3 (Micikevicius et al. 2022), with a float32 scale for each token and head.

A page of one head holds the codes of its tokens, then their scales: the cache is [num_blocks, kv_heads, block_size *
(head_size + 4) bytes]. A code times its scale is the number; the largest number of a head gets the largest code.

e4m3 is converted here by integer operations, both ways: sm_80 has no instruction for it, and the interpreter shows then
what a GPU does. References: minivllm.kernels.reference.
"""

import triton
import triton.language as tl

INT8, E4M3 = tl.constexpr(1), tl.constexpr(2)  # KIND of a cache; 0: numbers as they are


@triton.jit
def numbers(codes, dtype: tl.constexpr, KIND: tl.constexpr):
    """int8 codes -> numbers in `dtype`, exactly; those of e4m3 are 256 times too small: it is a float16 whose exponent
    is biased by 8 less."""
    if KIND == E4M3:
        bits = codes.to(tl.int16)
        return (((bits << 7) & 0x3F80) | (bits & -0x8000)).to(tl.float16, bitcast=True).to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def load_scales(base, pages, offsets, inside, QUANTISED: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr):
    """fp32, like offsets: what `numbers` of the tokens at `offsets` of `pages` are multiplied by."""
    at = (base + pages + QUANTISED).to(tl.pointer_type(tl.float32), bitcast=True) + offsets
    scales = tl.load(at, mask=inside, other=0.0) if MASKED else tl.load(at)
    if KIND == E4M3:
        scales *= 256.0
    return scales


@triton.jit
def quantise(x, KIND: tl.constexpr):
    """x [rows, WIDTH] fp32 -> (codes [rows, WIDTH] int8, scales [rows] fp32). Rounds to the nearest, ties to even."""
    inverse, scales = scales_of(tl.max(tl.abs(x), 1), KIND)
    return encode(x * inverse[:, None], KIND), scales


@triton.jit
def scales_of(largest, KIND: tl.constexpr):
    """largest fp32, of a head's magnitudes -> (what its numbers are multiplied by to be encoded, its scale)."""
    LIMIT: tl.constexpr = 448.0 if KIND == E4M3 else 127.0
    limit = tl.zeros_like(largest) + LIMIT
    inverse = tl.where(largest > 0, tl.div_rn(limit, tl.where(largest > 0, largest, 1.0)), 0.0)
    return inverse, tl.div_rn(largest, limit)


@triton.jit
def encode(x, KIND: tl.constexpr):
    """x fp32 of magnitude up to the largest code's -> int8."""
    codes = _e4m3(x) if KIND == E4M3 else _int8(x)
    return codes.to(tl.int8)


@triton.jit
def _int8(x):
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: the sum has no fraction


@triton.jit
def _e4m3(x):
    """fp32 of magnitude up to 448 -> the bits of the nearest e4m3 number, int32."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # 20 bits less of fraction, exponent - 120
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # under 2^-6 steps are 2^-9, as at 2^14
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(tl.abs(x) < 0.015625, small, normal) | sign
