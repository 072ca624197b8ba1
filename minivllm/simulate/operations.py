"""What the operations of a step compute and move. All arguments are numbers or arrays of them: bench/fit_devices.py
fits what is measured to the same formulas. Sizes are bytes of a number."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Number = Any  # a float, or an array of them

# Kinds, each of which reaches another part of a device's peak rates (fitted.py).
PRODUCT, PRODUCT_FP8 = "product", "product_fp8"
PREFILL, DECODE, EXPANDED, ABSORBED = "prefill", "decode", "expanded", "absorbed"
EXPERTS, EXPERTS_FP8 = "experts", "experts_fp8"
ELEMENTWISE, STATE = "elementwise", "state"
IN_FP8 = (PRODUCT_FP8, EXPERTS_FP8)


class Work(NamedTuple):
    kind: str
    flops: Number
    bytes: Number
    num_kernels: int = 1  # each of which takes the kind's constant time


def product(rows: Number, num_in: Number, num_out: Number, size: float, weight_size: float, kind: str) -> Work:
    moved = num_in * num_out * weight_size + rows * (num_in + num_out) * size
    return Work(kind, 2 * rows * num_in * num_out, moved)


def attention(
    pairs: Number, cached: Number, num_new: Number, heads: Number, head_size: Number, size: float, kind: str
) -> Work:
    """pairs: of a query and a key that it sees; cached: bytes of K and V. They are read once, and scores stay where
    they are made (FlashAttention)."""
    return Work(kind, 4 * pairs * heads * head_size, cached + 2 * num_new * heads * head_size * size)


def absorbed(
    pairs: Number,
    cached: Number,
    num_new: Number,
    heads: Number,
    rank: int,
    rope: int,
    expanded: int,
    size: float,
    num_contexts: int = 1,
) -> Work:
    """Latent attention of decodes: over cached vectors as they are. The matrix that would make K of one is multiplied
    into the queries before, that of V into what comes out (DeepSeek-V2, 2024, section 2.1.2). expanded: numbers of K
    and V that a head would have of a vector. num_contexts: devices that each have some tokens' vectors, and look at
    them with all devices' heads: pairs as many, queries and results more."""
    around = num_new * heads * rank * expanded
    moved = heads * rank * expanded * size + num_contexts * num_new * heads * (2 * rank + rope) * size
    return Work(ABSORBED, 2 * pairs * heads * (2 * rank + rope) + 2 * around, cached + moved)


def expanded(
    pairs: Number, seen: Number, num_new: Number, heads: Number, rank: int, rope: int, expanded: int, size: float
) -> Work:
    """Latent attention of prompts: over K and V of each head, made of all cached vectors (seen) anew."""
    width = heads * (expanded + rope)
    moved = heads * rank * expanded * size + seen * (rank + 2 * width) * size + num_new * width * size
    return Work(EXPANDED, 2 * pairs * width + 2 * seen * heads * rank * expanded, moved)


def experts(
    rows: Number,
    number: Number,
    per_token: Number,
    hidden: Number,
    inner: Number,
    matrices: int,
    size: float,
    weight_size: float,
    kind: str,
    num_ranks: int = 1,
) -> Work:
    """Of even use: an expert is read if any of the tokens (rows) has drawn it. number: of experts here, on the one of
    num_ranks devices to which most tokens go."""
    more = crowding(rows * per_token, num_ranks)
    weights, drawn = matrices * hidden * inner, rows * per_token * more / num_ranks
    num_read = number * (1 - (1 - per_token / (number * num_ranks)) ** (rows * more))
    return Work(kind, 2 * drawn * weights, num_read * weights * weight_size + drawn * (2 * hidden + 3 * inner) * size)


def crowding(drawn: Number, num_ranks: int) -> Number:
    """Of so many draws, each for one of num_ranks by even chance: those for the one that gets most, over the mean. The
    largest of n nearly normal counts is in the mean at most sqrt(2 ln n) deviations above theirs; it is at least one
    draw, and at most all."""
    if num_ranks == 1:
        return 1
    deviation = np.sqrt((1 - 1 / num_ranks) * num_ranks / drawn)
    most = 1 + deviation * math.sqrt(2 * math.log(num_ranks))
    return np.minimum(num_ranks, np.maximum(most, num_ranks / drawn))
