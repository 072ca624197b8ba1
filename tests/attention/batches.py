"""Random batches for attention backends, and the dense float64 oracle that knows no blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec, KVSpec
from minivllm.batch import InputBatch
from minivllm.kernels.reference import quantise_heads
from minivllm.kv_groups import first_kept

CPU = torch.device("cpu")
MASKED_KEYS_ARE_READ = {"FlashBackend", "FlashInferBackend", "FlexBackend"}  # with weight 0, and so must be finite


def spec(num_heads=6, num_kv_heads=2, head_size=16, window=None, soft_cap=None, slopes=None) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, head_size, 1 / math.sqrt(head_size), window, soft_cap, slopes)


def quantised(x: Tensor) -> Tensor:
    """x [n, heads, D] through 8 bits and a scale for each token and head: the reference of kernels/cpu's quantise()."""
    largest = x.float().abs().amax(-1, keepdim=True)
    limit = torch.full_like(largest, 127)  # a number / a tensor would multiply by the reciprocal
    inverse = torch.where(largest > 0, limit / largest, 0)
    return torch.round(x.float() * inverse) * (largest / limit)


def on_device(batch: InputBatch, device: torch.device) -> InputBatch:
    """As a builder makes it whose tables are there."""
    names = "token_ids", "positions", "slot_mapping", "block_tables"
    return replace(batch, **{name: torch.from_numpy(getattr(batch, name).copy()).to(device) for name in names})


@dataclass
class Case:
    """Requests as (tokens computed earlier, tokens of this step), each with its whole q, k and v."""

    spec: AttentionSpec
    requests: list[tuple[int, int]]
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    shuffle: bool = True  # block ids in random order; False: consecutive ones
    padding: int = 0  # dummy token rows at the end
    spare_columns: int = 0  # by which the block table is wider than needed
    seed: int = 0
    kv_dtype: torch.dtype | None = None  # of the cache; None: dtype
    device: torch.device | None = None  # where the columns are that a builder may have there; None: they are numpy's

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.qkv = [self._draw(sum(request), generator) for request in self.requests]
        counts = [-(-sum(request) // self.block_size) for request in self.requests]
        self.num_blocks = sum(counts) + 3  # some that no request owns
        ids = np.random.default_rng(self.seed).permutation(self.num_blocks) if self.shuffle else np.arange(sum(counts))
        self.tables = np.zeros((len(counts), max(counts) + self.spare_columns), np.int32)
        for r, count in enumerate(counts):
            self.tables[r, :count] = ids[sum(counts[:r]) :][:count]

    def _draw(self, num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        shapes = [(num_tokens, n, self.spec.head_size) for n in heads]
        return tuple(torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)

    def slots(self, r: int, begin: int, end: int) -> np.ndarray:
        """Where the request's positions begin : end lie in the cache."""
        positions = np.arange(begin, end)
        return self.tables[r, positions // self.block_size] * self.block_size + positions % self.block_size

    def batch(self, spans: dict[int, tuple[int, int]], padding: int = 0) -> InputBatch:
        """The step that computes positions begin : end of each request r in spans."""
        spare = self.num_blocks * self.block_size
        slots = [self.slots(r, *span) for r, span in spans.items()]
        positions = [np.arange(*span) for span in spans.values()]
        num_tokens = sum(map(len, slots))
        query_start = np.cumsum([0] + [end - begin for begin, end in spans.values()]).astype(np.int32)
        batch = InputBatch(
            req_ids=[str(r) for r in spans],
            rows=np.array(list(spans)),
            token_ids=np.zeros(num_tokens + padding, np.int64),
            positions=np.concatenate([*positions, np.zeros(padding, np.int64)]),
            slot_mapping=np.concatenate([*slots, spare + np.arange(padding) % self.block_size]),
            query_start=query_start,
            seq_lens=np.array([end for _, end in spans.values()], np.int32),
            block_tables=self.tables[list(spans)],
            sample_tokens=query_start[1:].astype(np.int64) - 1,
            sample_requests=np.arange(len(spans)),
            draft_tokens=np.full(len(spans), -1),
            num_tokens=num_tokens,
            max_query=int(np.diff(query_start).max()),
            max_seq=max(end for _, end in spans.values()),
        )
        return batch if self.device is None else on_device(batch, self.device)

    def inputs(self, spans: dict[int, tuple[int, int]], padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of those positions; padding rows are NaN."""
        parts = []
        for i in range(3):
            rows = torch.cat([self.qkv[r][i][begin:end] for r, (begin, end) in spans.items()])
            parts.append(torch.cat([rows, torch.full_like(rows[:1], torch.nan).expand(padding, -1, -1)]))
        return tuple(parts)

    @property
    def now(self) -> dict[int, tuple[int, int]]:
        return {r: (computed, computed + new) for r, (computed, new) in enumerate(self.requests)}

    @property
    def kv_spec(self) -> KVSpec:
        dtype = self.kv_dtype or self.dtype
        return KVSpec(1, self.spec.num_kv_heads, self.spec.head_size, self.block_size, dtype)

    def kept(self, x: Tensor) -> Tensor:
        """K or V [n, heads, D] as the cache gives it back."""
        if self.kv_dtype == torch.float8_e4m3fn:
            codes, scales = quantise_heads(x, self.kv_dtype)
            return codes.float() * scales[..., None]
        return quantised(x) if self.kv_dtype == torch.int8 else x.to(self.kv_spec.dtype)

    @property
    def writing(self) -> AttentionSpec:
        """A layer whose K and V lie as spec's do, and whose queries see themselves alone: writing is all its work."""
        return replace(self.spec, sliding_window=1)

    def cache(self, backend, writer=None) -> Tensor:
        """A cache that is NaN wherever no request has written, and holds what was computed earlier: as `backend` wrote
        it, or a `writer` of its class for the layer `writing`. Blocks that have left the window are given away: to a
        request whose numbers are NaN, which nobody else may notice."""
        dtype = self.kv_spec.dtype
        empty = -1 if dtype == torch.int8 else torch.nan  # four bytes of -1 are a scale of NaN
        kv = torch.full(backend.kv_shape(self.num_blocks + 1), empty, dtype=dtype)
        earlier = {r: (0, computed) for r, (computed, _) in enumerate(self.requests) if computed}
        kinds = getattr(backend, "kinds", (type(backend),))  # of a pair, both
        if earlier:
            q, k, v = self.inputs(earlier)
            layer = self.spec if writer is None else self.writing
            writer = writer or backend
            writer.forward(q, k, v, kv, writer.prepare(self.batch(earlier)), layer, torch.empty_like(q))
        for r, (computed, _) in enumerate(self.requests):
            for block in self.tables[r, : first_kept(computed, self.spec.sliding_window, self.block_size)]:
                theirs = kv.select(backend.block_axis, int(block))
                if MASKED_KEYS_ARE_READ.intersection(kind.__name__ for kind in kinds):
                    theirs.fill_(100)
                else:
                    theirs.view(torch.uint8).fill_(255)
        return kv

    def run(self, backend, kv: Tensor | None = None) -> Tensor:
        """[padded T, heads, head_size]: one step over all requests."""
        kv = self.cache(backend) if kv is None else kv
        q, k, v = self.inputs(self.now, self.padding)
        out = torch.full_like(q, torch.nan)
        backend.forward(q, k, v, kv, backend.prepare(self.batch(self.now, self.padding)), self.spec, out)
        return out

    def expected(self) -> Tensor:
        """[T, heads, head_size] float64, query by query."""
        spans = zip(self.qkv, self.now.values(), strict=True)
        return torch.cat([self._expected(q, self.kept(k), self.kept(v), *span) for (q, k, v), span in spans])

    def _expected(self, q: Tensor, k: Tensor, v: Tensor, begin: int, end: int) -> Tensor:
        group = self.spec.num_heads // self.spec.num_kv_heads
        k, v = k.double().permute(1, 2, 0), v.double().transpose(0, 1)  # [h, D, L], [h, L, D]
        keys, means = torch.arange(end), []
        for positions in torch.arange(begin, end).split(64):
            queries = q[positions].double().unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [h, group, n, D]
            distance = positions[:, None] - keys
            scores = self.spec.scale * (queries @ k[:, None, :, :end])
            if self.spec.soft_cap is not None:
                scores = self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)
            if self.spec.slopes is not None:
                scores -= torch.tensor(self.spec.slopes, dtype=torch.float64).view(*scores.shape[:2], 1, 1) * distance
            seen = (distance >= 0) & (distance < (self.spec.sliding_window or math.inf))
            means.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, None, :end])  # [h, group, n, D]
        return torch.cat(means, 2).permute(2, 0, 1, 3).flatten(1, 2)
