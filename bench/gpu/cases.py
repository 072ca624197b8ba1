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
from minivllm.kernels import twins
from minivllm.kernels.triton import draw, elementwise, gather, paged
from minivllm.kernels.triton.tiles import decode_tile, num_splits, prefill_tile
from minivllm.sampling import draw as draw_twin
from minivllm.sampling.rejection import Rejection


def cases(device: torch.device, dtype: torch.dtype, tiny: bool, seed: int) -> Iterator[Case]:
    torch.manual_seed(seed)
    unit = torch.finfo(dtype).eps
    for lengths, queries in _attention_shapes(tiny):
        for codes in (None, torch.int8, torch.float8_e4m3fn):
            yield _attention(device, dtype, lengths, queries, tiny, 12 * unit, codes)
    yield from _written(device, dtype, 5 if tiny else 4096)
    yield from _inputs(device, *((5, 60) if tiny else (256, 8192)))
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
    device: torch.device,
    dtype: torch.dtype,
    lengths: list[int],
    queries: list[int],
    tiny: bool,
    tolerance: float,
    codes: torch.dtype | None,
) -> Case:
    """Requests of `lengths` tokens of which the last `queries` ask, in scattered blocks of 16; Llama-3.1-8B's heads.
    With e4m3 codes, slopes and sinks too."""
    spec = AttentionSpec(4, 2, 16, 0.25) if tiny else AttentionSpec(32, 8, 128, 1 / math.sqrt(128))
    counts = [-(-n // 16) for n in lengths]
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    ids = torch.randperm(sum(counts)).to(torch.int32)
    for row, count, end in zip(tables, counts, torch.tensor(counts).cumsum(0).tolist(), strict=True):
        row[:count] = ids[end - count : end]
    held = kv = torch.randn(2, sum(counts), spec.num_kv_heads, 16, spec.head_size, device=device).to(dtype)
    if codes is not None:
        k, v = kv.transpose(2, 3).flatten(1, 2)
        kv = torch.empty(*kv.shape[:3], 16 * (spec.head_size + 4), dtype=codes, device=device)
        twins.write_codes(k, v, *kv, torch.arange(len(k), device=device))
        held = torch.stack([twins.read_codes(half, spec.head_size) for half in kv])
    by_head = paged.NOTHING
    if codes == torch.float8_e4m3fn:
        numbers = torch.arange(1, spec.num_heads + 1, device=device)
        by_head = paged.ByHead(2.0**-numbers, numbers / spec.num_heads)
    q = torch.randn(sum(queries), spec.num_heads, spec.head_size, device=device).to(dtype)
    out = torch.full_like(q, torch.nan)
    starts = torch.tensor([0, *queries]).cumsum(0)
    arrays = (starts[:-1], torch.tensor(lengths), tables, starts)
    requests = paged.Requests(*(x.to(device, torch.int32) for x in arrays), sum(queries))
    head = paged.Head(spec.num_heads, spec.num_kv_heads, spec.head_size, spec.scale, 0, 0.0)
    scratch = paged.Scratch(device)
    shape = spec.num_heads // spec.num_kv_heads, spec.head_size
    decodes = max(queries) == 1

    def call() -> Tensor:
        if decodes:
            tile = decode_tile(*shape, kv.itemsize)
            sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
            splits = num_splits(len(lengths), spec.num_kv_heads, sms, max(lengths) // tile.block_n + 1)
            paged.decode(q, *kv, requests, head, out, scratch, tile, splits, by_head)
        else:
            paged.prefill(q, *kv, requests, head, out, prefill_tile(*shape, dtype.itemsize), by_head)
        return out

    def oracle() -> Tensor:
        results = []
        for r, (length, count) in enumerate(zip(lengths, queries, strict=True)):
            blocks = tables[r, : counts[r]].long().to(device)
            k, v = held[:, blocks].transpose(2, 3).flatten(1, 2)[:, :length].double()
            first = int(starts[r])
            for begin in range(0, count, 256):  # scores of one piece of queries at a time
                end = min(begin + 256, count)
                seen = length - count + end
                asked = q[first + begin : first + end].double()
                results.append(twins.attend_with(asked, k[:seen], v[:seen], spec, *by_head))
        return torch.cat(results)

    moved = sum(lengths) * kv.numel() // (sum(counts) * 16) * kv.itemsize + 2 * q.numel() * dtype.itemsize
    pairs = sum(n * length - n * (n - 1) // 2 for n, length in zip(queries, lengths, strict=True))
    kind = "decode attention" if decodes else "prefill attention"
    label = f"{len(lengths)} x {max(lengths)}" + (f", {str(codes)[6:]}" if codes else "")
    return Case(kind, label, call, oracle, tolerance, moved, 4 * pairs * spec.num_heads * spec.head_size)


def _written(device: torch.device, dtype: torch.dtype, num_tokens: int) -> Iterator[Case]:
    """Numbers are compared, not codes: a product that is rounded in another place can move a code by one."""
    k, v = torch.randn(2, num_tokens, 8, 128, device=device).to(dtype)
    slots = torch.randperm(num_tokens, device=device)
    for codes, step in ((torch.int8, 1 / 127), (torch.float8_e4m3fn, 1 / 8)):
        yield _written_as(codes, k, v, slots, step)


def _written_as(codes: torch.dtype, k: Tensor, v: Tensor, slots: Tensor, step: float) -> Case:
    caches = torch.zeros(2, len(slots) // 16 + 1, 8, 16 * 132, dtype=codes, device=k.device)

    def numbers(caches: Tensor) -> Tensor:
        return torch.stack([twins.read_codes(cache, 128) for cache in caches]).double()

    def call() -> Tensor:
        elementwise.write_codes(k, v, *caches, slots)
        return caches

    def oracle() -> Tensor:
        twins.write_codes(k, v, *caches, slots)
        return numbers(caches)

    label, moved = f"{len(slots)} tokens, {str(codes)[6:]}", 2 * k.numel() * (k.itemsize + 1)
    return Case("cache write in 8 bits", label, call, oracle, step, moved, read=numbers)


def _inputs(device: torch.device, count: int, length: int) -> Iterator[Case]:
    """A step of decodes: one token of each request."""
    tokens = torch.randint(0, 1 << 17, (count, length), dtype=torch.int32, device=device)
    tables = torch.randint(0, 1 << 15, (count, length // 16 + 1), dtype=torch.int32, device=device)
    rows, firsts = (torch.randint(0, n, (count,), device=device) for n in (count, length))
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    out = gather.Inputs(*torch.full((3, count), -1, device=device))
    gathered = torch.full_like(tables, -1)

    def call() -> Tensor:
        return torch.stack(gather.gather_tokens(tokens, tables, rows, firsts, starts, out, 16, 0))

    def oracle() -> Tensor:
        return torch.stack(twins.gather_tokens(tokens, tables, rows, firsts, starts, count, 16, 0))

    yield Case("gather inputs", f"{count} x 1", call, oracle, 0, 44 * count)
    label, width = f"{count} x {tables.shape[1]}", tables.shape[1]
    yield Case(
        *("gather rows", label, lambda: gather.gather_rows(tables, rows, gathered)),
        *(lambda: twins.gather_rows(tables, rows, width), 0, 8 * tables.numel()),
    )


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
