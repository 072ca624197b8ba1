"""Multi-head latent attention over the paged cache: the oracle of its backends.

Of a token the cache has one vector c, of which K and V of every head are made, and one key that turns with the position
and that all heads share (DeepSeek-V2, 2024, section 2.1). Scores and results can be computed in two ways, which are
equal but for rounding, as (W_k^T q) . c = q . (W_k c):

    expanded   make K and V of each head of all cached tokens, then attend as ever
    absorbed   multiply W_k into the queries and W_v into the results: all heads attend over the vectors themselves

With n queries over L tokens the first costs L * expansion + n * L * (head_size + value_size) products a head, the
second n * expansion + n * L * (2 * rank + rope_size), where the expansion of one vector costs rank * (nope_size +
value_size). So a request is computed in the way that multiplies less: prompts expanded, decodes absorbed, a short chunk
behind a long context absorbed too.

Slow on purpose, one request at a time, in float32 (or float64). Cache layout: [1, num_blocks, block_size, rank +
rope_size], which counts blocks where [2 (K, V), num_blocks, ...] does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec, KVSpec
from minivllm.attention.quantised_kv import HALVES
from minivllm.attention.reference import Meta, attend_dense, columns_of, visible
from minivllm.kv_groups import Latent

if TYPE_CHECKING:
    from minivllm.batch import InputBatch

LATENT_LAYOUT = "latent"


def check_latent(layers: list[AttentionSpec], spec: KVSpec) -> None:
    """What every backend of latent layers builds on: no windows, caps or slopes, layers that all fit the cache."""
    for layer in layers:
        assert layer.latent is not None and layer.num_heads == layer.num_kv_heads, layer
        assert layer.sliding_window is None and layer.soft_cap is None and layer.slopes is None and layer.causal, layer
        assert (spec.vectors, spec.num_kv_heads, spec.head_size) == (1, 1, layer.latent.size), (layer, spec)


def latent_of(layer: AttentionSpec) -> Latent:
    assert layer.latent is not None, layer
    return layer.latent


class LatentReference:
    kv_layout: ClassVar[str] = LATENT_LAYOUT
    kv_dtypes: ClassVar[frozenset[torch.dtype]] = HALVES
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
        check_latent(layers, spec)
        self.spec, self.device, self.compute_dtype = spec, torch.device(device), compute_dtype
        self.graphs: Literal["none", "uniform"] = "uniform" if self.device.type == "cpu" else "none"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (1, num_blocks, self.spec.block_size, self.spec.head_size)

    def prepare(self, batch: InputBatch) -> Meta:
        return columns_of(batch, self.device)

    def forward(
        self, q: Tensor, latent: Tensor, expand: Tensor, kv: Tensor, meta: Meta, layer: AttentionSpec, out: Tensor
    ) -> None:
        blocks, size = kv[0], self.spec.block_size  # [num_blocks, block_size, rank + rope_size]
        blocks.flatten(0, 1)[meta.slots] = latent.to(kv.dtype)
        expand, bounds = expand.to(self.compute_dtype), meta.query_start.tolist()
        for r, seq_len in enumerate(meta.seq_lens.tolist()):
            rows = slice(bounds[r], bounds[r + 1])
            kept = blocks[meta.tables[r, : -(-seq_len // size)]].flatten(0, 1)[:seq_len].to(self.compute_dtype)
            attend = attend_absorbed if absorbs(rows.stop - rows.start, seq_len, expand, layer) else attend_expanded
            out[rows] = attend(q[rows].to(self.compute_dtype), kept, expand, layer).to(out.dtype)
        out[meta.num_tokens :] = 0  # padding rows: nobody reads them, but they pass through the layers that follow


def absorbs(num_queries: int, num_keys: int, expand: Tensor, layer: AttentionSpec) -> bool:
    """Whether the absorbed form takes fewer multiplications of such a request. expand: as forward()'s."""
    latent, expansion = latent_of(layer), expand.shape[1] * expand.shape[2]
    value_size = expand.shape[1] - (layer.head_size - latent.rope_size)
    expanded = num_keys * expansion + num_queries * num_keys * (layer.head_size + value_size)
    absorbed = num_queries * expansion + num_queries * num_keys * (latent.size + latent.rank)
    return absorbed < expanded


def attend_expanded(q: Tensor, kept: Tensor, expand: Tensor, layer: AttentionSpec) -> Tensor:
    """The queries are the last of the kept tokens. q [n, heads, head_size], kept [L, rank + rope_size] -> [n, heads,
    value_size]."""
    rank, rope_size = latent_of(layer)
    k, v = torch.einsum("lr,hdr->lhd", kept[:, :rank], expand).tensor_split([layer.head_size - rope_size], -1)
    turned = kept[:, None, rank:].expand(-1, layer.num_heads, -1)
    return attend_dense(q, torch.cat((k, turned), -1), v, layer)


def attend_absorbed(q: Tensor, kept: Tensor, expand: Tensor, layer: AttentionSpec) -> Tensor:
    """As attend_expanded."""
    rank, rope_size = latent_of(layer)
    own, turned = q.tensor_split([layer.head_size - rope_size], -1)
    to_k, to_v = expand.tensor_split([layer.head_size - rope_size], 1)  # each [heads, size, rank]
    absorbed = torch.cat((torch.einsum("nhd,hdr->nhr", own, to_k), turned), -1)  # [n, heads, rank + rope_size]
    scores = torch.einsum("nhr,lr->hnl", absorbed, kept) * layer.scale
    scores = scores.masked_fill(~visible(q.shape[0], kept.shape[0], None, q.device), -torch.inf)
    mixed = torch.einsum("hnl,lr->nhr", scores.softmax(-1), kept[:, :rank])
    return torch.einsum("nhr,hvr->nhv", mixed, to_v)
