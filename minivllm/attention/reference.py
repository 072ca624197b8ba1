"""The oracle: attention over the paged cache as the textbook writes it, one request at a time, on any device.

Slow on purpose. It gathers a request's tokens by its block table, computes scores in float32 (or float64), masks by
absolute position, and never touches a slot that the request does not own. Every other backend is tested against it.

Its metadata is tensors alone, so on a CPU it can be part of a recorded call (compile/graphs.py); of a GPU's graph it
cannot, as it reads lengths on the host.

Cache layout: [2 (K, V), num_blocks, block_size, kv_heads, head_size]. In 8 bits each head has its scale, four bytes,
behind its codes (quantised_kv.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from minivllm.attention.base import NHD, AttentionSpec, KVSpec, check_layers
from minivllm.attention.quantised_kv import HALVES, QUANTISED, SCALE_BYTES, pack, unpack
from minivllm.attention.rows import send
from minivllm.kv_groups import first_kept

if TYPE_CHECKING:
    from minivllm.batch import InputBatch


class Meta(NamedTuple):
    slots: Tensor  # [padded T] int64
    query_start: Tensor  # [R + 1]: a request's query rows
    seq_lens: Tensor  # [R]
    tables: Tensor  # [R, blocks] int64
    num_tokens: int


def columns_of(batch: InputBatch, device: torch.device) -> Meta:
    arrays = batch.slot_mapping, batch.query_start, batch.seq_lens, batch.block_tables
    return Meta(*(send(x, torch.int64, device) for x in arrays), batch.num_tokens)


class ReferenceAttention:
    adds_slopes: ClassVar[bool] = True
    kv_layout: ClassVar[str] = NHD
    kv_dtypes: ClassVar[frozenset[torch.dtype]] = QUANTISED | HALVES
    host_tables: ClassVar[bool] = False
    block_axis: ClassVar[int] = 1

    def __init__(
        self,
        layers: list[AttentionSpec],
        spec: KVSpec,
        num_blocks: int,
        device: torch.device,
        compute_dtype: torch.dtype = torch.float32,
    ):
        check_layers(layers, spec)
        self.spec = spec
        self.block_size = spec.block_size
        self.device = torch.device(device)
        self.graphs: Literal["none", "uniform"] = "uniform" if self.device.type == "cpu" else "none"
        self.compute_dtype = compute_dtype

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        more = SCALE_BYTES if self.spec.dtype in QUANTISED else 0
        return (2, num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_size + more)

    def prepare(self, batch: InputBatch) -> Meta:
        return columns_of(batch, self.device)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: Meta, layer: AttentionSpec, out: Tensor
    ) -> None:
        kv = kv.view(torch.uint8) if self.spec.dtype in QUANTISED else kv
        keys, values = kv.flatten(1, 2)  # each [slots, kv_heads, head_size], or what is kept of a head
        keys[meta.slots] = self._kept(k)
        values[meta.slots] = self._kept(v)
        bounds = meta.query_start.tolist()
        for r, seq_len in enumerate(meta.seq_lens.tolist()):
            rows = slice(bounds[r], bounds[r + 1])
            # Blocks that have left the window are somebody else's.
            first = first_kept(seq_len - (rows.stop - rows.start), layer.sliding_window, self.block_size)
            blocks, num_keys = meta.tables[r, first : -(-seq_len // self.block_size)], seq_len - first * self.block_size
            request_keys, request_values = self._numbers(kv[:, blocks].flatten(1, 2)[:, :num_keys])
            out[rows] = attend_dense(q[rows].to(self.compute_dtype), request_keys, request_values, layer).to(out.dtype)
        out[meta.num_tokens :] = 0  # padding rows: nobody reads them, but they pass through the layers that follow

    def _kept(self, x: Tensor) -> Tensor:
        return pack(x, self.spec.dtype) if self.spec.dtype in QUANTISED else x.to(self.spec.dtype)

    def _numbers(self, kept: Tensor) -> Tensor:
        kind, dtype = self.spec.dtype, self.compute_dtype
        return unpack(kept, kind, dtype) if kind in QUANTISED else kept.to(dtype)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, layer: AttentionSpec) -> Tensor:
    """The queries are the last of the keys' positions. q [n, heads, D], k and v [L, kv_heads, D] -> [n, heads, D]."""
    group = layer.num_heads // layer.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [L, heads, D]
    scores = torch.einsum("nhd,lhd->hnl", q, k) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if layer.slopes is not None:
        slopes = torch.tensor(layer.slopes, dtype=scores.dtype, device=scores.device)
        scores = scores + slopes[:, None, None] * distances(q.shape[0], k.shape[0], q.device)
    scores = scores.masked_fill(~visible(q.shape[0], k.shape[0], layer.sliding_window, q.device), -torch.inf)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v)


def distances(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """[num_queries, num_keys] int64: by how many positions each key lies behind each query, the last ones."""
    key = torch.arange(num_keys, device=device)
    return key - key[num_keys - num_queries :, None]


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """[num_queries, num_keys] bool: causal, and within the sliding window. The queries are the last positions."""
    key = torch.arange(num_keys, device=device)
    query = key[num_keys - num_queries :, None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
