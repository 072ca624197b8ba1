"""Launching what is neither attention nor a product: cache writes, block copies, norms. Checks shapes and strides."""

import torch
import triton
from torch import Tensor

from minivllm.kernels.triton import cache, norm

KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # as in quantised_kv.py


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, kv_heads, head_size] to slots [T] int64 of the caches [num_blocks, kv_heads, block_size, head_size]."""
    _, kv_heads, page, head_size = k_cache.shape
    assert k.shape == v.shape == (len(slots), kv_heads, head_size) and slots.dtype == torch.int64
    assert k.dtype == v.dtype == k_cache.dtype == v_cache.dtype
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape
    assert all(x.stride(1) == head_size and x.stride(2) == 1 for x in (k, v)), (k.stride(), v.stride())
    cache.write_kernel[(len(slots),)](
        *(k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0)),
        KV_HEADS=kv_heads,
        HEADS_WIDTH=triton.next_power_of_2(kv_heads),
        HEAD_SIZE=head_size,
        WIDTH=triton.next_power_of_2(head_size),
        PAGE=page,
        num_warps=4,
    )


def write_quantised(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, kv_heads, head_size] to slots [T] int64 of the caches [num_blocks, kv_heads, block_size * (head_size +
    4)], int8 or e4m3: see quantised_kv.py."""
    kv_heads, head_size = k.shape[1:]
    page, rest = divmod(k_cache.shape[2], head_size + 4)
    assert k.shape == v.shape == (len(slots), kv_heads, head_size) and slots.dtype == torch.int64
    assert rest == 0 and page * head_size % 4 == 0 and k_cache.dtype == v_cache.dtype, (k_cache.shape, k_cache.dtype)
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape
    assert all(x.stride(1) == head_size and x.stride(2) == 1 for x in (k, v)), (k.stride(), v.stride())
    cache.write_quantised_kernel[(len(slots), 2)](
        *(k, v, k_cache.view(torch.int8), v_cache.view(torch.int8), slots, k.stride(0), v.stride(0)),
        KV_HEADS=kv_heads,
        HEADS_WIDTH=triton.next_power_of_2(kv_heads),
        HEAD_SIZE=head_size,
        WIDTH=triton.next_power_of_2(head_size),
        PAGE=page,
        KIND=KINDS[k_cache.dtype],
        num_warps=4,
    )


def rope_write(
    qkv: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
) -> None:
    """qkv [T, heads + 2 * kv_heads, head_size] -> q, normed and rotated, in q_out [T, heads, head_size]; k likewise,
    and v, in their slots [T] of the caches: [num_blocks, kv_heads, block_size, head_size], or of codes, as in
    write_quantised. cos, sin [max_position, head_size / 2]; positions [T]; weight [2, head_size] of q's and k's norm,
    or None: no norm."""
    num_tokens, heads, head_size = q_out.shape
    kv_heads, page, kind = k_cache.shape[1], k_cache.shape[2], KINDS.get(k_cache.dtype, 0)
    if kind:
        page, rest = divmod(page, head_size + 4)
        assert rest == 0 and page * head_size % 4 == 0 and k_cache.dtype == v_cache.dtype, k_cache.shape
        k_cache, v_cache = k_cache.view(torch.int8), v_cache.view(torch.int8)
    else:
        assert k_cache.shape[3] == head_size, k_cache.shape
    assert qkv.shape == (num_tokens, heads + 2 * kv_heads, head_size) and head_size % 2 == 0
    assert qkv.stride(1) == head_size and qkv.stride(2) == 1 and q_out.is_contiguous()
    assert k_cache.shape == v_cache.shape and k_cache.is_contiguous() and v_cache.is_contiguous()
    assert slots.shape == positions.shape == (num_tokens,) and slots.dtype == positions.dtype == torch.int64
    assert cos.shape == sin.shape == (len(cos), head_size // 2) and cos.is_contiguous() and sin.is_contiguous()
    assert weight is None or (weight.shape == (2, head_size) and weight.is_contiguous())
    cache.rope_write_kernel[(num_tokens, heads + 2 * kv_heads)](
        *(qkv, q_out, k_cache, v_cache, slots, positions, cos, sin, cos if weight is None else weight, eps),
        qkv.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        HALF=triton.next_power_of_2(head_size // 2),
        PAGE=page,
        NORM=weight is not None,
        KIND=kind,
        num_warps=1,
    )


class BlockCopier:
    """Copies blocks between caches [2, num_blocks, ...] of all layers in one launch; made once for a set of caches."""

    def __init__(self, sources: list[Tensor], targets: list[Tensor]):
        """Layer by layer; a layer's source and target may be the same tensor. A host tensor has to be pinned."""
        shapes = {(x.shape[2:], x.dtype) for x in [*sources, *targets]}
        assert len(shapes) == 1 and all(x.is_contiguous() and x.shape[0] == 2 for x in [*sources, *targets])
        assert len({x.shape for x in sources}) == len({x.shape for x in targets}) == 1, "layers of one size"
        self.device = next((x.device for x in [*sources, *targets] if x.device.type == "cuda"), torch.device("cpu"))
        self.sources, self.targets = (self._addresses(tensors) for tensors in (sources, targets))
        self.keep = sources, targets
        block_bytes = sources[0][0, 0].numel() * sources[0].element_size()
        assert block_bytes % 8 == 0, f"a block of {block_bytes} bytes is no number of 8-byte words"
        self.words = block_bytes // 8
        self.strides = sources[0].shape[1] * self.words, targets[0].shape[1] * self.words

    def _addresses(self, tensors: list[Tensor]) -> Tensor:
        assert all(x.data_ptr() % 16 == 0 for x in tensors)
        return torch.tensor([x.data_ptr() for x in tensors], dtype=torch.uint64, device=self.device)

    def __call__(self, pairs: Tensor) -> None:
        """pairs [n, 2] int64 on the kernel's device: (source block, target block). A target is nobody's source."""
        assert pairs.dtype == torch.int64 and pairs.is_contiguous() and pairs.shape[1] == 2
        block = min(2048, triton.next_power_of_2(self.words))
        grid = len(pairs), 2 * len(self.sources), triton.cdiv(self.words, block)
        cache.copy_blocks_kernel[grid](
            *(self.sources, self.targets, pairs, *self.strides), WORDS=self.words, BLOCK=block, num_warps=4
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x [T, size] -> x / rms(x) * weight, in out or like x."""
    assert x.dim() == 2 and x.stride(1) == 1 and weight.shape == (x.shape[1],) and weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == x.shape and out.is_contiguous()
    width = triton.next_power_of_2(x.shape[1])
    norm.rms_norm_kernel[(len(x),)](
        x, weight, out, eps, x.stride(0), SIZE=x.shape[1], WIDTH=width, num_warps=min(max(width // 512, 1), 16)
    )
    return out


def silu_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x [T, 2 * size]: gate, then up -> [T, size] = silu(gate) * up, in out or like x."""
    size = x.shape[1] // 2
    assert x.dim() == 2 and x.stride(1) == 1 and x.shape[1] == 2 * size
    out = torch.empty(len(x), size, dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == (len(x), size) and out.is_contiguous()
    grid = len(x), triton.cdiv(size, 1024)
    norm.silu_mul_kernel[grid](x, out, x.stride(0), SIZE=size, BLOCK=1024, num_warps=4)
    return out
