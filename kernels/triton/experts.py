"""A layer of experts: each token's few experts, without a product of zeros and without asking the host.

The pairs (token, one of its experts) are sorted by expert, each expert's padded to whole tiles of BLOCK_M rows, so
that a tile of the products has one matrix. A program an expert finds its pairs by reading all ids, twice: to count
them, and, when all counts are known, to put them in their places. No atomic addition: equal inputs give equal bits.

The grids are what the worst routing needs; a tile that is not there has expert -1 and returns at once. So nothing but
numbers in memory changes from step to step, as a graph wants it. Reference: minivllm.kernels.reference.experts.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(ids, counts, num_pairs, BLOCK: tl.constexpr):
    """ids [num_pairs] int64 -> counts [experts] int32. One program an expert."""
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found += (tl.load(ids + at, mask=at < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def place_kernel(
    ids,
    counts,
    pairs,  # [num_tiles * BLOCK_M] int32 out: by expert, in order; num_pairs where a tile is padded
    tile_experts,  # [num_tiles] int32 out; -1: no tile
    num_pairs,
    num_tiles,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # EXPERTS rounded up to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    experts = tl.arange(0, WIDTH)
    sizes = tl.load(counts + experts, mask=experts < EXPERTS, other=0)
    tiles = (sizes + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    end = first + tl.sum(tl.where(experts == expert, tiles, 0), 0)
    lanes = tl.arange(0, BLOCK)
    for start in range(first, end, BLOCK):
        tl.store(tile_experts + start + lanes, expert, mask=start + lanes < end)
    if expert == EXPERTS - 1:
        for start in range(end, num_tiles, BLOCK):
            tl.store(tile_experts + start + lanes, -1, mask=start + lanes < num_tiles)
    place = first * BLOCK_M
    for start in range(0, num_pairs, BLOCK):
        at = start + lanes
        hit = tl.load(ids + at, mask=at < num_pairs, other=-1) == expert
        order = tl.cumsum(hit.to(tl.int32), 0)
        tl.store(pairs + place + order - 1, at, mask=hit)
        place += tl.sum(hit.to(tl.int32), 0)
    padding = place + tl.arange(0, BLOCK_M)
    tl.store(pairs + padding, num_pairs, mask=padding < end * BLOCK_M)


@triton.jit(do_not_specialize=["num_pairs"])
def grouped_kernel(
    x,  # [num_pairs / TOP_K, SIZE_K], rows x_stride apart
    w,  # [experts, N, SIZE_K]; GATED: [experts, 2 * N, SIZE_K], gate, then up
    out,  # [num_pairs, N]
    pairs,
    tile_experts,
    weights,  # [num_pairs] fp32, or None: by which results are multiplied
    num_pairs,
    x_stride,
    N: tl.constexpr,
    SIZE_K: tl.constexpr,
    TOP_K: tl.constexpr,  # pairs that share a row of x
    GATED: tl.constexpr,  # silu(gate) * up, in float32
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program a tile of pairs and BLOCK_N columns. Tiles of one expert are neighbours, which share its matrix."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    inside = pair < num_pairs
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    left = x + (pair // TOP_K)[:, None].to(tl.int64) * x_stride + k[None, :]
    right = w + (expert * (2 * N if GATED else N) + columns[:, None]) * SIZE_K + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, SIZE_K, BLOCK_K):
        own = (columns < N)[:, None] & (start + k < SIZE_K)[None, :]
        rows = tl.load(left + start, mask=inside[:, None] & (start + k < SIZE_K)[None, :], other=0.0)
        matrix = tl.load(right + start, mask=own, other=0.0)
        if UPCAST:
            rows = rows.to(tl.float32)
            matrix = matrix.to(tl.float32)
        acc = tl.dot(rows, tl.trans(matrix), acc, input_precision="ieee")
        if GATED:
            matrix = tl.load(right + N * SIZE_K + start, mask=own, other=0.0)
            if UPCAST:
                matrix = matrix.to(tl.float32)
            up = tl.dot(rows, tl.trans(matrix), up, input_precision="ieee")
    if GATED:
        acc = acc / (1 + tl.exp(-acc)) * up
    if weights is not None:
        acc *= tl.load(weights + pair, mask=inside, other=0.0)[:, None]
    at = out + pair[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (columns < N)[None, :])


@triton.jit
def combine_kernel(parts, out, SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """parts [T, TOP_K, SIZE] -> out [T, SIZE]: their sums in float32, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        source = parts + (token * TOP_K + i) * SIZE + columns
        acc += tl.load(source, mask=columns < SIZE, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + columns, acc.to(out.dtype.element_ty), mask=columns < SIZE)
