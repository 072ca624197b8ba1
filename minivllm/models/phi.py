"""Phi 1, 1.5 and 2 (Microsoft 2023): attention and MLP side by side, of one norm; the first part of each head is
rotated; the LM head has a bias."""

from __future__ import annotations

from typing import Any

from torch import nn

from minivllm.models.checkpoint import WeightMap
from minivllm.models.classic import ClassicDecoder, OneNormLayer, gguf_config, plain, qkv
from minivllm.models.classic_config import ClassicSpec, read_classic, renamed, rotated
from minivllm.models.gguf import GGUF_ENDS, GGUF_LAYER, GGUFNames, Metadata
from minivllm.models.spec import ConfigReader

DEFAULTS = {  # PhiConfig's
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PART = 0.5  # of a head, that is rotated where the config does not say


def read_config(reader: ConfigReader, architecture: str) -> ClassicSpec:
    reader = renamed(reader, {}, DEFAULTS)
    if reader.config.get("qk_layernorm"):
        raise reader.fail("qk_layernorm is not supported: no published Phi 1 or 2 has it")
    biases = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_bias": True}
    return read_classic(reader, architecture, **biases, **rotated(reader, PART))


ENDS = {"model.embed_tokens": "embedding", "model.final_layernorm": "norm", "lm_head": "lm_head"}
LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.dense": "attention.o",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
}


def gguf_of(about: Metadata) -> dict[str, Any]:
    config = gguf_config(about)
    part = about.get("rope.dimension_count", int, config["head_dim"]) / config["head_dim"]
    own = {"architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_act": "gelu_new"}
    return config | own | {"rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": part}}


GGUF = GGUFNames(
    gguf_of,
    top=GGUF_ENDS | {"output_norm": "model.final_layernorm"},
    layer=GGUF_LAYER | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    heads=lambda about, config: {},
)


class PhiModel(ClassicDecoder):
    @staticmethod
    def weights_of(spec: ClassicSpec) -> WeightMap:
        return WeightMap(plain(ENDS), plain(LAYER) | qkv("self_attn.{}_proj"))

    def layer_of(self, spec: ClassicSpec) -> type[nn.Module]:
        return OneNormLayer
