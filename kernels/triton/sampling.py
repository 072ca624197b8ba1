"""The draw of a token, and the filters before it, without sorting a vocabulary and without a generator's state.

The noise is minivllm.sampling.uniform's, bit for bit: SplitMix64 of (seed, position, lane) as 64-bit integers. So the
race of minivllm.sampling.draw has the same winner here, and a request gets the same tokens on any device. Blocks of 64
tokens race first, then the tokens of the block that won: a row takes V / 64 + 64 random numbers.

A filter is a cut: the largest number v of which the tokens >= v are at least k, or have at least the mass p. Positive
floats are ordered as their bits are, so v is found bit by bit, four at a time: eight passes over a row that stays in
the cache, whatever the distribution (a search with 16 pivots; compare Dai et al., FlashInfer 2025, which draws its
pivots). References: minivllm.sampling.draw.
"""

import triton
import triton.language as tl

BLOCK = 64  # tokens, as in minivllm.sampling.draw
LOOP = 256  # tokens that a search reads at once; with 16 pivots, more spill on sm_80


@triton.jit
def _mix(z):
    """SplitMix64's finaliser. z: uint64."""
    z = (z ^ (z >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def uniform(seed, position, lanes, STREAM: tl.constexpr):
    """seed and position int64, lanes int64 [...] -> float64 [...] in (0, 1), minivllm.sampling.uniform.uniform."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    stream = tl.full([], STREAM + 1, tl.uint64)
    state = _mix(seed.to(tl.uint64, bitcast=True) ^ _mix(stream * golden))
    state = _mix(state + (position + 1).to(tl.uint64, bitcast=True) * golden)
    bits = _mix(state + (lanes + 1).to(tl.uint64, bitcast=True) * golden)
    return ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def arrivals(seed, position, lanes, rates, STREAM: tl.constexpr):
    """When each lane arrives in an exponential race: float64 [...]. At a rate of 0, or NaN, never."""
    noise = -tl.log(uniform(seed, position, lanes, STREAM))
    return tl.where(rates > 0, noise / tl.where(rates > 0, rates, 1.0), float("inf"))


@triton.jit(do_not_specialize=["num_blocks"])
def race_blocks_kernel(
    probs,  # [S, num_blocks * 64] fp32 >= 0, rows stride apart
    cuts,  # [S] fp32: what is less likely is out
    seeds,  # [S] int64: the bits of the uint64
    positions,  # [S] int64
    times,  # [S, chunks] fp64 out: when the first block of the chunk arrives
    winners,  # [S, chunks] int64 out: which that is
    masses,  # [S, chunks] fp64 out
    stride,
    num_blocks,
    CHUNK: tl.constexpr,  # blocks
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    blocks = chunk * CHUNK + tl.arange(0, CHUNK)
    tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = blocks < num_blocks
    values = tl.load(probs + row * stride + tokens, mask=inside[:, None], other=0.0)
    values = tl.where(values < tl.load(cuts + row), 0.0, values)
    mass = tl.sum(values, 1).to(tl.float64)
    arrives = arrivals(tl.load(seeds + row), tl.load(positions + row), blocks.to(tl.int64), mass, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(times + place, tl.min(arrives, 0))
    tl.store(winners + place, (chunk * CHUNK + tl.argmin(arrives, 0)).to(tl.int64))
    tl.store(masses + place, tl.sum(mass, 0))


@triton.jit(do_not_specialize=["num_chunks"])
def race_tokens_kernel(
    probs,
    cuts,
    seeds,
    positions,
    times,
    winners,
    masses,
    tokens,  # [S] int64 out
    valid,  # [S] int8 out: 0 where the mass is 0, NaN or infinite; the token is then 0
    stride,
    num_chunks,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    at = row * num_chunks + chunks
    best = tl.argmin(tl.load(times + at, mask=inside, other=float("inf")), 0)
    mass = tl.sum(tl.load(masses + at, mask=inside, other=0.0), 0)
    fine = (mass > 0) & (mass < float("inf"))
    block = tl.load(winners + row * num_chunks + best)
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(probs + row * stride + lanes)
    values = tl.where(values < tl.load(cuts + row), 0.0, values).to(tl.float64)
    arrives = arrivals(tl.load(seeds + row), tl.load(positions + row), lanes, values, 1)
    tl.store(tokens + row, tl.where(fine, block * BLOCK + tl.argmin(arrives, 0), 0))
    tl.store(valid + row, fine.to(tl.int8))


@triton.jit
def _search(row, size, cut, target, MASS: tl.constexpr, LOOP: tl.constexpr):
    """The largest float whose tail, of the values >= cut, is at least `target`: in number or, with MASS, in mass."""
    found = tl.full([], 0, tl.int64)
    digits = tl.arange(0, 16)
    for step in range(8):
        pivots = found + (digits.to(tl.int64) << (28 - 4 * step))
        tails = tl.zeros([16], tl.float64)
        for start in range(0, size, LOOP):
            at = start + tl.arange(0, LOOP)
            values = tl.load(row + at, mask=at < size, other=-1.0)
            bits = values.to(tl.int32, bitcast=True).to(tl.int64)
            above = (bits[None, :] >= pivots[:, None]) & (values >= cut)[None, :]
            if MASS:
                weight = values.to(tl.float64)
                tails += tl.sum(tl.where(above, weight[None, :], 0.0), 1)
            else:
                tails += tl.sum(above.to(tl.int32), 1).to(tl.float64)
        # Tails fall from digit to digit, and the first holds `target`.
        digit = tl.maximum(tl.sum((tails >= target).to(tl.int32), 0) - 1, 0)
        found += digit.to(tl.int64) << (28 - 4 * step)
    return found.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["size"])
def find_cuts_kernel(
    probs,  # [S, size] fp32 >= 0, rows stride apart
    top_k,  # [S] int64, 0: off
    top_p,  # [S] fp64, 1: off
    min_p,  # [S] fp32
    cuts,  # [S] fp32 out
    stride,
    size,
    LOOP: tl.constexpr,
):
    """min-p, then top-k, then top-p, as minivllm.sampling.draw.find_cut. One program a row."""
    index = tl.program_id(0).to(tl.int64)
    row = probs + index * stride
    peak = tl.zeros([LOOP], tl.float32)
    for start in range(0, size, LOOP):
        at = start + tl.arange(0, LOOP)
        peak = tl.maximum(peak, tl.load(row + at, mask=at < size, other=0.0))
    cut = tl.load(min_p + index) * tl.max(peak, 0)
    k = tl.load(top_k + index)
    if (k > 0) & (k < size):
        cut = tl.maximum(cut, _search(row, size, 0.0, k.to(tl.float64), False, LOOP))
    p = tl.load(top_p + index)
    if p < 1:
        mass = tl.zeros([LOOP], tl.float64)
        for start in range(0, size, LOOP):
            at = start + tl.arange(0, LOOP)
            values = tl.load(row + at, mask=at < size, other=0.0)
            mass += tl.where(values >= cut, values, 0.0).to(tl.float64)
        cut = tl.maximum(cut, _search(row, size, cut, p * tl.sum(mass, 0), True, LOOP))
    tl.store(cuts + index, cut)
