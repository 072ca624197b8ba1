"""Products with weights of 4 bits: y = x W^T with w = scale * code + minimum, groups of 32 inputs.

The scale of a group leaves the sum: sum(x * (scale * code + minimum)) = scale * sum(x * code) + minimum * sum(x). So
what is multiplied are the codes as they are, exact in any float dtype, and scales and minima touch the accumulator
alone, in float32. No weight is ever rounded to the dtype of x (compare Marlin, Frantar et al. 2024, which dequantises).

A byte holds inputs i (low) and i + 16 (high) of a group, so a group is two products of 16 inputs. Layout, other than on
the host: [n_in / 32, n_out, 16 bytes], so that what a program reads at a time is one piece of memory.

Few tokens make few programs: several then share the groups, and a second kernel adds what they found, in order.
Reference: minivllm.quantization.formats.dequantise.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def w4a16_kernel(
    x,  # [num_tokens, N_IN], rows x_stride apart
    codes,  # [N_IN / 32, N_OUT, 16] uint8
    scales,  # [N_IN / 32, N_OUT] fp16
    minima,  # [N_IN / 32, N_OUT] fp16
    bias,  # [N_OUT]; read with BIAS alone
    out,  # [num_tokens, N_OUT], or with SPLIT [splits, num_tokens, N_OUT] fp32
    x_stride,
    num_tokens,
    N_IN: tl.constexpr,
    N_OUT: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    split = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N_OUT
    lanes = tl.arange(0, 16)
    num_groups: tl.constexpr = N_IN // 32
    length = tl.cdiv(num_groups, tl.num_programs(2))
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(split * length, tl.minimum(split * length + length, num_groups)):
        pairs = tl.load(codes + (group * N_OUT + columns[:, None]) * 16 + lanes[None, :], mask=inside[:, None], other=0)
        at = x + rows[:, None].to(tl.int64) * x_stride + group * 32 + lanes[None, :]
        low = tl.load(at, mask=(rows < num_tokens)[:, None], other=0.0)
        high = tl.load(at + 16, mask=(rows < num_tokens)[:, None], other=0.0)
        if UPCAST:
            low = low.to(tl.float32)
            high = high.to(tl.float32)
        product = tl.dot(low, tl.trans((pairs & 15).to(low.dtype)), input_precision="ieee")
        product = tl.dot(high, tl.trans((pairs >> 4).to(low.dtype)), product, input_precision="ieee")
        total = tl.sum(low.to(tl.float32) + high.to(tl.float32), 1)
        scale = tl.load(scales + group * N_OUT + columns, mask=inside, other=0.0).to(tl.float32)
        minimum = tl.load(minima + group * N_OUT + columns, mask=inside, other=0.0).to(tl.float32)
        acc += product * scale[None, :] + total[:, None] * minimum[None, :]
    if BIAS and not SPLIT:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = rows[:, None].to(tl.int64)
    if SPLIT:
        target += split.to(tl.int64) * num_tokens
    own = (rows < num_tokens)[:, None] & inside[None, :]
    tl.store(out + target * N_OUT + columns[None, :], acc.to(out.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["num_splits"])
def add_splits_kernel(
    partial,  # [num_splits, T, N_OUT] fp32
    bias,
    out,  # [T, N_OUT]
    num_splits,
    N_OUT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N_OUT
    acc = tl.zeros([BLOCK], tl.float32)
    for split in range(num_splits):
        source = (split * tl.num_programs(0).to(tl.int64) + row) * N_OUT + columns
        acc += tl.load(partial + source, mask=inside, other=0.0)
    if BIAS:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N_OUT + columns, acc.to(out.dtype.element_ty), mask=inside)
