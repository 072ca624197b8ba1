"""StarCoder2 (Lozhkov et al. 2024): LayerNorm before each sublayer, rotated heads, few heads of K and V, and a window
in every layer or in none."""

from __future__ import annotations

from typing import Any

from minivllm.models.checkpoint import WeightMap
from minivllm.models.classic import ClassicDecoder, gguf_config, plain, qkv
from minivllm.models.classic_config import ClassicSpec, read_classic, renamed, rotated
from minivllm.models.gguf import GGUF_ENDS, GGUF_LAYER, GGUFNames, Metadata
from minivllm.models.spec import ConfigReader

DEFAULTS = {  # Starcoder2Config's
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}


def read_config(reader: ConfigReader, architecture: str) -> ClassicSpec:
    reader = renamed(reader, {"layer_norm_eps": "norm_epsilon"}, DEFAULTS)
    bias = bool(reader.config.get("use_bias", True))
    return read_classic(reader, architecture, qkv_bias=bias, o_bias=bias, mlp_bias=bias, **rotated(reader))


ENDS = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "lm_head"}
LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.o_proj": "attention.o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}


def gguf_of(about: Metadata) -> dict[str, Any]:
    """As llama.cpp computes it: a file says nothing of a window."""
    config = gguf_config(about)
    own = {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}
    return config | own | {"norm_epsilon": config["layer_norm_eps"], "use_bias": config["attention_bias"]}


GGUF = GGUFNames(
    gguf_of,
    top=GGUF_ENDS,
    layer=GGUF_LAYER | {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    heads=lambda about, config: {},
)


class Starcoder2Model(ClassicDecoder):
    @staticmethod
    def weights_of(spec: ClassicSpec) -> WeightMap:
        return WeightMap(plain(ENDS), plain(LAYER) | qkv("self_attn.{}_proj"))
