"""Cross attention: a request's tokens read an encoder's output, the same positions for each of its tokens.

K and V of such a layer are made of the encoder's output alone, so they are made once an item (request.Item) and read by
all steps of all requests that name it. An item's are one tensor in each layer, [2 (K, V), kv_heads, positions,
head_size], in a slot of the same number in all of them. A slot has memory while an item is in it: no captured forward
holds its address, since attention is computed aside of captures (compile/context.py). It is never grown, moved or
swapped, and a request that was preempted has its item encoded again if nobody else kept it (scheduler/items.py).

vLLM V1 keeps them in blocks of the common pool (CrossAttentionManager), which take part in none of what blocks are
for: they are all written at once, no prefix is looked up in them and two requests cannot share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.base import AttentionBackend, AttentionSpec, CrossBackend

if TYPE_CHECKING:
    from minivllm.batch import InputBatch


Slots = dict[int, Tensor]  # of one layer: each [2 (K, V), kv_heads, positions, head_size]
FIRST_SLOT = 0  # which is always there


def slot_shape(layer: AttentionSpec) -> tuple[int, ...]:
    """Of a cross layer's K and V of one item."""
    assert layer.cross is not None, layer
    return (2, layer.num_kv_heads, layer.cross, layer.head_size)


class Read(NamedTuple):
    """Token rows first : end of a batch, which read one slot."""

    first: int
    end: int
    slot: int


class CrossReference:
    """The oracle: the textbook's formula, one request at a time, in float32."""

    def prepare(self, batch: InputBatch) -> Sequence[Read]:
        return list(_reads(batch))

    def forward(self, q: Tensor, kv: Slots, meta: Sequence[Read], layer: AttentionSpec, out: Tensor) -> None:
        out.zero_()  # padding rows: nobody reads them, but they pass through the layers that follow
        group = layer.num_heads // layer.num_kv_heads
        for first, end, slot in meta:
            k, v = kv[slot].float().repeat_interleave(group, dim=1)  # each [heads, positions, head_size]
            scores = torch.einsum("nhd,hpd->hnp", q[first:end].float(), k) * layer.scale
            out[first:end] = torch.einsum("hnp,hpd->nhd", scores.softmax(-1), v).to(out.dtype)


class CrossSDPA(CrossReference):
    """A call of torch's fused kernel a request. On a CPU two products: one query in 16 bits takes a quarter of its time
    (bench/LOG.md). K and V of a slot are read where they lie."""

    def forward(self, q: Tensor, kv: Slots, meta: Sequence[Read], layer: AttentionSpec, out: Tensor) -> None:
        attend = _by_products if q.device.type == "cpu" else _fused
        for first, end, slot in meta:
            k, v = kv[slot]
            out[first:end] = attend(q[first:end].transpose(0, 1), k, v, layer).transpose(0, 1)
        out[meta[-1].end :] = 0


def _fused(q: Tensor, k: Tensor, v: Tensor, layer: AttentionSpec) -> Tensor:
    """q [heads, n, head_size], k and v [kv_heads, positions, head_size] -> like q."""
    grouped = layer.num_heads != layer.num_kv_heads
    return F.scaled_dot_product_attention(q[None], k[None], v[None], scale=layer.scale, enable_gqa=grouped)[0]


def _by_products(q: Tensor, k: Tensor, v: Tensor, layer: AttentionSpec) -> Tensor:
    """The same. Heads that share K and V stand as further queries of it."""
    together = q.reshape(layer.num_kv_heads, -1, layer.head_size)
    scores = torch.bmm(together, k.transpose(1, 2)).float().mul_(layer.scale)
    return torch.bmm(scores.softmax(-1).to(v.dtype), v).view_as(q)


def _reads(batch: InputBatch) -> Iterator[Read]:
    assert batch.encoded is not None, "a model with cross attention has a state that says what is read"
    ends = batch.query_start.tolist()
    for i, slot in enumerate(batch.encoded.tolist()):
        yield Read(ends[i], ends[i + 1], slot)


class CrossMeta(NamedTuple):
    attention: Any  # what the backend of the other layers prepared
    cross: Any


class WithCrossAttention:
    """An AttentionBackend for a model's other layers, and a CrossBackend for those of cross attention."""

    def __init__(self, attention: AttentionBackend, cross: CrossBackend):
        self.attention, self.cross = attention, cross
        self.kv_shape, self.block_axis, self.kv_layout = attention.kv_shape, attention.block_axis, attention.kv_layout
        self.kv_dtypes, self.host_tables, self.graphs = attention.kv_dtypes, attention.host_tables, "none"

    def prepare(self, batch: InputBatch) -> CrossMeta:
        return CrossMeta(self.attention.prepare(batch), self.cross.prepare(batch))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Any, meta: CrossMeta, layer: AttentionSpec, out: Tensor
    ) -> None:
        """Of a layer of cross attention k and v are not looked at."""
        if layer.cross is None:
            self.attention.forward(q, k, v, kv, meta.attention, layer, out)
        else:
            self.cross.forward(q, kv, meta.cross, layer, out)
