"""Latent attention on a CPU: what is absorbed by a kernel in C++ that reads the pages where they lie (kernels/cpu),
what is expanded by torch's fused attention over K and V that are made for the call. Which form a request gets is
latent.py's rule, whose reference this is held to; pages lie as there.

Products with the expansion are in the model's dtype, as all others of its layers; scores and sums in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.base import AttentionSpec, KVSpec
from minivllm.attention.latent import LATENT_LAYOUT, absorbs, check_latent, latent_of
from minivllm.attention.quantised_kv import HALVES
from minivllm.attention.reference import visible
from minivllm.kernels.cpu import latent as kernel

if TYPE_CHECKING:
    from minivllm.batch import InputBatch


class _Absorbed(NamedTuple):
    """Queries of some requests, one after the other."""

    rows: Tensor  # [n] int64
    owners: np.ndarray  # [n] int32: the request of each
    limits: np.ndarray  # [n] int32: how many tokens it sees


class _Step:
    """A step's tables, and how its requests are divided, which the layers' sizes decide: of all alike."""

    def __init__(self, batch: InputBatch):
        count = batch.num_requests
        self.bounds = batch.query_start[: count + 1].astype(np.int64)
        self.seq_lens = batch.seq_lens[:count].astype(np.int64)
        self.tables = np.ascontiguousarray(batch.block_tables[:count], np.int32)
        self.slots = torch.from_numpy(np.array(batch.slot_mapping, np.int64))
        self.num_tokens = batch.num_tokens
        self._parts: dict[tuple, tuple[_Absorbed, list[int]]] = {}

    def parts(self, expand: Tensor, layer: AttentionSpec) -> tuple[_Absorbed, list[int]]:
        """The absorbed queries, and the requests that are expanded."""
        key = layer, expand.shape
        if key not in self._parts:
            counts = np.diff(self.bounds).tolist()
            is_absorbed = [
                absorbs(n, length, expand, layer) for n, length in zip(counts, self.seq_lens.tolist(), strict=True)
            ]
            absorbed = [r for r, yes in enumerate(is_absorbed) if yes]
            self._parts[key] = self._absorbed(absorbed), [r for r, yes in enumerate(is_absorbed) if not yes]
        return self._parts[key]

    def _absorbed(self, requests: list[int]) -> _Absorbed:
        rows = [np.arange(self.bounds[r], self.bounds[r + 1]) for r in requests]
        ends = [self.seq_lens[r] - self.bounds[r + 1] + 1 + own for r, own in zip(requests, rows, strict=True)]
        owners = np.repeat(requests, [len(own) for own in rows]).astype(np.int32)
        whole = np.concatenate([*rows, np.zeros(0, np.int64)])
        limits = np.concatenate([*ends, np.zeros(0, np.int64)]).astype(np.int32)
        return _Absorbed(torch.from_numpy(whole), owners, limits)


class LatentCPU:
    graphs: ClassVar[Literal["none", "decode", "uniform", "any"]] = "none"
    kv_layout: ClassVar[str] = LATENT_LAYOUT
    kv_dtypes: ClassVar[frozenset[torch.dtype]] = HALVES
    host_tables: ClassVar[bool] = True
    block_axis: ClassVar[int] = 1

    def __init__(self, layers: list[AttentionSpec], spec: KVSpec, num_blocks: int, device: torch.device):
        check_latent(layers, spec)
        self.spec = spec

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"its kernels run on a CPU, not on {device.type}"
        return kernel.unsupported_reason()

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (1, num_blocks, self.spec.block_size, self.spec.head_size)

    def prepare(self, batch: InputBatch) -> _Step:
        return _Step(batch)

    def forward(
        self, q: Tensor, latent: Tensor, expand: Tensor, kv: Tensor, meta: _Step, layer: AttentionSpec, out: Tensor
    ) -> None:
        kv[0].flatten(0, 1)[meta.slots] = latent.to(kv.dtype)
        absorbed, expanded = meta.parts(expand, layer)
        if len(absorbed.rows):
            out[absorbed.rows] = self._absorb(q[absorbed.rows], expand, kv[0], meta, absorbed, layer)
        for r in expanded:
            rows, length = slice(*meta.bounds[r : r + 2].tolist()), int(meta.seq_lens[r])
            blocks = torch.from_numpy(meta.tables[r, : -(-length // self.spec.block_size)].astype(np.int64))
            kept = kv[0][blocks].flatten(0, 1)[:length].to(q.dtype)
            out[rows] = _expand(q[rows], kept, expand, layer)
        out[meta.num_tokens :] = 0  # padding rows: nobody reads them, but they pass through the layers that follow

    def _absorb(
        self, q: Tensor, expand: Tensor, cache: Tensor, step: _Step, queries: _Absorbed, layer: AttentionSpec
    ) -> Tensor:
        """q [n, heads, head_size] -> [n, heads, value_size]"""
        rank, rope_size = latent_of(layer)
        nope_size = layer.head_size - rope_size
        own, turned = q.transpose(0, 1).tensor_split([nope_size], -1)  # each [heads, n, size]
        to_k, to_v = expand.tensor_split([nope_size], 1)  # each [heads, size, rank]
        wanted = torch.cat((torch.bmm(own, to_k), turned), -1).transpose(0, 1).float().contiguous()
        mixed = kernel.attend(wanted, cache, step.tables, queries.owners, queries.limits, rank, layer.scale)
        return torch.bmm(mixed.to(q.dtype).transpose(0, 1), to_v.transpose(1, 2)).transpose(0, 1)


def _expand(q: Tensor, kept: Tensor, expand: Tensor, layer: AttentionSpec) -> Tensor:
    """The queries are the last of the kept tokens. q [n, heads, head_size], kept [L, rank + rope_size] -> [n, heads,
    value_size]."""
    rank, rope_size = latent_of(layer)
    nope_size, heads = layer.head_size - rope_size, layer.num_heads
    both = F.linear(kept[:, :rank], expand.flatten(0, 1)).unflatten(1, (heads, -1))  # [L, heads, nope + value]
    k = torch.cat((both[..., :nope_size], kept[:, None, rank:].expand(-1, heads, -1)), -1)
    v, value_size = both[..., nope_size:], both.shape[-1] - nope_size
    v = F.pad(v, (0, max(0, layer.head_size - value_size)))  # as wide as K: else torch writes all scores to memory
    is_whole = len(q) == len(kept)
    mask = None if is_whole else visible(len(q), len(kept), None, q.device)
    views = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # each [1, heads, tokens, size]
    result = F.scaled_dot_product_attention(*views, attn_mask=mask, is_causal=is_whole, scale=layer.scale)
    return result[0].transpose(0, 1)[..., :value_size]
