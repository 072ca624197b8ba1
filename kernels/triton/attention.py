"""Attention over the paged cache: one kernel for decodes, one for everything else, out of one loop over keys.

A kernel that tells decodes from prefills inside loses half of its speed (arXiv 2511.11581, section 8), so the two are
launched apart. In both, the query heads of one KV head are rows of one matrix: K and V are read once for all of them.

- Decode splits the keys of a request over several programs where the batch alone would leave the device idle (Flash
  Decoding, Dao et al. 2023); a second launch joins the splits. The length of a split follows from each request's own
  length, on the device, so that nothing but a pointer changes from step to step.
- Prefill gives a program BLOCK_M // group queries. The grid is an upper bound known without reading a length; which
  request a program serves is a binary search. Tiles of keys that all its queries see are computed without a mask.

The loop is attend.py's. A sink (Xiao et al. 2024, as in gpt-oss) is one more score of a head whose value is zero: it is
where the running maximum and sum begin.

Cache layout: K and V each [num_blocks, kv_heads, block_size, head_size]; a page of one head is one piece of memory.
Or codes in 8 bits with scales, see quantised_kv.py. Reference: minivllm.attention.reference.
"""

import triton
import triton.language as tl

from minivllm.kernels.triton.attend import attend

MAX_SPLITS = 32  # the join reads them as one tile
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _by_head(values, heads, lanes_used):
    """[BLOCK_M] fp32: one a query head, times log2(e)."""
    return tl.load(values + heads, mask=lanes_used, other=0.0) * LOG2E


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    q,  # [T, heads, head_size], rows q_stride apart
    k_cache,
    v_cache,
    rows,  # [requests] int32: the query row of each
    seq_lens,  # [requests] int32; 0: a padding request, whose row becomes zero
    tables,  # [requests, table_stride] int32
    out,  # [T, heads, head_size]
    partial,  # [requests, heads, splits, head_size] fp32
    peaks,  # [requests, heads, splits] fp32
    norms,  # [requests, heads, splits] fp32
    slopes,  # [heads] fp32, or None: no ALiBi
    sinks,  # [heads] fp32, or None
    scale,
    cap,
    q_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KIND: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + request)
    row = tl.load(rows + request).to(tl.int64)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    begin = first // BLOCK_N * BLOCK_N
    end = seq_len
    if SPLIT:
        length = tl.cdiv(tl.cdiv(seq_len - begin, BLOCK_N), tl.num_programs(2)) * BLOCK_N
        begin += split * length
        end = tl.minimum(begin + length, seq_len)
        if begin >= end:
            return

    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, WIDTH)
    own = (lanes < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    heads = head * GROUP + lanes
    queries = tl.load(q + row * q_stride + heads[:, None] * HEAD_SIZE + dims[None, :], mask=own, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    steepness = norm
    if slopes is not None:
        steepness = _by_head(slopes, heads, lanes < GROUP)
    if sinks is not None:  # one split has it
        norm = tl.where(split == 0, norm + 1, norm)
        peak = tl.where(split == 0, _by_head(sinks, heads, lanes < GROUP), peak)
    acc, norm, peak = attend(
        tl.zeros([BLOCK_M, WIDTH], tl.float32),
        norm,
        peak,
        queries,
        k_cache,
        v_cache,
        tables + request.to(tl.int64) * table_stride,
        head,
        tl.zeros([BLOCK_M], tl.int32) + seq_len - 1,
        first,
        seq_len,
        begin,
        end,
        scale,
        cap,
        steepness,
        KV_HEADS,
        HEAD_SIZE,
        WIDTH,
        PAGE,
        BLOCK_N,
        WINDOW,
        SOFT_CAP,
        slopes is not None,
        KIND,
        True,
    )
    acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    if SPLIT:
        place = (request * KV_HEADS * GROUP + heads).to(tl.int64) * tl.num_programs(2) + split
        tl.store(partial + place[:, None] * HEAD_SIZE + dims[None, :], acc, mask=own)
        tl.store(peaks + place, peak, mask=lanes < GROUP)
        tl.store(norms + place, norm, mask=lanes < GROUP)
    else:
        at = out + (row * KV_HEADS * GROUP + heads[:, None]) * HEAD_SIZE + dims[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["num_splits"])
def join_kernel(
    rows,
    seq_lens,
    out,
    partial,
    peaks,
    norms,
    num_splits,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The weighted mean of the splits of one request and query head. Splits that no program filled are not read."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + request)
    row = tl.load(rows + request).to(tl.int64)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    num_tiles = tl.cdiv(seq_len - begin, BLOCK_N)
    per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), 1)
    splits = tl.arange(0, SPLITS)
    filled = splits < tl.cdiv(num_tiles, per_split)
    dims = tl.arange(0, WIDTH)
    place = (request * HEADS + head).to(tl.int64) * num_splits + splits
    peak = tl.load(peaks + place, mask=filled, other=float("-inf"))
    highest = tl.max(peak, 0)
    weight = tl.load(norms + place, mask=filled, other=0.0) * tl.exp2(
        peak - tl.where(highest == float("-inf"), 0.0, highest)
    )
    own = filled[:, None] & (dims < HEAD_SIZE)[None, :]
    parts = tl.load(partial + place[:, None] * HEAD_SIZE + dims[None, :], mask=own, other=0.0)
    total = tl.sum(weight, 0)
    mean = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    at = out + (row * HEADS + head) * HEAD_SIZE + dims
    tl.store(at, mean.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)


@triton.jit(do_not_specialize=["table_stride", "num_requests"])
def prefill_kernel(
    q,  # [T, heads, head_size], rows q_stride apart
    k_cache,
    v_cache,
    starts,  # [requests + 1] int32: queries of the requests before each
    rows,  # [requests] int32: the first query row of each
    seq_lens,  # [requests] int32
    tables,  # [requests, table_stride] int32
    out,  # [T, heads, head_size]
    slopes,
    sinks,
    scale,
    cap,
    q_stride,
    table_stride,
    num_requests,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KIND: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see most keys: they start first
    head = tl.program_id(1)
    request = 0
    above = num_requests
    while above - request > 1:
        middle = (request + above) // 2
        if tl.load(starts + middle) // BLOCK_Q + middle <= block:
            request = middle
        else:
            above = middle
    start = tl.load(starts + request)
    num_queries = tl.load(starts + request + 1) - start
    first_query = (block - start // BLOCK_Q - request) * BLOCK_Q
    if first_query >= num_queries:
        return
    seq_len = tl.load(seq_lens + request)
    earlier = seq_len - num_queries
    first_position = earlier + first_query
    last_position = earlier + tl.minimum(first_query + BLOCK_Q, num_queries) - 1

    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, WIDTH)
    query = first_query + lanes // GROUP
    heads = head * GROUP + lanes % GROUP
    own = ((lanes < BLOCK_Q * GROUP) & (query < num_queries))[:, None] & (dims < HEAD_SIZE)[None, :]
    row = (tl.load(rows + request) + query).to(tl.int64)
    at = row[:, None] * q_stride + heads[:, None] * HEAD_SIZE + dims[None, :]
    queries = tl.load(q + at, mask=own, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    positions = earlier + query
    table = tables + tl.cast(request, tl.int64) * table_stride

    # Keys first : open lie before the window of some query, open : closed are seen by all, closed : end not by all.
    first = 0
    opened = 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0)
        opened = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
    closed = tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, opened)
    end = last_position + 1
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    steepness = norm
    if slopes is not None:
        steepness = _by_head(slopes, heads, lanes >= 0)
    if sinks is not None:
        norm += 1
        peak = _by_head(sinks, heads, lanes >= 0)
    for segment in tl.static_range(3):
        if segment == 0:
            begin, until = first // BLOCK_N * BLOCK_N, opened
        elif segment == 1:
            begin, until = opened, closed
        else:
            begin, until = closed, end
        if segment > 0 or WINDOW > 0:
            acc, norm, peak = attend(
                acc,
                norm,
                peak,
                queries,
                k_cache,
                v_cache,
                table,
                head,
                positions,
                first,
                end,
                begin,
                until,
                scale,
                cap,
                steepness,
                KV_HEADS,
                HEAD_SIZE,
                WIDTH,
                PAGE,
                BLOCK_N,
                WINDOW,
                SOFT_CAP,
                slopes is not None,
                KIND,
                segment != 1,
            )
    acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    at = (row[:, None] * KV_HEADS * GROUP + heads[:, None]) * HEAD_SIZE + dims[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=own)
