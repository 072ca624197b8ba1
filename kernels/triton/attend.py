"""The loop over keys that all attention kernels share.

Softmax is FlashAttention-2's (Dao 2023) in powers of two: log2(e) is folded into the scale. Keys past the end of a
request are never read: whatever lies there, NaN too, would survive a multiplication by zero.

Codes in 8 bits are exact in any float dtype, so they are multiplied as they are, and their scales touch what is small
instead: K's the scores, V's the weights. ALiBi (Press et al. 2022) adds slope * (key - query) to the scores of a head.
"""

import triton
import triton.language as tl

from minivllm.kernels.triton.quantised_kv import load_scales, numbers


@triton.jit
def _load(base, rows, inside, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a page, given by their first elements: [BLOCK_N, WIDTH], zero where `inside` is false or past
    HEAD_SIZE."""
    dims = tl.arange(0, WIDTH)
    at = base + rows[:, None] + dims[None, :]
    if MASKED:
        return tl.load(at, mask=inside[:, None] & (dims < HEAD_SIZE)[None, :], other=0)
    elif WIDTH != HEAD_SIZE:
        return tl.load(at, mask=(dims < HEAD_SIZE)[None, :], other=0)
    else:
        return tl.load(at)


@triton.jit
def _scores(q, k, scale, cap, SOFT_CAP: tl.constexpr):
    """[BLOCK_M, BLOCK_N], times log2(e), which `scale`, a number or one a key, or `cap` holds already."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFT_CAP:  # tanh out of an exponential that can only underflow
        e = tl.exp2(-2.8853900817779268 * tl.abs(scores))
        tanh = (1 - e) / (1 + e)
        scores = cap * tl.where(scores < 0, -tanh, tanh)
    return scores


@triton.jit
def attend(
    acc,
    norm,
    peak,
    q,
    k_cache,
    v_cache,
    table,
    head,
    positions,
    first,
    last,
    begin,
    end,
    scale,
    cap,
    steepness,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys begin : end in tiles, into (acc, norm, peak). positions, steepness [BLOCK_M]: of the queries, and with ALIBI
    their slopes times log2(e). Only keys first : last may be read; without MASKED every key of every tile is seen by
    every query."""
    QUANTISED: tl.constexpr = PAGE * HEAD_SIZE
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = (keys >= first) & (keys < last)
        if MASKED:
            page = tl.load(table + keys // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(table + keys // PAGE).to(tl.int64)
        if KIND == 0:
            rows = ((page * KV_HEADS + head) * PAGE + keys % PAGE) * HEAD_SIZE
        else:
            page = (page * KV_HEADS + head) * (QUANTISED + 4 * PAGE)
            rows = page + keys % PAGE * HEAD_SIZE
        k = numbers(_load(k_cache, rows, inside, HEAD_SIZE, WIDTH, MASKED), q.dtype, KIND)
        v = numbers(_load(v_cache, rows, inside, HEAD_SIZE, WIDTH, MASKED), q.dtype, KIND)
        if KIND == 0:
            scores = _scores(q, k, scale, cap, SOFT_CAP)
        else:
            by_key = load_scales(k_cache, page, keys % PAGE, inside, QUANTISED, KIND, MASKED) * scale
            scores = _scores(q, k, by_key[None, :], cap, SOFT_CAP)
        if ALIBI:
            scores += steepness[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
        if MASKED:
            seen = inside[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOW > 0:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        norm = norm * fade + tl.sum(weights, 1)
        if KIND != 0:
            weights = weights * load_scales(v_cache, page, keys % PAGE, inside, QUANTISED, KIND, MASKED)[None, :]
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = new_peak
    return acc, norm, peak
