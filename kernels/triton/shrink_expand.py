"""What LoRA adds to a layer, y += B A x, for the tokens of many adapters in two launches (Punica, Chen et al. 2023).

A task is a few tokens of one adapter, so that its matrices are read once for all of them. `shrink` multiplies by A. Its
results are few columns, so several programs share the long sum over n_in, and each writes a sum of its own: no atomic
addition, whose order would change the result from run to run. `expand` adds them up, multiplies by B and adds to y.

A layer may have parts (q, k, v), each with an A and a B of its own; all have the same number of ranks here, zeros where
an adapter has fewer. Reference: minivllm.lora.layer.add_deltas_naive.
"""

import triton
import triton.language as tl


@triton.jit
def _task(tasks, BLOCK_M: tl.constexpr):
    """-> (slot, places [BLOCK_M] in the order of tokens, which of them are there)."""
    task = tasks + 3 * tl.program_id(0)
    places = tl.load(task + 1) + tl.arange(0, BLOCK_M)
    return tl.load(task).to(tl.int64), places, places < tl.load(task + 2)


@triton.jit(do_not_specialize=["num_places"])
def shrink_kernel(
    x,  # [T, N_IN], rows x_stride apart
    a,  # [slots, RANKS, N_IN]
    tasks,  # [tasks, 3] int32: slot, first place, end
    tokens,  # [num_places] int32: rows of x and y, slot by slot
    hidden,  # [SPLITS, num_places, RANKS] fp32 out
    x_stride,
    num_places,
    N_IN: tl.constexpr,
    RANKS: tl.constexpr,  # of all parts
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,  # divides RANKS
    BLOCK_K: tl.constexpr,
):
    slot, places, inside = _task(tasks, BLOCK_M)
    split = tl.program_id(2)
    length: tl.constexpr = ((N_IN + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS * BLOCK_K
    rows = tl.load(tokens + places, mask=inside, other=0).to(tl.int64)
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(split * length, tl.minimum(split * length + length, N_IN), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=inside[:, None] & (k < N_IN)[None, :], other=0.0)
        right = tl.load(a + (slot * RANKS + ranks[:, None]) * N_IN + k[None, :], mask=(k < N_IN)[None, :], other=0.0)
        if UPCAST:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    target = (split * num_places + places).to(tl.int64) * RANKS
    tl.store(hidden + target[:, None] + ranks[None, :], acc, mask=inside[:, None])


@triton.jit(do_not_specialize=["num_places"])
def expand_kernel(
    hidden,
    b,  # [slots, RANK, N_OUT]: a part's columns hold its B, transposed and scaled
    tasks,
    tokens,
    parts,  # [parts, 2] int32: first column, number of columns; multiples of 16
    y,  # [T, N_OUT], rows y_stride apart: added to
    y_stride,
    num_places,
    RANK: tl.constexpr,  # of one part
    RANKS: tl.constexpr,
    N_OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    slot, places, inside = _task(tasks, BLOCK_M)
    part = tl.program_id(2)
    first = tl.multiple_of(tl.load(parts + 2 * part), 16)
    offset = tl.program_id(1) * BLOCK_N
    num_columns = tl.multiple_of(tl.load(parts + 2 * part + 1), 16)
    if offset >= num_columns:
        return
    lanes = offset + tl.arange(0, BLOCK_N)
    columns = first + lanes
    ranks = tl.arange(0, RANK)
    small = tl.zeros([BLOCK_M, RANK], tl.float32)
    for split in tl.static_range(SPLITS):
        source = (split * num_places + places).to(tl.int64) * RANKS + part * RANK
        small += tl.load(hidden + source[:, None] + ranks[None, :], mask=inside[:, None], other=0.0)
    own = (lanes < num_columns)[None, :]
    large = tl.load(b + (slot * RANK + ranks[:, None]) * N_OUT + columns[None, :], mask=own, other=0.0)
    if UPCAST:
        large = large.to(tl.float32)
    change = tl.dot(small.to(large.dtype), large, input_precision="ieee")
    rows = tl.load(tokens + places, mask=inside, other=0).to(tl.int64)
    at = y + rows[:, None] * y_stride + columns[None, :]
    own = own & inside[:, None]
    total = tl.load(at, mask=own, other=0.0).to(tl.float32) + change
    tl.store(at, total.to(y.dtype.element_ty), mask=own)
