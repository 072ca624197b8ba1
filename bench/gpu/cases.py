"""What bench/gpu/run.py runs: for each Triton kernel of minivllm.kernels.table fresh random inputs, its call, its
oracle in float64 and the bytes it must move. Tiny shapes are for the interpreter, on a machine without a GPU; the
others are those of the models named. Every output is poisoned before it is written; what a kernel allocates itself is,
too (kernel_parts.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from case import Case, Setting
from products import experts_cases, lora_cases, w4a16_cases
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.kernels import reference
from minivllm.kernels.triton import draw, elementwise, gather, paged
from minivllm.kernels.triton.tiles import attention_tiles, num_splits
from minivllm.sampling import draw as draw_reference
from minivllm.sampling.rejection import Rejection

QUANTISED = (torch.int8, torch.float8_e4m3fn)
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128  # Llama-3.1-8B's


def decode_cases(setting: Setting) -> Iterator[Case]:
    if setting.tiny:
        shapes, ragged = [[20, 3, 33]], [20, 3, 33]
    else:
        shapes, ragged = [[1024] * n for n in (1, 32, 256)], torch.randint(1, 3000, (17,)).tolist()
    for lengths in shapes:
        for codes in (None, *QUANTISED):
            yield _attention(setting, lengths, [1] * len(lengths), codes)
    for case in _variants(setting):
        yield _attention(setting, ragged, [1] * len(ragged), **case, timed=False)


def prefill_cases(setting: Setting) -> Iterator[Case]:
    if setting.tiny:
        shapes, ragged = [([20, 5], [7, 5])], [20, 3, 33]
    else:
        shapes, ragged = [([n], [n]) for n in (2048, 8192)], torch.randint(1, 1500, (9,)).tolist()
    for lengths, queries in shapes:
        for codes in (None, *QUANTISED):
            yield _attention(setting, lengths, queries, codes)
    queries = [int(torch.randint(1, n + 1, ())) + (n > 1 and i == 0) for i, n in enumerate(ragged)]
    queries = [min(n, length) for n, length in zip(queries, ragged, strict=True)]
    for case in _variants(setting):
        yield _attention(setting, ragged, queries, **case, timed=False)


def _variants(setting: Setting) -> Iterator[dict]:
    """What layers may ask for beside Llama's: any head size, window, soft cap and block size."""
    yield {"window": 9 if setting.tiny else 500, "soft_cap": 2.0}
    if not setting.tiny:
        for heads, kv_heads, head_size, page in ((16, 8, 128, 256), (9, 3, 64, 32), (8, 8, 96, 16), (16, 1, 256, 64)):
            yield {"heads": (heads, kv_heads, head_size), "page": page}
            yield {"heads": (heads, kv_heads, head_size), "page": page, "window": 500, "codes": torch.int8}


def _attention(
    setting: Setting,
    lengths: list[int],
    queries: list[int],
    codes: torch.dtype | None = None,
    heads: tuple[int, int, int] | None = None,
    page: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    timed: bool = True,
) -> Case:
    """Requests of `lengths` tokens of which the last `queries` ask, in scattered blocks. With e4m3 codes, slopes and
    sinks too."""
    device, dtype = setting.device, setting.dtype
    heads = heads or ((4, 2, 16) if setting.tiny else (HEADS, KV_HEADS, HEAD_SIZE))
    spec = AttentionSpec(*heads, 1 / math.sqrt(heads[2]), window, soft_cap)
    counts = [-(-n // page) for n in lengths]
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    ids = torch.randperm(sum(counts)).to(torch.int32)
    for row, count, end in zip(tables, counts, torch.tensor(counts).cumsum(0).tolist(), strict=True):
        row[:count] = ids[end - count : end]
    held = kv = torch.randn(2, sum(counts), spec.num_kv_heads, page, spec.head_size, device=device).to(dtype)
    if codes is not None:
        k, v = kv.transpose(2, 3).flatten(1, 2)
        kv = torch.empty(*kv.shape[:3], page * (spec.head_size + 4), dtype=codes, device=device)
        reference.write_quantised(k, v, *kv, torch.arange(len(k), device=device))
        held = torch.stack([reference.read_quantised(half, spec.head_size) for half in kv])
    by_head = paged.NOTHING
    if codes == torch.float8_e4m3fn:
        numbers = torch.arange(1, spec.num_heads + 1, device=device)
        by_head = paged.ByHead(2.0**-numbers, numbers / spec.num_heads)
    q = torch.randn(sum(queries), spec.num_heads, spec.head_size, device=device).to(dtype)
    out = torch.full_like(q, torch.nan)
    starts = torch.tensor([0, *queries]).cumsum(0)
    arrays = (starts[:-1], torch.tensor(lengths), tables, starts)
    requests = paged.Requests(*(x.to(device, torch.int32) for x in arrays), sum(queries))
    head = paged.Head(*heads, spec.scale, window or 0, soft_cap or 0.0)
    scratch = paged.Scratch(device)
    group = spec.num_heads // spec.num_kv_heads
    decode_tile, prefill_tile = attention_tiles(group, spec.head_size, kv.itemsize, window is not None, setting.major)
    decodes = max(queries) == 1

    def call() -> Tensor:
        if decodes:
            most = min(max(lengths), window or max(lengths)) // decode_tile.block_n + 1
            splits = num_splits(len(lengths), spec.num_kv_heads, setting.num_sms, most)
            paged.decode(q, *kv, requests, head, out, scratch, decode_tile, splits, by_head)
        else:
            paged.prefill(q, *kv, requests, head, out, prefill_tile, by_head)
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
                results.append(reference.attend_with(asked, k[:seen], v[:seen], spec, *by_head))
        return torch.cat(results)

    moved = sum(lengths) * kv.numel() // (sum(counts) * page) * kv.itemsize + 2 * q.numel() * dtype.itemsize
    pairs = sum(n * length - n * (n - 1) // 2 for n, length in zip(queries, lengths, strict=True))
    kind = "decode attention" if decodes else "prefill attention"
    details = [str(codes)[6:]] if codes else []
    details += [f"{'/'.join(map(str, heads))} heads"] * (not timed) + [f"page {page}"] * (page != 16)
    details += [f"window {window}"] * bool(window) + [f"cap {soft_cap}"] * bool(soft_cap)
    label = ", ".join([f"{len(lengths)} x {max(lengths)}", *details])
    flops = 4 * pairs * spec.num_heads * spec.head_size
    return Case(kind, label, call, oracle, 12 * setting.unit, moved, flops, timed=timed)


def _slots(setting: Setting) -> tuple[Tensor, int]:
    """Where a step's tokens go, and how many blocks of 16 there are: a quarter more than is written."""
    count = 5 if setting.tiny else 4096
    num_blocks = count * 5 // 64 + 2
    return torch.randperm(num_blocks * 16, device=setting.device)[:count], num_blocks


def _poisoned(num_blocks: int, kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Caches of K and V of which no number is one, in codes no scale."""
    if dtype in QUANTISED:
        shape = 2, num_blocks, kv_heads, 16 * (head_size + 4)
        return torch.full(shape, -1, dtype=torch.int8, device=device).view(dtype)
    return torch.full((2, num_blocks, kv_heads, 16, head_size), torch.nan, dtype=dtype, device=device)


UNWRITTEN = -1000.0  # in place of NaN, which is equal to nothing


def _plain(caches: Tensor) -> Tensor:
    return caches.double().nan_to_num(nan=UNWRITTEN)


def _shares(caches: Tensor, head_size: int) -> Tensor:
    """quantised caches: each number as a share of its head's largest, and that one."""
    numbers = torch.stack([reference.read_quantised(cache, head_size) for cache in caches]).double()
    largest = numbers.abs().amax(-1, keepdim=True)
    return torch.cat([numbers / largest, largest], -1).nan_to_num(nan=UNWRITTEN)


# A number that is rounded in another place can move a code by one: 1/127 of the largest, or the step of e4m3 there,
# 32/448, beside 1 + the number itself.
STEP = {torch.int8: 1.01 / 127, torch.float8_e4m3fn: 1.01 * 32 / 448 / 2}


def write_cases(setting: Setting) -> Iterator[Case]:
    slots, num_blocks = _slots(setting)
    heads = (2, 16) if setting.tiny else (KV_HEADS, HEAD_SIZE)
    k, v = torch.randn(2, len(slots), *heads, device=setting.device).to(setting.dtype)
    got, wanted = (_poisoned(num_blocks, *heads, setting.dtype, setting.device) for _ in range(2))

    def call() -> Tensor:
        elementwise.write(k, v, *got, slots)
        return got

    def oracle() -> Tensor:
        reference.write(k, v, *wanted, slots)
        return _plain(wanted)

    moved = 4 * k.numel() * k.itemsize
    yield Case("cache write", f"{len(slots)} tokens", call, oracle, 0, moved, read=_plain)


def write_codes_cases(setting: Setting) -> Iterator[Case]:
    for codes in QUANTISED:
        yield _written_as(setting, codes)


def _written_as(setting: Setting, codes: torch.dtype) -> Case:
    slots, num_blocks = _slots(setting)
    heads = _, size = (2, 16) if setting.tiny else (KV_HEADS, HEAD_SIZE)
    k, v = torch.randn(2, len(slots), *heads, device=setting.device).to(setting.dtype)
    got, wanted = (_poisoned(num_blocks, *heads, codes, setting.device) for _ in range(2))

    def call() -> Tensor:
        elementwise.write_quantised(k, v, *got, slots)
        return got

    def oracle() -> Tensor:
        reference.write_quantised(k, v, *wanted, slots)
        return _shares(wanted, size)

    label, moved = f"{len(slots)} tokens, {str(codes)[6:]}", 2 * k.numel() * (k.itemsize + 1)
    read = lambda caches: _shares(caches, size)  # noqa: E731
    return Case("cache write in 8 bits", label, call, oracle, STEP[codes], moved, read=read)


def rope_cases(setting: Setting) -> Iterator[Case]:
    yield _rope(setting, None, False)
    yield _rope(setting, None, True)


def rope_codes_cases(setting: Setting) -> Iterator[Case]:
    for codes in QUANTISED:
        yield _rope(setting, codes, True)


def _rope(setting: Setting, codes: torch.dtype | None, norm: bool) -> Case:
    """q, and then the caches, in a row."""
    slots, num_blocks = _slots(setting)
    heads, kv_heads, size = (4, 2, 16) if setting.tiny else (16, 8, 128)  # Qwen3-0.6B's
    count, device, dtype = len(slots), setting.device, setting.dtype
    qkv = torch.randn(count, heads + 2 * kv_heads, size, device=device).to(dtype)
    positions = torch.randint(0, 4096, (count,), device=device)
    angles = torch.arange(4096, device=device)[:, None] * 1e-4 ** (torch.arange(size // 2, device=device) * 2 / size)
    cos, sin = angles.cos(), angles.sin()
    weight = torch.empty(2, size, device=device).uniform_(0.75, 1.25).to(dtype) if norm else None

    def run(function: Callable[..., None], q: Tensor, caches: Tensor) -> Tensor:
        function(qkv, q, *caches, slots, positions, cos, sin, weight, 1e-6)
        numbers = _plain(caches) if codes is None else _shares(caches, size)
        return torch.cat([q.double().flatten(), numbers.flatten()])

    outputs = [torch.full((count, heads, size), torch.nan, dtype=x, device=device) for x in (dtype, torch.float64)]
    exact = torch.float64 if codes is None else codes
    caches = [_poisoned(num_blocks, kv_heads, size, x, device) for x in (codes or dtype, exact)]

    def call() -> Tensor:
        elementwise.rope_write(qkv, outputs[0], *caches[0], slots, positions, cos, sin, weight, 1e-6)
        return outputs[0]

    def read(_: Tensor) -> Tensor:
        numbers = _plain(caches[0]) if codes is None else _shares(caches[0], size)
        return torch.cat([outputs[0].double().flatten(), numbers.flatten()])

    written = 2 * count * kv_heads * size * (1 if codes else dtype.itemsize)
    moved = (qkv.numel() + outputs[0].numel()) * dtype.itemsize + written
    kernel = "rope + norm + write in 8 bits" if codes else "rope + norm + cache write"
    label = f"{count} tokens" + (f", {str(codes)[6:]}" if codes else "" if norm else ", no norm")
    tolerance = max(setting.unit, STEP[codes]) if codes else setting.unit
    oracle = lambda: run(reference.rope_write, outputs[1], caches[1])  # noqa: E731
    return Case(kernel, label, call, oracle, tolerance, moved, read=read)


def copy_cases(setting: Setting) -> Iterator[Case]:
    """Blocks of all layers to another pool."""
    layers, num_blocks, count = (2, 9, 4) if setting.tiny else (8, 1024, 256)
    inner = (2, 16, 16) if setting.tiny else (KV_HEADS, 16, HEAD_SIZE)
    shape, device = (2, num_blocks, *inner), setting.device
    sources = [torch.randn(shape, device=device).to(setting.dtype) for _ in range(layers)]
    got, wanted = ([torch.full_like(x, torch.nan) for x in sources] for _ in range(2))
    pairs = torch.stack([torch.randperm(num_blocks)[:count], torch.randperm(num_blocks)[:count]], 1).to(device)
    copier = elementwise.BlockCopier(sources, got)

    def call() -> Tensor:
        copier(pairs)
        return got[0]

    def oracle() -> Tensor:
        reference.copy_blocks(sources, wanted, pairs)
        return _plain(torch.stack(wanted))

    moved = 2 * 2 * layers * count * sources[0][0, 0].numel() * setting.dtype.itemsize
    read = lambda _: _plain(torch.stack(got))  # noqa: E731
    yield Case("block copy", f"{count} blocks of {layers} layers", call, oracle, 0, moved, read=read)


def gather_tokens_cases(setting: Setting) -> Iterator[Case]:
    """A step of decodes: one token of each request."""
    count, length = (5, 60) if setting.tiny else (256, 8192)
    device = setting.device
    tokens = torch.randint(0, 1 << 17, (count, length), dtype=torch.int32, device=device)
    tables = torch.randint(0, 1 << 15, (count, length // 16 + 1), dtype=torch.int32, device=device)
    rows, firsts = (torch.randint(0, n, (count,), device=device) for n in (count, length))
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    padded = count + 3
    out = gather.Inputs(*torch.full((3, padded), -1, device=device))

    def call() -> Tensor:
        gather.gather_tokens(tokens, tables, rows, firsts, starts, out, 16, 0)
        return out.slots

    def oracle() -> Tensor:
        return torch.stack(reference.gather_tokens(tokens, tables, rows, firsts, starts, padded, 16, 0))

    read = lambda _: torch.stack(out)  # noqa: E731
    yield Case("gather inputs", f"{count} x 1", call, oracle, 0, 44 * count, read=read)


def gather_rows_cases(setting: Setting) -> Iterator[Case]:
    count, width = (5, 4) if setting.tiny else (256, 513)
    tables = torch.randint(0, 1 << 15, (count, width), dtype=torch.int32, device=setting.device)
    rows, out = torch.randint(0, count, (count,), device=setting.device), torch.full_like(tables, -1)
    yield Case(
        *("gather rows", f"{count} x {width}", lambda: gather.gather_rows(tables, rows, out)),
        *(lambda: reference.gather_rows(tables, rows, width), 0, 8 * tables.numel()),
    )


def staged_cases(setting: Setting) -> Iterator[Case]:
    """A step that brings a request in and gives every other one a block."""
    count, width = (5, 40) if setting.tiny else (256, 2048)
    table = torch.randint(0, 1 << 15, (count, width), dtype=torch.int32, device=setting.device)
    wanted, places = table.clone(), torch.randint(0, width - 1, (count,)).tolist()
    writes = [(row, place, torch.randint(0, 1 << 15, (1,)).tolist(), 0) for row, place in enumerate(places)]
    writes[0] = 0, 0, torch.randint(0, 1 << 15, (width // 2,)).tolist(), width

    def call() -> Tensor:
        gather.write_rows(table, writes)
        return table

    def oracle() -> Tensor:
        reference.write_rows(wanted, writes)
        return wanted

    moved = 4 * (width + 6 * count)
    yield Case("staged writes", f"{count} x {width}", call, oracle, 0, moved, captured=False)  # it copies from the host


def norm_cases(setting: Setting) -> Iterator[Case]:
    x = _rows(setting)
    weight, out = torch.randn(x.shape[1], device=x.device).to(x.dtype), torch.full_like(x, torch.nan)
    yield Case(
        *("rms norm", f"{len(x)}x{x.shape[1]}", lambda: elementwise.rms_norm(x, weight, 1e-5, out)),
        *(lambda: reference.rms_norm(x, weight, 1e-5), setting.unit, 2 * x.numel() * x.itemsize),
        rivals={"torch": lambda: F.rms_norm(x, (x.shape[1],), weight, 1e-5)},
    )


def silu_cases(setting: Setting) -> Iterator[Case]:
    x = _rows(setting)
    out = torch.full((len(x), x.shape[1] // 2), torch.nan, device=x.device).to(x.dtype)
    yield Case(
        *("silu mul", f"{len(x)}x{x.shape[1]}", lambda: elementwise.silu_mul(x, out), lambda: reference.silu_mul(x)),
        *(setting.unit, 3 * out.numel() * x.itemsize),
    )


def _rows(setting: Setting) -> Tensor:
    tokens, size = (5, 48) if setting.tiny else (4096, 8192)
    return torch.randn(tokens, size, device=setting.device).to(setting.dtype)


def _probs(setting: Setting) -> Tensor:
    return torch.randn(*((3, 256) if setting.tiny else (256, 128_000)), device=setting.device).mul(3).softmax(-1)


def cut_cases(setting: Setting) -> Iterator[Case]:
    """Bytes: one pass over the probabilities, so that the fraction's inverse is the number of passes it is worth."""
    probs = _probs(setting)
    count, device = len(probs), setting.device
    k = torch.full((count,), 50, device=device)
    p = torch.full((count,), 0.9, dtype=torch.float64, device=device)
    none = torch.zeros(count, device=device)

    def cut_by_sort() -> Tensor:
        return draw_reference.find_cuts_by_sort(probs, k, p, none)[:, 0]

    yield Case(
        *("top-k, top-p and min-p", f"{count} x {probs.shape[1]}", lambda: draw.find_cuts(probs, k, p, none)),
        *(cut_by_sort, 0, probs.numel() * 4),
        rivals={"sort": lambda: probs.sort(descending=True)},
    )


def draw_cases(setting: Setting) -> Iterator[Case]:
    probs = _probs(setting)
    seeds, positions = torch.randint(0, 2**62, (len(probs),)), torch.arange(len(probs))
    on_device = seeds.to(setting.device), positions.to(setting.device)

    def draw_by_reference() -> Tensor:
        return draw_reference.draw(probs, seeds.numpy().view("uint64"), positions.numpy())[0]

    yield Case(
        *("draw", f"{len(probs)} x {probs.shape[1]}", lambda: draw.draw(probs, *on_device)[0], draw_by_reference),
        *(0, probs.numel() * 4),
    )


def rejection_cases(setting: Setting) -> Iterator[Case]:
    yield _rejection(setting.device, *((6, 256) if setting.tiny else (256, 128_000)))


def _rejection(device: torch.device, count: int, size: int) -> Case:
    """Half of the drafts were drawn from a distribution near the model's, the others are sure."""
    logits = torch.randn(count, size, device=device).mul(3)
    probs, q = logits.softmax(-1), (logits + torch.randn_like(logits)).softmax(-1)
    drafts, draft_rows = q.multinomial(1)[:, 0], torch.arange(count, device=device)
    draft_rows[::2] = -1
    seeds, positions = torch.randint(0, 2**62, (count,)), torch.arange(count)
    on_device = seeds.to(device), positions.to(device)

    def oracle() -> Tensor:
        by_host = Rejection(lambda row, place: None if row % 2 == 0 else q[row])
        everything = positions.numpy()
        pick = by_host(drafts.cpu().numpy(), everything, everything * 0)
        return pick(probs.clone(), seeds.numpy().view("uint64"), everything, everything)[0]

    def call() -> Tensor:
        return draw.reject(probs, drafts, q, draft_rows, *on_device)[0]

    return Case("rejection sampling", f"{count} x {size}", call, oracle, 0, probs.numel() * (4 + 2))


# One for each Triton kernel of minivllm.kernels.table: a test compares the names.
CASES: dict[str, Callable[[Setting], Iterator[Case]]] = {
    "decode attention": decode_cases,
    "prefill attention": prefill_cases,
    "cache write": write_cases,
    "cache write in 8 bits": write_codes_cases,
    "rope + norm + cache write": rope_cases,
    "rope + norm + write in 8 bits": rope_codes_cases,
    "block copy": copy_cases,
    "draw": draw_cases,
    "top-k, top-p and min-p": cut_cases,
    "rejection sampling": rejection_cases,
    "lora": lora_cases,
    "w4a16 linear": w4a16_cases,
    "layer of experts": experts_cases,
    "gather inputs": gather_tokens_cases,
    "gather rows": gather_rows_cases,
    "staged writes": staged_cases,
    "rms norm": norm_cases,
    "silu mul": silu_cases,
}
