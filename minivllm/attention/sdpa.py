"""Paged attention out of stock torch operators: gather, multiply, softmax, multiply. For the CPU, with no compiler.

Decodes of many requests are one batched matrix product over copied blocks; all query heads of a KV head are the rows of
one small matrix, so that K and V are never repeated. Prefills run one request at a time, tile by tile. sdpa_plan
decides what is read, in which groups, under which masks.

What measurements decided (bench/attention.py times a layer; SmolLM2's shape in bf16 on 2 cores, 32 decodes):
- baddbmm + softmax + bmm beats F.scaled_dot_product_attention, and by far where that gets query heads unpacked: the
  fused kernel multiplies per (request, head), too little work a call. It wins below FUSED_KEYS.
- A long prompt is faster in products of 128 queries than in the fused kernel, which gains nothing from bf16. In float32
  the kernel is as fast or faster, and is used.
- The gather from memory takes longer than the arithmetic: rows of one block and head are slower to copy than one piece.
  Larger blocks (kv.block_size=32) make it faster.
- Cache layout [2 (K, V), kv_heads, num_blocks, block_size, head_size]: head first, so that what is copied is a batch of
  matrices as it lies, and consecutive blocks are a view.
- Scores round to the cache's dtype, as in transformers' eager attention: on SmolLM2 in bf16 the logits are as far from
  float32's as with the fused kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.base import AttentionSpec, KVSpec, check_layers
from minivllm.attention.quantised_kv import MODELS_OWN
from minivllm.attention.reference import distances
from minivllm.attention.rows import send
from minivllm.attention.sdpa_plan import Decodes, Planner, Prefill, View

if TYPE_CHECKING:
    from minivllm.batch import InputBatch


class _Meta(NamedTuple):
    slots: Tensor  # [padded T] int64
    num_tokens: int
    views: dict[AttentionSpec, View]


class SDPAAttention:
    adds_slopes: ClassVar[bool] = True
    graphs: ClassVar[Literal["none", "decode", "uniform", "any"]] = "none"
    kv_layout: ClassVar[str] = "heads first"
    kv_dtypes: ClassVar[frozenset[torch.dtype]] = MODELS_OWN
    host_tables: ClassVar[bool] = True
    block_axis: ClassVar[int] = 2

    def __init__(self, layers: list[AttentionSpec], spec: KVSpec, num_blocks: int, device: torch.device):
        check_layers(layers, spec)
        self.specs = list(dict.fromkeys(layers))
        self.spec = spec
        self.device = torch.device(device)
        self.matmul_dtype = matmul_dtype(spec.dtype, self.device)
        self.zero = torch.zeros((), dtype=self.matmul_dtype, device=self.device)
        self.slopes = {spec: torch.tensor(spec.slopes, device=device) for spec in self.specs if spec.slopes is not None}
        self.planner = Planner(spec.block_size, num_blocks, spec.dtype, self.matmul_dtype, self.device)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, self.spec.num_kv_heads, num_blocks, self.spec.block_size, self.spec.head_size)

    def prepare(self, batch: InputBatch) -> _Meta:
        slots = send(batch.slot_mapping, torch.int64, self.device)
        return _Meta(slots, batch.num_tokens, {spec: self.planner.view(spec, batch) for spec in self.specs})

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: _Meta, layer: AttentionSpec, out: Tensor
    ) -> None:
        keys, values = kv.flatten(2, 3)  # each [kv_heads, slots, head_size]
        keys.index_copy_(1, meta.slots, k.transpose(0, 1))
        values.index_copy_(1, meta.slots, v.transpose(0, 1))
        view = meta.views[layer]
        for decodes in view.decodes:
            self._decode(q, kv, decodes, layer, out)
        for prefill in view.prefills:
            self._prefill(q, k, v, kv, prefill, layer, out)
        if out.shape[0] > meta.num_tokens:  # nobody reads padding rows, but they pass through the layers that follow
            out[meta.num_tokens :].zero_()

    def _decode(self, q: Tensor, kv: Tensor, decodes: Decodes, layer: AttentionSpec, out: Tensor) -> None:
        whole = isinstance(decodes.rows, slice)
        queries = q[decodes.rows] if whole else q.index_select(0, decodes.rows)
        queries = queries.reshape(decodes.num_requests, layer.num_kv_heads, -1, layer.head_size)  # [.., group, D]
        keys, values = decodes.source.read(kv)
        if decodes.holes is not None:
            decodes.source.dense.view(-1, layer.head_size).index_fill_(0, decodes.holes, 0)
        if decodes.fused:
            result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=decodes.bias, scale=layer.scale)
        else:
            keys, values = self._matrices(keys), self._matrices(values)
            scores = self._scores(queries.flatten(0, 1), keys, layer, decodes.bias)
            if decodes.distances is not None:
                slopes = self.slopes[layer].view(layer.num_kv_heads, -1, 1)
                by_request = scores.float().unflatten(0, (-1, layer.num_kv_heads))  # [requests, kv_heads, group, L]
                scores = by_request.addcmul_(slopes, decodes.distances[:, None, None]).flatten(0, 1)
            result = self._mean(scores, values)
        result = result.view(decodes.num_requests, -1, layer.head_size)
        if whole:
            out[decodes.rows] = result
        else:
            out.index_copy_(0, decodes.rows, result.to(out.dtype))

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, prefill: Prefill, layer: AttentionSpec, out: Tensor
    ) -> None:
        if prefill.source is None:
            keys, values = (x[prefill.rows].transpose(0, 1)[None] for x in (k, v))
        else:
            keys, values = prefill.source.read(kv)
        keys, values = (x.narrow(2, prefill.first, prefill.num_keys) for x in (keys, values))  # [1, kv_heads, L, D]
        attend = self._fused_tile if prefill.fused else self._tile
        for rows, seen, mask in prefill.tiles:
            queries = q[rows].transpose(0, 1)  # [heads, n, D]
            out[rows] = attend(queries, keys[:, :, seen], values[:, :, seen], mask, layer).transpose(0, 1)

    def _fused_tile(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: AttentionSpec) -> Tensor:
        """q [heads, n, D], k and v [1, kv_heads, L, D] -> [heads, n, D]"""
        grouped = layer.num_heads != layer.num_kv_heads
        return F.scaled_dot_product_attention(
            q[None], k, v, attn_mask=mask, is_causal=mask is None, scale=layer.scale, enable_gqa=grouped
        )[0]

    def _tile(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, layer: AttentionSpec) -> Tensor:
        """The same as products: the group's query heads are rows of one matrix."""
        packed = q.reshape(layer.num_kv_heads, -1, layer.head_size)  # [kv_heads, group * n, D]
        scores = self._scores(packed, self._matrices(k), layer)
        if layer.slopes is not None:
            scores = scores.float()
        by_query = scores.view(layer.num_heads, q.shape[1], -1)  # [heads, n, L]
        if layer.slopes is not None:
            by_query.addcmul_(self.slopes[layer][:, None, None], distances(*by_query.shape[1:], self.device))
        by_query[:, :, by_query.shape[2] - mask.shape[1] :].add_(mask)
        return self._mean(scores, self._matrices(v)).view(q.shape)

    def _matrices(self, x: Tensor) -> Tensor:
        """[requests, kv_heads, L, D] -> [requests * kv_heads, L, D], dense: oneDNN is slow to close gaps in a batch."""
        return x.flatten(0, 1).to(self.matmul_dtype).contiguous()

    def _scores(self, q: Tensor, k: Tensor, layer: AttentionSpec, bias: Tensor | None = None) -> Tensor:
        """q [B, M, D], k [B, L, D], bias broadcast to [B, M, L] -> [B, M, L]"""
        q = q.to(self.matmul_dtype)
        if layer.soft_cap is not None:
            scores = torch.baddbmm(self.zero, q, k.transpose(1, 2), beta=0, alpha=layer.scale / layer.soft_cap)
            scores = scores.float().tanh_().mul_(layer.soft_cap)
            return scores if bias is None else scores.add_(bias)
        if bias is None:
            return torch.baddbmm(self.zero, q, k.transpose(1, 2), beta=0, alpha=layer.scale)
        return torch.baddbmm(bias, q, k.transpose(1, 2), alpha=layer.scale)

    def _mean(self, scores: Tensor, v: Tensor) -> Tensor:
        """Values weighted by the scores' softmax: [B, M, L], [B, L, D] -> [B, M, D]"""
        return torch.bmm(scores.softmax(-1).to(v.dtype), v)


def matmul_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of matrix products. Where oneDNN has none for 16 bits, torch's loops are far slower than float32."""
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    if not torch.backends.mkldnn.is_available():
        return torch.float32
    ops = torch.ops.mkldnn
    supported = {torch.bfloat16: ops._is_mkldnn_bf16_supported, torch.float16: ops._is_mkldnn_fp16_supported}
    return dtype if supported[dtype]() else torch.float32
