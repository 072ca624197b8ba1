"""A kernel beside its twin on a little input, for kernels/dispatch.py: of kernels whose users are on this storey."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels import twins
from minivllm.kernels.triton import elementwise, moe


def rope_write(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """A few tokens with a norm, in a cache of kv_dtype. In float64's light: codes may be one step apart where another
    order of sums is rounded otherwise."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, size, page = 4, 2, 32, 16

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    in_codes = kv_dtype in elementwise.KINDS
    inner = (page * (size + 4),) if in_codes else (page, size)
    inputs = random(5, heads + 2 * kv_heads, size)
    slots, positions = torch.tensor([3, 17, 40, 0, 31], device=device), torch.tensor([5, 0, 9, 3, 7], device=device)
    angles = torch.rand(10, size // 2, generator=generator) * 6
    turn = positions, angles.cos().to(device, dtype), angles.sin().to(device, dtype), random(2, size), 1e-6
    results = []
    for run in (elementwise.rope_write, twins.rope_write):
        q, caches = random(5, heads, size), torch.zeros(2, 3, kv_heads, *inner, dtype=kv_dtype, device=device)
        run(inputs, q, *caches, slots, *turn)
        numbers = [twins.read_codes(cache, size) for cache in caches] if in_codes else list(caches)
        results.append([q, *numbers])
    (q, *kv), (q_wanted, *kv_wanted) = results
    near = 4 * torch.finfo(dtype).eps
    step = near + {torch.int8: 1 / 127, torch.float8_e4m3fn: 1 / 8}.get(kv_dtype, 0)
    pairs = [(q, q_wanted, near), *((x, y, step) for x, y in zip(kv, kv_wanted, strict=True))]
    return all((x.double() - y.double()).abs().max() <= bound * y.abs().max() for x, y, bound in pairs)


def experts(device: torch.device, dtype: torch.dtype) -> bool:
    """A few tokens, one of them alone, and so many that tiles are large. Sizes that fill no block."""
    generator = torch.Generator().manual_seed(0)
    hidden, size, num_experts, top_k = 72, 40, 4, 2

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(device, dtype)

    gate_up, down = random(num_experts, 2 * size, hidden), random(num_experts, hidden, size)
    # Products of size 1: sums in float32; a token's parts are rounded to the dtype, then their sum.
    near = {"atol": max(4 * torch.finfo(dtype).eps, 1e-5), "rtol": 2 * torch.finfo(dtype).eps}
    for num_tokens in (1, 5, 40):
        x = random(num_tokens, hidden) * hidden**0.5
        shares = torch.randn(num_tokens, num_experts, generator=generator).softmax(-1).to(device)
        weights, ids = shares.topk(top_k)
        wanted = twins.experts(x, ids, weights, gate_up, down)
        if not torch.allclose(moe.moe(x, ids, weights, gate_up, down).double(), wanted, **near):
            return False
    return True
