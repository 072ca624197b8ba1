"""GPT-2 (Radford et al. 2019): LayerNorm before each sublayer, learnt positions, matrices as [n_in, n_out]."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minivllm.attention.base import AttentionSpec
from minivllm.models.classic import ClassicDecoder, InTurn, PackedWeights, plain, qkv
from minivllm.models.classic_config import ClassicSpec, read_classic, renamed
from minivllm.models.decoder import attention_layers
from minivllm.models.spec import ConfigReader
from minivllm.parallel.placement import Placement

NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}
DEFAULTS = {  # GPT2Config's
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Spec(ClassicSpec):
    scaled_by_size: bool  # scores are divided by the root of the head size
    scaled_by_layer: bool  # and by the number of the layer, the first one's 1


def read_config(reader: ConfigReader, architecture: str) -> GPT2Spec:
    reader = renamed(reader, NAMES, DEFAULTS)
    if reader.config.get("add_cross_attention"):
        raise reader.fail("add_cross_attention is not supported: there is no encoder whose states could be read")
    return read_classic(
        reader,
        architecture,
        GPT2Spec,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        num_positions=reader.need("max_position_embeddings"),
        scaled_by_size=bool(reader.config.get("scale_attn_weights", True)),
        scaled_by_layer=bool(reader.config.get("scale_attn_by_inverse_layer_idx", False)),
    )


LAYER = {
    "ln_1": "attention_norm",
    "attn.c_proj": "attention.o",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
ENDS = {
    "transformer.wte": "embedding",
    "transformer.wpe": "position",
    "transformer.ln_f": "norm",
    "lm_head": "lm_head",
}


class GPT2Model(ClassicDecoder):
    @staticmethod
    def weights_of(spec: GPT2Spec) -> PackedWeights:
        return PackedWeights(
            plain(ENDS),
            plain(LAYER) | qkv("attn.c_attn.{}"),
            "transformer.h",
            prefix="transformer.",
            turned=frozenset(("c_attn", "c_proj", "c_fc")),
            qkv="c_attn",
            split=InTurn(spec.num_heads, spec.num_kv_heads),
            masks=("attn",),
        )

    def attention_of(self, spec: GPT2Spec, at: Placement) -> list[AttentionSpec]:
        layers = attention_layers(spec, at, spec.head_size**-0.5 if spec.scaled_by_size else 1.0)
        if not spec.scaled_by_layer:
            return layers
        first = at.layers(spec.num_layers).start
        return [replace(layer, scale=layer.scale / (first + i + 1)) for i, layer in enumerate(layers)]
