"""What bench/gpu/run.py runs: for each kernel fresh random inputs, its call, its oracle in float64 and the bytes it
must move. Tiny shapes are for the interpreter, on a machine without a GPU; the others are those of the models named."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from case import Case
from products import product_cases
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.attention.reference import attend_dense
from minivllm.kernels import twins
from minivllm.kernels.triton import draw, elementwise, paged
from minivllm.kernels.triton.tiles import decode_tile, num_splits, prefill_tile
from minivllm.sampling import draw as draw_twin
from minivllm.sampling.rejection import Rejection


def cases(device: torch.device, dtype: torch.dtype, tiny: bool, seed: int) -> Iterator[Case]:
    torch.manual_seed(seed)
    unit = torch.finfo(dtype).eps
    for lengths, queries in _attention_shapes(tiny):
        yield _attention(device, dtype, lengths, queries, tiny, 12 * unit)
    tokens, size = (5, 48) if tiny else (4096, 4096)
    x, weight = torch.randn(tokens, size, device=device).to(dtype), torch.randn(size, device=device).to(dtype)
    moved = 2 * x.numel() * x.element_size()
    out = torch.full_like(x, torch.nan)
    yield Case(
        *("rms norm", f"{tokens}x{size}"),
        *(lambda: elementwise.rms_norm(x, weight, 1e-5, out), lambda: twins.rms_norm(x, weight, 1e-5), unit, moved),
    )
    half = torch.full_like(x[:, : size // 2], torch.nan, memory_format=torch.contiguous_format)
    yield Case(
        *("silu mul", f"{tokens}x{size}"),
        *(lambda: elementwise.silu_mul(x, half), lambda: twins.silu_mul(x), unit, moved * 3 // 4),
    )
    yield from _sampling(device, *((3, 256) if tiny else (256, 128_000)))
    yield _rejection(device, *((6, 256) if tiny else (256, 128_000)))
    yield from product_cases(device, dtype, tiny)


def _attention_shapes(tiny: bool) -> list[tuple[list[int], list[int]]]:
    if tiny:
        return [([20, 3, 33], [1, 1, 1]), ([20, 5], [7, 5])]
    return [([1024] * n, [1] * n) for n in (1, 32, 256)] + [([n], [n]) for n in (2048, 8192)]


def _attention(
    device: torch.device, dtype: torch.dtype, lengths: list[int], queries: list[int], tiny: bool, tolerance: float
) -> Case:
    """Requests of `lengths` tokens of which the last `queries` ask, in scattered blocks of 16; Llama-3.1-8B's heads."""
    spec = AttentionSpec(4, 2, 16, 0.25) if tiny else AttentionSpec(32, 8, 128, 1 / math.sqrt(128))
    counts = [-(-n // 16) for n in lengths]
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    ids = torch.randperm(sum(counts)).to(torch.int32)
    for row, count, end in zip(tables, counts, torch.tensor(counts).cumsum(0).tolist(), strict=True):
        row[:count] = ids[end - count : end]
    kv = torch.randn(2, sum(counts), spec.num_kv_heads, 16, spec.head_size, device=device).to(dtype)
    q = torch.randn(sum(queries), spec.num_heads, spec.head_size, device=device).to(dtype)
    out = torch.full_like(q, torch.nan)
    starts = torch.tensor([0, *queries]).cumsum(0)
    arrays = (starts[:-1], torch.tensor(lengths), tables, starts)
    requests = paged.Requests(*(x.to(device, torch.int32) for x in arrays), sum(queries))
    head = paged.Head(spec.num_heads, spec.num_kv_heads, spec.head_size, spec.scale, 0, 0.0)
    scratch = paged.Scratch(device)
    shape = spec.num_heads // spec.num_kv_heads, spec.head_size, dtype.itemsize
    decodes = max(queries) == 1

    def call() -> Tensor:
        if decodes:
            tile = decode_tile(*shape)
            sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
            splits = num_splits(len(lengths), spec.num_kv_heads, sms, max(lengths) // tile.block_n + 1)
            paged.decode(q, *kv, requests, head, out, scratch, tile, splits)
        else:
            paged.prefill(q, *kv, requests, head, out, prefill_tile(*shape))
        return out

    def oracle() -> Tensor:
        results = []
        for r, (length, count) in enumerate(zip(lengths, queries, strict=True)):
            blocks = tables[r, : counts[r]].long().to(device)
            k, v = kv[:, blocks].transpose(2, 3).flatten(1, 2)[:, :length].double()
            first = int(starts[r])
            for begin in range(0, count, 256):  # scores of one piece of queries at a time
                end = min(begin + 256, count)
                seen = length - count + end
                results.append(attend_dense(q[first + begin : first + end].double(), k[:seen], v[:seen], spec))
        return torch.cat(results)

    moved = 2 * sum(lengths) * spec.num_kv_heads * spec.head_size * dtype.itemsize + 2 * q.numel() * dtype.itemsize
    pairs = sum(n * length - n * (n - 1) // 2 for n, length in zip(queries, lengths, strict=True))
    kind = "decode attention" if decodes else "prefill attention"
    label = f"{len(lengths)} x {max(lengths)}"
    return Case(kind, label, call, oracle, tolerance, moved, 4 * pairs * spec.num_heads * spec.head_size)


def _sampling(device: torch.device, count: int, size: int) -> Iterator[Case]:
    probs = torch.randn(count, size, device=device).mul(3).softmax(-1)
    seeds, positions = torch.randint(0, 2**62, (count,)), torch.arange(count)
    on_device = seeds.to(device), positions.to(device)
    k = torch.full((count,), 50, device=device)
    p = torch.full((count,), 0.9, dtype=torch.float64, device=device)
    none = torch.zeros(count, device=device)
    moved = probs.numel() * 4

    def cut_by_sort() -> Tensor:
        return draw_twin.find_cuts_by_sort(probs, k, p, none)[:, 0]

    def draw_by_twin() -> Tensor:
        return draw_twin.draw(probs, seeds.numpy().view("uint64"), positions.numpy())[0]

    label = f"{count} x {size}"
    yield Case("draw", label, lambda: draw.draw(probs, *on_device)[0], draw_by_twin, 0, moved)
    yield Case("top-k, top-p and min-p", label, lambda: draw.find_cuts(probs, k, p, none), cut_by_sort, 0, moved)


def _rejection(device: torch.device, count: int, size: int) -> Case:
    """Half of the drafts were drawn from a distribution near the model's, the others are sure."""
    logits = torch.randn(count, size, device=device).mul(3)
    probs, q = logits.softmax(-1), (logits + torch.randn_like(logits)).softmax(-1)
    drafts, draft_rows = q.multinomial(1)[:, 0], torch.arange(count, device=device)
    draft_rows[::2] = -1
    seeds, positions = torch.randint(0, 2**62, (count,)), torch.arange(count)
    on_device = seeds.to(device), positions.to(device)

    def oracle() -> Tensor:
        twin = Rejection(lambda row, place: None if row % 2 == 0 else q[row])
        everything = positions.numpy()
        pick = twin(drafts.cpu().numpy(), everything, everything * 0)
        return pick(probs.clone(), seeds.numpy().view("uint64"), everything, everything)[0]

    def call() -> Tensor:
        return draw.reject(probs, drafts, q, draft_rows, *on_device)[0]

    return Case("rejection sampling", f"{count} x {size}", call, oracle, 0, probs.numel() * (4 + 2))
