"""RMSNorm and SiLU-mul: one pass over memory each, to learn from. Serving leaves them to Inductor, which fuses them
into their neighbours.

Both are bound by memory: the target is the rate of a copy. References: minivllm.kernels.reference.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x, weight, out, eps, x_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """x [T, SIZE], rows x_stride apart, out [T, SIZE] -> x / rms(x) * weight in fp32, rounded once. A program keeps its
    row in registers: it is read once, though the mean has to be known before the first result is."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(x, out, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, 2 * SIZE]: gate, then up -> out [T, SIZE] = silu(gate) * up. A program takes BLOCK columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=inside)
