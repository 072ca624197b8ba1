"""Granite 3 and 4's dense decoder (IBM 2024): Llama's, whose embeddings, scores, residuals and logits are multiplied by
numbers of the config (as muP has them, Yang et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from minivllm.models.decoder_config import DecoderSpec, only_silu, read_decoder
from minivllm.models.gguf import (
    GGUF_ENDS,
    GGUF_LAYER,
    NUMBER,
    GGUFNames,
    Metadata,
    decoder_config,
    heads_of_llama,
)
from minivllm.models.rope_decoder import PreNormLayer, RopeDecoder
from minivllm.models.spec import ConfigReader

DEFAULTS = {  # GraniteConfig's
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read_config(reader: ConfigReader, architecture: str) -> DecoderSpec:
    only_silu(reader)
    return read_decoder(reader, architecture, DEFAULTS, **scales(reader))


def scales(reader: ConfigReader) -> dict[str, float]:
    """By the fields of DecoderSpec."""

    def positive(field: str) -> float:
        return DEFAULTS[field] if reader.config.get(field) is None else reader.positive(field)

    return {
        "scale": positive("attention_multiplier"),
        "embedding_scale": positive("embedding_multiplier"),
        "residual_scale": positive("residual_multiplier"),
        "logit_scale": 1 / positive("logits_scaling"),
    }


def gguf_config(about: Metadata) -> dict[str, Any]:
    return decoder_config(about) | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "rope_parameters": about.rope_parameters(),
        "hidden_act": "silu",
        **gguf_scales(about),
    }


def gguf_scales(about: Metadata) -> dict[str, float]:
    return {
        "attention_multiplier": about.need("attention.scale", NUMBER),
        "embedding_multiplier": about.get("embedding_scale", NUMBER, 1.0),
        "residual_multiplier": about.get("residual_scale", NUMBER, 1.0),
        "logits_scaling": about.need("logit_scale", NUMBER),
    }


GGUF = GGUFNames(
    gguf_config, top=GGUF_ENDS, layer=GGUF_LAYER | {"ffn_norm": "post_attention_layernorm"}, heads=heads_of_llama
)


class GraniteLayer(PreNormLayer):
    norms = PreNormLayer.norms

    def __init__(self, spec: DecoderSpec, *how):
        super().__init__(spec, *how)
        self.residual_scale = spec.residual_scale

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotate) * self.residual_scale
        return x + self.mlp(self.mlp_norm(x)) * self.residual_scale


class GraniteModel(RopeDecoder):
    layer = GraniteLayer
