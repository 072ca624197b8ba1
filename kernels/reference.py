"""The slow, obviously right references of the kernels, in plain torch: their oracles, and what runs where they cannot.

Attention's is minivllm.attention.reference. Arithmetic is in `dtype`: float64 when a kernel is judged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.attention.quantised_kv import LARGEST, quantise_heads
from minivllm.attention.reference import visible

F64 = torch.float64


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, kv_heads, head_size] to slots [T] of the caches [num_blocks, kv_heads, block_size, head_size]."""
    page = k_cache.shape[2]
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[slots // page, :, slots % page] = new.to(cache.dtype)


def quantised_pages(cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """A cache [num_blocks, kv_heads, block_size * (head_size + 4)] of codes -> views of its codes [num_blocks,
    kv_heads, block_size, head_size] and of the bytes of its scales [num_blocks, kv_heads, block_size, 4]."""
    page = cache.shape[2] // (head_size + 4)
    codes, scales = cache.split([page * head_size, page * 4], 2)
    return codes.unflatten(2, (page, head_size)), scales.view(torch.uint8).unflatten(2, (page, 4))


def write_quantised(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """k, v [T, kv_heads, head_size] to slots [T] of quantised caches."""
    for cache, new in ((k_cache, k), (v_cache, v)):
        codes, scales = quantised_pages(cache, new.shape[-1])
        page = codes.shape[2]
        new_codes, new_scales = quantise_heads(new, cache.dtype)
        codes.view(torch.uint8)[slots // page, :, slots % page] = new_codes.view(torch.uint8)
        scales[slots // page, :, slots % page] = new_scales[..., None].view(torch.uint8)


def read_quantised(cache: Tensor, head_size: int) -> Tensor:
    """A quantised cache -> the numbers that it holds, fp32 [num_blocks, kv_heads, block_size, head_size]."""
    codes, scales = quantised_pages(cache, head_size)
    return codes.float() * scales.contiguous().view(torch.float32)


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
    dtype: torch.dtype = F64,
) -> None:
    """As kernels.triton.elementwise.rope_write."""
    heads, kv_heads = q_out.shape[1], k_cache.shape[1]
    q, k, v = qkv.to(dtype).split([heads, kv_heads, kv_heads], 1)
    if weight is not None:
        q, k = (rms_norm(x, w, eps, dtype) for x, w in zip((q, k), weight, strict=True))
    c, s = (table.to(dtype)[positions][:, None] for table in (cos, sin))
    q, k = (rotate(x, c, s) for x in (q, k))
    q_out.copy_(q)
    (write_quantised if k_cache.dtype in LARGEST else write)(k, v, k_cache, v_cache, slots)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., head_size], cos and sin [..., head_size / 2]: each pair (x_i, x_{i + head_size/2}) turned."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def copy_blocks(sources: list[Tensor], targets: list[Tensor], pairs: Tensor) -> None:
    """Caches [2, num_blocks, ...] of each layer; pairs [n, 2]: (source block, target block)."""
    for source, target in zip(sources, targets, strict=True):
        for a, b in pairs.tolist():
            target[:, b] = source[:, a]


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = F64) -> Tensor:
    """x [..., size] -> x / rms(x) * weight in `dtype`."""
    x = x.to(dtype)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(dtype)


def silu_mul(x: Tensor, dtype: torch.dtype = F64) -> Tensor:
    """x [T, 2 * size]: gate, then up -> [T, size] = silu(gate) * up."""
    gate, up = x.to(dtype).chunk(2, -1)
    return gate * gate.sigmoid() * up


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype = F64) -> Tensor:
    """As kernels.triton.moe.moe: token by token, expert by expert."""
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for t, own in enumerate(ids.tolist()):
        for weight, e in zip(weights[t], own, strict=True):
            middle = silu_mul((gate_up[e].to(dtype) @ x[t].to(dtype))[None], dtype)[0]
            out[t] += weight.to(dtype) * (down[e].to(dtype) @ middle)
    return out


def gather_tokens(
    all_tokens: Tensor,
    all_tables: Tensor,
    rows: Tensor,
    firsts: Tensor,
    query_start: Tensor,
    padded_tokens: int,
    block_size: int,
    spare_block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As kernels.triton.gather.gather_tokens: (token_ids, positions, slots), each [padded_tokens]."""
    found = []
    for r, (row, first) in enumerate(zip(rows.tolist(), firsts.tolist(), strict=True)):
        for position in range(first, first + int(query_start[r + 1] - query_start[r])):
            block = int(all_tables[row, position // block_size])
            found.append((int(all_tokens[row, position]), position, block * block_size + position % block_size))
    found += [(0, 0, spare_block * block_size)] * (padded_tokens - len(found))
    return torch.tensor(found, device=rows.device).T.unbind()


def gather_rows(table: Tensor, rows: Tensor, width: int) -> Tensor:
    """As kernels.triton.gather.gather_rows."""
    return table[rows, :width]


def write_rows(table: Tensor, writes: list[tuple[int, int, list[int], int]]) -> None:
    """As kernels.triton.gather.write_rows, of writes (row, first column, values, clear up to)."""
    for row, first, values, clear_to in writes:
        table[row, first : first + len(values)] = torch.tensor(values, dtype=table.dtype, device=table.device)
        table[row, first + len(values) : clear_to] = 0


def attend_with(
    q: Tensor, k: Tensor, v: Tensor, layer: AttentionSpec, slopes: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """`attend_dense` (minivllm/attention/reference.py) with more by head: q [n, heads, D], k and v [L, kv_heads, D] ->
    [n, heads, D]. slopes [heads]: ALiBi's (Press et al. 2022). sinks [heads]: one more score of each head, of a value
    that is zero."""
    group, place = layer.num_heads // layer.num_kv_heads, torch.arange(len(k), device=k.device)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [L, heads, D]
    scores = torch.einsum("nhd,lhd->hnl", q, k) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * (place - place[len(k) - len(q) :, None])
    scores = scores.masked_fill(~visible(q.shape[0], k.shape[0], layer.sliding_window, q.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].to(scores.dtype).expand(-1, len(q), 1)], -1)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1)[..., : len(k)], v)
