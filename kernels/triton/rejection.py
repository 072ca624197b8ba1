"""Rejection sampling of drafts (Leviathan, Kalman and Matias 2023; Chen et al. 2023), all rows of a step at once.

A draft d from q is accepted with probability min(1, p(d) / q(d)); else the token is drawn from max(p - q, 0). No row is
known to be accepted before its mass is, so every row races over both distributions with the same noise, and the last
kernel looks at one of the two winners. max(p - q, 0) is never written: it is computed again where it is read.

Reference: minivllm.sampling.rejection. Numbers are rounded at the same places as there, but sums run in another order.
"""

import triton
import triton.language as tl

from minivllm.kernels.triton.sampling import arrivals, uniform

COIN = tl.constexpr(2)  # the stream of minivllm.sampling.rejection


@triton.jit
def _probs(probs, total, tokens, inside):
    return tl.div_rn(tl.load(probs + tokens, mask=inside, other=0.0), total)


@triton.jit
def _draft_probs(draft_probs, total, which, draft, tokens, inside):
    """q of `tokens`: row `which` of draft_probs; which < 0: 1 at the draft."""
    q = tl.div_rn(tl.load(draft_probs + tokens, mask=inside, other=0.0), total)
    return tl.where(which < 0, (tokens == draft).to(tl.float32), q)


@triton.jit
def _rest(p, q, draft):
    """What is left of p after a rejection; nothing where no draft was."""
    return tl.where(draft >= 0, tl.where(p > q, p - q, 0.0), 0.0)


@triton.jit
def _total(masses, row, num_chunks, CHUNKS: tl.constexpr):
    chunks = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(masses + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0), 0)


@triton.jit
def _totals(masses, row, which, draft, num_chunks, CHUNKS: tl.constexpr):
    """What p and q are divided by: fp32. A row without a draft is left as it is, a sure draft has no q to divide."""
    p_total = _total(masses, 2 * row, num_chunks, CHUNKS).to(tl.float32)
    q_total = _total(masses, 2 * row + 1, num_chunks, CHUNKS).to(tl.float32)
    return tl.where(draft >= 0, p_total, 1.0), tl.where(which >= 0, q_total, 1.0)


@triton.jit(do_not_specialize=["num_blocks", "num_draft_blocks"])
def masses_kernel(
    probs,  # [S, num_blocks * 64] fp32 >= 0, rows stride apart
    draft_probs,  # [D, num_draft_blocks * 64] fp32 >= 0, rows draft_stride apart
    draft_rows,  # [S] int64: the row of draft_probs; -1: none
    masses,  # [S, 2, chunks] fp64 out: of p and of q
    stride,
    draft_stride,
    num_blocks,
    num_draft_blocks,
    CHUNK: tl.constexpr,  # blocks
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    which = tl.load(draft_rows + row)
    blocks = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    p = tl.load(probs + row * stride + tokens, mask=(blocks < num_blocks)[:, None], other=0.0)
    own = blocks < tl.where(which >= 0, num_draft_blocks, 0)
    q = tl.load(draft_probs + tl.maximum(which, 0) * draft_stride + tokens, mask=own[:, None], other=0.0)
    place = 2 * row * tl.num_programs(1) + tl.program_id(1)
    tl.store(masses + place, tl.sum(tl.sum(p, 1).to(tl.float64), 0))
    tl.store(masses + place + tl.num_programs(1), tl.sum(tl.sum(q, 1).to(tl.float64), 0))


@triton.jit(do_not_specialize=["num_blocks", "num_draft_blocks"])
def race_rest_kernel(
    probs,
    draft_probs,
    draft_rows,
    drafts,  # [S] int64: the token that was proposed; -1: none
    seeds,  # [S] int64: the bits of the uint64
    positions,  # [S] int64
    masses,
    times,  # [S, 2, chunks] fp64 out: of max(p - q, 0) and of p
    winners,  # [S, 2, chunks] int64 out
    left,  # [S, 2, chunks] fp64 out: the masses that raced
    stride,
    draft_stride,
    num_blocks,
    num_draft_blocks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blocks of one chunk of one row: as sampling.race_blocks_kernel, over two distributions."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    which, draft = tl.load(draft_rows + row), tl.load(drafts + row)
    p_total, q_total = _totals(masses, row, which, draft, tl.num_programs(1), CHUNKS)
    blocks = chunk * CHUNK + tl.arange(0, CHUNK)
    tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    p = _probs(probs + row * stride, p_total, tokens, (blocks < num_blocks)[:, None])
    q_row = draft_probs + tl.maximum(which, 0) * draft_stride
    own = blocks < tl.where(which >= 0, num_draft_blocks, 0)
    q = _draft_probs(q_row, q_total, which, draft, tokens, own[:, None])
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    for one in tl.static_range(2):
        mass = tl.sum(_rest(p, q, draft) if one == 0 else p, 1).to(tl.float64)
        arrives = arrivals(seed, position, blocks.to(tl.int64), mass, 0)
        place = (2 * row + one) * tl.num_programs(1) + chunk
        tl.store(times + place, tl.min(arrives, 0))
        tl.store(winners + place, (chunk * CHUNK + tl.argmin(arrives, 0)).to(tl.int64))
        tl.store(left + place, tl.sum(mass, 0))


@triton.jit(do_not_specialize=["num_chunks", "num_draft_blocks"])
def accept_kernel(
    probs,
    draft_probs,
    draft_rows,
    drafts,
    seeds,
    positions,
    masses,
    times,
    winners,
    left,
    tokens,  # [S] int64 out: the draft if it was accepted
    valid,  # [S] int8 out: 0 where p's mass is 0, NaN or infinite; the token is then 0
    stride,
    draft_stride,
    num_chunks,
    num_draft_blocks,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    which, draft = tl.load(draft_rows + row), tl.load(drafts + row)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    p_total, q_total = _totals(masses, row, which, draft, num_chunks, CHUNKS)
    rest_mass = _total(left, 2 * row, num_chunks, CHUNKS)
    some = rest_mass > 0  # else p and q are equal and nothing is rejected, or there was no draft
    mass = tl.where(some, rest_mass, _total(left, 2 * row + 1, num_chunks, CHUNKS))
    fine = (mass > 0) & (mass < float("inf"))

    race = (2 * row + tl.where(some, 0, 1)) * num_chunks
    chunks = tl.arange(0, CHUNKS)
    best = tl.argmin(tl.load(times + race + chunks, mask=chunks < num_chunks, other=float("inf")), 0)
    block = tl.load(winners + race + best)
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    q_row = draft_probs + tl.maximum(which, 0) * draft_stride
    p = _probs(probs + row * stride, p_total, lanes, lanes >= 0)
    q_size = tl.where(which >= 0, num_draft_blocks * BLOCK, 0)
    q = _draft_probs(q_row, q_total, which, draft, lanes, lanes < q_size)
    values = tl.where(some, _rest(p, q, draft), p).to(tl.float64)
    drawn = tl.where(fine, block * BLOCK + tl.argmin(arrivals(seed, position, lanes, values, 1), 0), 0)

    p_draft = _probs(probs + row * stride, p_total, draft, draft >= 0).to(tl.float64)
    in_row = (draft >= 0) & (draft < q_size)
    q_draft = _draft_probs(q_row, q_total, which, draft, draft, in_row).to(tl.float64)
    accepted = (draft >= 0) & (uniform(seed, position, draft * 0, COIN) * q_draft < p_draft)
    tl.store(tokens + row, tl.where(accepted, draft, drawn))
    tl.store(valid + row, fine.to(tl.int8))
