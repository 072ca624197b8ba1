"""Whether an attention backend gives the reference's answer on a device: asked at start, before `auto` takes it.

Both get the same random steps, each with a cache of its own: chunks of prompts, a batch of decodes, chunks and a
prompt, a batch of short decodes, and one long request alone. So a decode is computed whole and in splits, queries begin
within a block, and keys leave a window. Memory that nobody wrote is NaN.

What it costs: the layer's shape, the cache's dtype and the tiles are those that will serve, so a kernel that is
compiled here is one that the first requests would wait for (the decode whole and split, and the prefill; for layers
with a window once more). Its own memory is what a layer's K and V of some 500 tokens take, and a window's tokens more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import AttentionBackend, AttentionSpec, KVSpec
from minivllm.attention.reference import ReferenceAttention
from minivllm.batch import InputBatch

CHUNK = 64  # queries; the reference keeps a score for each of them and each key
TILES = 3 * 64 + 5  # tokens: several tiles of keys, the last one not full
LONGEST_WINDOW = 4096  # a longer one hides nothing in this proof

Spans = dict[int, tuple[int, int]]  # request -> positions begin : end that a step computes


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """As derived in tests/tolerances.py for attention over normal numbers."""
    unit = torch.finfo(dtype).eps / 2
    return {"atol": 2e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 12 * unit, "rtol": 2 * unit}


def gives_the_references_answer(
    kind: type[AttentionBackend],
    layers: Sequence[AttentionSpec],
    spec: KVSpec,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """layers: each kind of them is tried. spec: of the cache; dtype: the model's. Raises what the backend raises."""
    spec = replace(spec, num_layers=1, beside=0)
    return all(_agrees(kind, layer, spec, dtype, device) for layer in dict.fromkeys(layers))


@torch.inference_mode()
def _agrees(
    kind: type[AttentionBackend], layer: AttentionSpec, spec: KVSpec, dtype: torch.dtype, device: torch.device
) -> bool:
    requests = _Requests(layer, spec.block_size)
    backends = [a_kind([layer], spec, requests.num_blocks, device) for a_kind in (kind, ReferenceAttention)]
    caches = [_poisoned(backend.kv_shape(requests.num_blocks), spec.dtype, device) for backend in backends]
    generator = torch.Generator().manual_seed(0)
    for spans in requests.steps():
        batch = requests.batch(spans)
        q, k, v = (
            torch.randn(batch.num_tokens, heads, layer.head_size, generator=generator).to(device, dtype)
            for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        )
        outputs = [torch.full_like(q, torch.nan), torch.full_like(q, torch.nan, dtype=torch.float32)]
        for backend, kv, out in zip(backends, caches, outputs, strict=True):
            backend.forward(q, k, v, kv, backend.prepare(batch), layer, out)
        if not torch.allclose(outputs[0].float(), outputs[1], **tolerance(dtype)):
            return False
    return True


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """All bits set: NaN in every floating-point dtype, and in the scales of codes."""
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), -1, dtype=torch.int8, device=device).view(dtype)


class _Requests:
    """What is computed, in which steps and which blocks."""

    def __init__(self, layer: AttentionSpec, block_size: int):
        self.block_size = block_size
        longest = min(layer.sliding_window or 0, LONGEST_WINDOW) + TILES
        # (tokens computed in chunks, new ones of the mixed batch)
        self.sizes = [(longest, 1), (0, 1), (20, 1), (block_size - 1, 1), (block_size, 1), (64, 1), (70, 19), (0, 33)]
        counts = [-(-(earlier + new + 1) // block_size) for earlier, new in self.sizes]
        self.num_blocks = sum(counts) + 1  # and one that nobody owns
        ids = np.random.default_rng(0).permutation(self.num_blocks).astype(np.int32)
        self.tables = np.zeros((len(counts), max(counts)), np.int32)
        for r, count in enumerate(counts):
            self.tables[r, :count] = ids[sum(counts[:r]) :][:count]

    def steps(self) -> Iterator[Spans]:
        for begin in range(0, self.sizes[0][0], CHUNK):
            ends = {r: min(begin + CHUNK, earlier) for r, (earlier, _) in enumerate(self.sizes)}
            yield {r: (begin, end) for r, end in ends.items() if end > begin}
        yield {r: (earlier, earlier + new) for r, (earlier, new) in enumerate(self.sizes)}
        after = [sum(size) for size in self.sizes]
        for together in ((1, 2), (0,)):
            yield {r: (after[r], after[r] + 1) for r in together}

    def batch(self, spans: Spans) -> InputBatch:
        rows = np.array(list(spans))
        positions = np.concatenate([np.arange(begin, end) for begin, end in spans.values()])
        query_start = np.cumsum([0] + [end - begin for begin, end in spans.values()]).astype(np.int32)
        tables, owners = self.tables[rows], np.repeat(np.arange(len(rows)), np.diff(query_start))
        slots = tables[owners, positions // self.block_size].astype(np.int64) * self.block_size
        seq_lens = np.array([end for _, end in spans.values()], np.int32)
        return InputBatch(
            req_ids=[str(r) for r in spans],
            rows=rows,
            token_ids=np.zeros(len(positions), np.int64),
            positions=positions,
            slot_mapping=slots + positions % self.block_size,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=tables,
            sample_tokens=query_start[1:].astype(np.int64) - 1,
            sample_requests=np.arange(len(rows)),
            draft_tokens=np.full(len(rows), -1),
            num_tokens=len(positions),
            max_query=int(np.diff(query_start).max()),
            max_seq=int(seq_lens.max()),
        )
