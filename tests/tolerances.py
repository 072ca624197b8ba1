"""How far two right answers may lie apart, by dtype. The one place for numeric tolerances; each with its derivation.

u is the unit roundoff: half the distance from 1 to the next number, 2^-24 (float32), 2^-11 (float16), 2^-8 (bfloat16).
"""

from __future__ import annotations

import torch

# Attention over standard normal q, k and v with scale 1/sqrt(head_size), against float64. The output is a weighted mean
# of values: |v| < 5 among the 10^4..10^5 values that a test draws, and weights that sum to 1.
# - A backend may round scores to the dtype before the softmax: |score| < 6 here, so a weight errs by the factor
#   exp(6 u) - 1 = 6 u, and the mean by 6 u * E|v| = 6 u * 0.8 in the worst case that all errors have one sign: 4.8 u.
# - The weights are rounded to the dtype before they multiply the values: u * E|v| = 0.8 u more.
# - Rounding the result: u * |result| with |result| < 5 (a request with one key returns its value as it is): 5 u, which
#   is what the relative part is for.
# Sums are accumulated in float32: 1000 terms of size 1 err by 1000 * 2^-24 = 6e-5 in the worst case, 2e-6 in the mean;
# for float32 itself that is the whole error.
# So |error| <= 6 u + u * |result|, and 1e-5 for float32; doubled, as scores are not rounded once but in two products.
ATTENTION = {
    torch.float64: {"atol": 1e-12, "rtol": 1e-12},
    torch.float32: {"atol": 2e-5, "rtol": 1e-5},
    torch.float16: {"atol": 12 * 2**-11, "rtol": 2 * 2**-11},
    torch.bfloat16: {"atol": 12 * 2**-8, "rtol": 2 * 2**-8},
}

# A value that is computed in float32 out of few operations and rounded once to the dtype: u * |result|. In float32
# itself each operation rounds, ten at most one after the other on values below 16 (sums of two products of normal
# numbers may cancel, so that part is absolute): 10 u * 16 = 1e-5. The smallest float16 is 6e-8, far below that.
ROUNDED = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-6},
    torch.float16: {"atol": 1e-5, "rtol": 2**-11},
    torch.bfloat16: {"atol": 1e-5, "rtol": 2**-8},
}


def rounded_inputs(num_products: int) -> float:
    """How far logits may lie from those of a model in float32, as a part of their size (root mean squares), where every
    product rounds its inputs to 15 bits, with a scale for each 32 of them, and all else is exact but for float32 sums.

    An input errs by at most 2^-15 of its group's largest, which of 32 normal numbers is 2.1 in the mean: by 3.7e-5 =
    2.1 * 2^-15 / sqrt(3) in the mean, and a sum of n products by as much of its own size. One product after another,
    the errors add up like a random walk; doubled, as a softmax over scores near 1 doubles at most what they err.
    """
    return 2 * 3.7e-5 * num_products**0.5


# What is encoded in 8 bits was computed in float32 as above: ten roundings at most, of numbers no larger than the
# head's largest, of which this is the fraction by which a number, and so its scale, may err beside half a code's step.
ENCODED = 10 * 2**-24

# Hidden states of a small encoder or decoder with random weights, two implementations in float32: each rounds some 8
# products a layer, of up to 80 terms of size 1, and sums them in another order: sqrt(80) * 2^-24 = 5e-7 each, three
# layers of them like a random walk 2.6e-6, norms keeping the values near 1.
HIDDEN = 1e-5

# A vector of unit length has numbers of about 1/sqrt(hidden), so the same errors are smaller still: below 1e-6.
EMBEDDING = 1e-5

# A product of two matrices, or two such products one after the other, with operands scaled so that every product has
# entries of size 1 (normal numbers, those of a matrix with n inputs divided by sqrt(n)), against float64.
# - Between two products the entries are rounded to the dtype: each of n <= 16 terms then errs by u * |h| * |w|, that is
#   u * 0.8 * 0.8 / sqrt(n) in the mean: 0.64 sqrt(n) u = 2.6 u in the worst case that all errors have one sign.
# - The result is rounded: u * |result|, the relative part.
# Sums are accumulated in float32, each addition rounding a sum of size 1: 100 terms err by 100 * 2^-24 = 6e-6 in the
# worst case, by a tenth of it in the mean; for float32 itself that is the whole error, with the size of sums, up to 5.
PRODUCT = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-6},
    torch.float16: {"atol": 4 * 2**-11, "rtol": 2**-11},
    torch.bfloat16: {"atol": 4 * 2**-8, "rtol": 2**-8},
}
