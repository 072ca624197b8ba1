"""What writes the paged cache: plainly, with RoPE and QK-norm on the way, or by copying whole blocks.

Cache layout: K and V each [num_blocks, kv_heads, block_size, head_size], see attention.py. References:
minivllm.kernels.reference.
"""

import triton
import triton.language as tl

from minivllm.kernels.triton.quantised_kv import encode, quantise, scales_of


@triton.jit
def write_kernel(
    k,  # [T, kv_heads, head_size], rows k_stride apart
    v,
    k_cache,
    v_cache,
    slots,  # [T] int64: block * block_size + offset
    k_stride,
    v_stride,
    KV_HEADS: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    heads = tl.arange(0, HEADS_WIDTH)
    dims = tl.arange(0, WIDTH)
    own = (heads < KV_HEADS)[:, None] & (dims < HEAD_SIZE)[None, :]
    source = heads[:, None] * HEAD_SIZE + dims[None, :]
    target = ((slot // PAGE * KV_HEADS + heads[:, None]) * PAGE + slot % PAGE) * HEAD_SIZE + dims[None, :]
    tl.store(k_cache + target, tl.load(k + token * k_stride + source, mask=own), mask=own)
    tl.store(v_cache + target, tl.load(v + token * v_stride + source, mask=own), mask=own)


@triton.jit
def write_quantised_kernel(
    k,  # [T, kv_heads, head_size], rows k_stride apart
    v,
    k_cache,  # [num_blocks, kv_heads, PAGE * (HEAD_SIZE + 4)] int8, see quantised_kv.py
    v_cache,
    slots,  # [T] int64
    k_stride,
    v_stride,
    KV_HEADS: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
):
    """One program a token, and K or V."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    heads = tl.arange(0, HEADS_WIDTH)
    dims = tl.arange(0, WIDTH)
    own = (heads < KV_HEADS)[:, None] & (dims < HEAD_SIZE)[None, :]
    if tl.program_id(1) == 0:
        source, target = k + token * k_stride, k_cache
    else:
        source, target = v + token * v_stride, v_cache
    x = tl.load(source + heads[:, None] * HEAD_SIZE + dims[None, :], mask=own, other=0.0)
    codes, scales = quantise(x.to(tl.float32), KIND)
    pages = (slot // PAGE * KV_HEADS + heads) * (PAGE * (HEAD_SIZE + 4))
    tl.store(target + pages[:, None] + slot % PAGE * HEAD_SIZE + dims[None, :], codes, mask=own)
    behind = (target + pages + PAGE * HEAD_SIZE).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(behind + slot % PAGE, scales, mask=heads < KV_HEADS)


@triton.jit
def _store_head(
    cache,
    slot,
    head,
    first,  # [HALF] fp32: the first half of a head
    second,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
):
    """One head of K or V to its slot: rounded once, to the cache's dtype or to codes and a scale."""
    SIZE: tl.constexpr = HEAD_SIZE // 2
    dims = tl.arange(0, first.shape[0])
    own = dims < SIZE
    page = slot // PAGE * KV_HEADS + head
    if KIND == 0:
        target = cache + (page * PAGE + slot % PAGE) * HEAD_SIZE + dims
        tl.store(target, first.to(cache.dtype.element_ty), mask=own)
        tl.store(target + SIZE, second.to(cache.dtype.element_ty), mask=own)
    else:
        inverse, scale = scales_of(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 0), KIND)
        base = cache + page * (PAGE * (HEAD_SIZE + 4))
        target = base + slot % PAGE * HEAD_SIZE + dims
        tl.store(target, encode(first * inverse, KIND), mask=own)
        tl.store(target + SIZE, encode(second * inverse, KIND), mask=own)
        behind = (base + PAGE * HEAD_SIZE).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(behind + slot % PAGE, scale)


@triton.jit
def rope_write_kernel(
    qkv,  # [T, heads + 2 * kv_heads, head_size], rows qkv_stride apart: q, then k, then v
    q_out,  # [T, heads, head_size]
    k_cache,  # of numbers, or int8 of codes: see quantised_kv.py
    v_cache,
    slots,  # [T] int64
    positions,  # [T] int64
    cos,  # [max_position, head_size / 2]
    sin,
    weight,  # [2, head_size]: of q's norm and of k's; read with NORM alone
    eps,
    qkv_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # HEAD_SIZE / 2 rounded up to a power of two
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    KIND: tl.constexpr,
):
    """One program a token and head: RMSNorm of the head (Qwen3's QK-norm), rotation in half-split form, then q goes to
    q_out and k to its slot of the cache; v goes there as it is. Arithmetic in fp32, rounded once: a quantised cache is
    made from the rotated numbers and not from what the model's dtype leaves of them."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, HALF)
    size: tl.constexpr = HEAD_SIZE // 2
    own = dims < size
    source = qkv + token * qkv_stride + head * HEAD_SIZE + dims
    a = tl.load(source, mask=own, other=0.0).to(tl.float32)
    b = tl.load(source + size, mask=own, other=0.0).to(tl.float32)
    slot = tl.load(slots + token)
    if head < HEADS + KV_HEADS:
        if NORM:
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / HEAD_SIZE + eps)
            row = weight + tl.where(head < HEADS, 0, HEAD_SIZE) + dims
            a = a * scale * tl.load(row, mask=own, other=0.0).to(tl.float32)
            b = b * scale * tl.load(row + size, mask=own, other=0.0).to(tl.float32)
        angle = tl.load(positions + token) * size + dims
        c = tl.load(cos + angle, mask=own, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=own, other=0.0).to(tl.float32)
        first = a * c - b * s
        second = b * c + a * s
        if head < HEADS:
            target = q_out + (token * HEADS + head) * HEAD_SIZE + dims
            tl.store(target, first.to(q_out.dtype.element_ty), mask=own)
            tl.store(target + size, second.to(q_out.dtype.element_ty), mask=own)
        else:
            _store_head(k_cache, slot, head - HEADS, first, second, KV_HEADS, HEAD_SIZE, PAGE, KIND)
    else:
        _store_head(v_cache, slot, head - HEADS - KV_HEADS, a, b, KV_HEADS, HEAD_SIZE, PAGE, KIND)


@triton.jit
def copy_blocks_kernel(
    sources,  # [layers] uint64: addresses of the caches to read, each [2, num_blocks, block_words] of 8-byte words
    targets,  # [layers] uint64: of those to write; may be the same
    pairs,  # [n, 2] int64: (source block, target block); no target is a source
    source_stride,  # words from K's blocks to V's
    target_stride,
    WORDS: tl.constexpr,  # of a block
    BLOCK: tl.constexpr,
):
    """One program a pair, layer, half (K or V) and piece of BLOCK words: all layers in one launch."""
    pair = tl.program_id(0)
    layer = tl.program_id(1) // 2
    half = (tl.program_id(1) % 2).to(tl.int64)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + layer).to(tl.pointer_type(tl.int64))
    target = tl.load(targets + layer).to(tl.pointer_type(tl.int64))
    source = tl.multiple_of(source, 16) + half * source_stride + tl.load(pairs + 2 * pair) * WORDS
    target = tl.multiple_of(target, 16) + half * target_stride + tl.load(pairs + 2 * pair + 1) * WORDS
    tl.store(target + words, tl.load(source + words, mask=words < WORDS), mask=words < WORDS)
