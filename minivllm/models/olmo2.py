"""OLMo 2 (OLMo Team 2025): no norm before a sublayer but one behind it, and one of all of q, and of all of k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minivllm.layers import sharded
from minivllm.layers.linear import QuantMethod
from minivllm.models.decoder import Attention
from minivllm.models.decoder_config import DecoderSpec, only_silu, read_decoder
from minivllm.models.gguf import GGUF_ENDS, GGUF_LAYER, GGUFNames, Metadata, decoder_config
from minivllm.models.rope_decoder import WEIGHTS, PreNormLayer, RopeDecoder
from minivllm.models.spec import ConfigReader
from minivllm.parallel.group import Ranks

DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 50_279}  # Olmo2Config's
BEHIND = {
    "post_attention_layernorm": ("attention_post_norm", ""),
    "post_feedforward_layernorm": ("mlp_post_norm", ""),
}
OLMO2_WEIGHTS = replace(WEIGHTS, layer={**WEIGHTS.layer, **BEHIND})


def read_config(reader: ConfigReader, architecture: str) -> DecoderSpec:
    only_silu(reader)
    return read_decoder(reader, architecture, DEFAULTS, mlp_bias=False)


def gguf_config(about: Metadata) -> dict[str, Any]:
    return decoder_config(about) | {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "rope_parameters": about.rope_parameters(),
        "hidden_act": "silu",
    }


GGUF_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GGUF = GGUFNames(gguf_config, top=GGUF_ENDS, layer=GGUF_LAYER | GGUF_NORMS, heads=lambda about, config: {})


class Olmo2Layer(PreNormLayer):
    norms = (None, None, "attention_post_norm", "mlp_post_norm")

    def make_attention(
        self, spec: DecoderSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks
    ) -> Attention:
        heads = spec.num_heads, spec.num_kv_heads, spec.head_size
        bias = {"qkv_bias": spec.qkv_bias, "o_bias": spec.o_bias}
        norm = sharded.whole_qk_norm(ranks, *heads, spec.norm_eps, dtype)
        return Attention(spec, index, dtype, method, ranks, **bias, make_norm=lambda *_: norm)

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + self.attention_post_norm(self.attention(x, rotate))
        return x + self.mlp_post_norm(self.mlp(x))


class Olmo2Model(RopeDecoder):
    weights_of = staticmethod(lambda spec: OLMO2_WEIGHTS)
    layer = Olmo2Layer
