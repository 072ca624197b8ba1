"""The frame of decoders that are Llama's with differences: one rotary embedding for all layers, both ends, and what is
done to logits. A family's file says what its layer is, its norms and its weights.

A layer takes (x, rotate) as Llama's does; where its model has layers without positions (NoPE), `rotate` leaves q and k
alone. As every network here it is a function of (x, positions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.layers import sharded
from minivllm.layers.experts import SparseMLP, experts_of
from minivllm.layers.linear import QuantMethod
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import PairedRotaryEmbedding, RotaryEmbedding, unturned
from minivllm.models.checkpoint import WeightMap
from minivllm.models.decoder import (
    ATTENTION_WEIGHTS,
    ENDS,
    MLP,
    MLP_WEIGHTS,
    Attention,
    Decoder,
    attention_layers,
    make_lm_head,
)
from minivllm.models.decoder_config import DecoderSpec
from minivllm.parallel.group import ONE_DEVICE, Ranks

WEIGHTS = WeightMap(ENDS, ATTENTION_WEIGHTS | {"post_attention_layernorm": ("mlp_norm", "")} | MLP_WEIGHTS)

# Of checkpoints that keep a layer's q, k and v as one matrix, and its MLP's gate and up.
FUSED_QKV = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
FUSED_GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}


class PreNormLayer(nn.Module):
    """Llama's order. A family overrides what differs."""

    norms: ClassVar = ("attention_norm", "mlp_norm", None, None)  # of LayerDescription
    qk_norm: Callable[[int, int], nn.Module] | None = None

    def __init__(self, spec: DecoderSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        self.is_rotated = spec.rotated[index] if spec.rotated else True
        for name in filter(None, self.norms):
            setattr(self, name, self.make_norm(spec, dtype))
        self.attention = self.make_attention(spec, index, dtype, method, ranks)
        self.mlp = self.make_mlp(spec, index, dtype, method, ranks)

    def make_norm(self, spec: DecoderSpec, dtype: torch.dtype) -> nn.Module:
        return RMSNorm(spec.hidden_size, spec.norm_eps, dtype)

    def make_attention(
        self, spec: DecoderSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks
    ) -> nn.Module:
        return Attention(spec, index, dtype, method, ranks, qkv_bias=spec.qkv_bias, o_bias=spec.o_bias, make_norm=None)

    def make_mlp(
        self, spec: DecoderSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks
    ) -> MLP | SparseMLP:
        return MLP(spec, dtype, method, ranks, activation="silu", bias=spec.mlp_bias)

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotate)
        return x + self.mlp(self.mlp_norm(x))


class RopeDecoder(Decoder):
    weights_of: Callable[[DecoderSpec], WeightMap] = staticmethod(lambda spec: WEIGHTS)
    layer: type[nn.Module] = PreNormLayer
    interleaved = False  # whether a rotation's pairs are neighbours, and not of two halves

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        super().__init__(spec, dtype, device, ranks, self.weights_of(spec), self.attention_of(spec, ranks))
        self.embedding_scale = spec.embedding_scale
        method = self.linear_method
        with device:
            self.embedding = sharded.first_of_stage(ranks, spec.vocab_size, spec.hidden_size, dtype)
            self.rotary = self.make_rotary(spec, dtype)
            self.layers = self.make_layers(lambda i: self.layer(spec, i, dtype, method, ranks))
            self.norm = sharded.last_of_stage(ranks, self.make_norm(spec, dtype))
            self.lm_head = make_lm_head(spec, self.embedding, dtype, method, ranks)

    @staticmethod
    def attention_of(spec: DecoderSpec, ranks: Ranks) -> list[AttentionSpec]:
        return attention_layers(spec, ranks.placement, spec.scale, spec.score_cap)

    def make_rotary(self, spec: DecoderSpec, dtype: torch.dtype) -> nn.Module:
        if spec.rotated and not any(spec.rotated):
            return nn.Identity()  # of whose answer no layer asks
        if spec.rotary_size == spec.head_size and not self.interleaved:
            return RotaryEmbedding(spec.rope, spec.head_size, spec.max_position, dtype)
        sizes = spec.rotary_size, spec.head_size, spec.max_position
        return PairedRotaryEmbedding(spec.rope, *sizes, dtype, interleaved=self.interleaved)

    def make_norm(self, spec: DecoderSpec, dtype: torch.dtype) -> nn.Module:
        return RMSNorm(spec.hidden_size, spec.norm_eps, dtype)

    def embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T] int64 -> x [T, hidden], in `out` if that is given."""
        x = self.embedding(token_ids, out)
        return x.mul_(self.embedding_scale) if self.embedding_scale != 1 and self.placement.is_first_stage else x

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden], positions [T] int64 -> hidden [T, hidden], the final norm applied."""
        rotations = unturned, self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rotations[layer.is_rotated])
        return self.norm(x)

    def rotary_of(self, layer: nn.Module) -> nn.Module | None:
        """None: it rotates nothing."""
        return self.rotary if layer.is_rotated else None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> [S, vocab] in fp32."""
        logits, cap = self.lm_head(hidden), self.spec.logit_cap
        if self.spec.logit_scale != 1:
            logits = logits * self.spec.logit_scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def capture_unsupported_reason(self) -> str | None:
        """Why no capture may hold a whole forward, or None."""
        return next((why for experts in experts_of(self) if (why := experts.products.capture_unsupported_reason)), None)
