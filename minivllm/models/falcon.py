"""Falcon (Almazrouei et al. 2023) in its three forms: 7B's (attention and MLP side by side of one norm, one head of K
and V), the new decoder architecture of 40B, 180B and Falcon 2 (groups of heads, two norms or one), and RW's (one after
the other, ALiBi in the place of rotations).

ALiBi's slopes are float32 as in the paper; transformers rounds them, and their products with positions, to bfloat16,
which differs where a model has heads of other slopes than powers of two, or from position 256 on.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from minivllm.models.classic import (
    ByKVHead,
    ClassicDecoder,
    InTurn,
    OneNormLayer,
    PackedWeights,
    ParallelLayer,
    SequentialLayer,
    plain,
    qkv,
)
from minivllm.models.classic_config import ClassicSpec, read_classic, renamed, rotated
from minivllm.models.spec import ConfigReader

NAMES = {  # of configs before they had the usual ones, and of those that never had
    "hidden_size": "n_embed",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "ffn_hidden_size",
    "hidden_act": "activation",
    "layer_norm_eps": "layer_norm_epsilon",
}
DEFAULTS = {  # FalconConfig's
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 11,
    "eos_token_id": 11,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconSpec(ClassicSpec):
    grouped: bool  # the new decoder architecture's groups of heads in a file's matrix
    norms: int  # of a layer; 0: of blocks one after the other, which have two


def read_config(reader: ConfigReader, architecture: str) -> FalconSpec:
    reader = renamed(reader, NAMES, DEFAULTS)
    config, heads = reader.config, reader.need("num_attention_heads")
    grouped, bias, alibi = (bool(config.get(name)) for name in ("new_decoder_architecture", "bias", "alibi"))
    shares = grouped or not config.get("multi_query", True)  # else there is one head of K and V
    return read_classic(
        reader,
        architecture,
        FalconSpec,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        num_kv_heads=(reader.optional("num_kv_heads", heads) if grouped else heads) if shares else 1,
        grouped=shares,
        norms=_norms(reader, grouped),
        alibi=(reader.need("hidden_size") // heads) ** -0.5 if alibi else 0.0,  # scaled as products are
        **({} if alibi else rotated(reader)),
    )


def _norms(reader: ConfigReader, grouped: bool) -> int:
    parallel, asked = reader.config.get("parallel_attn", True), reader.config.get("num_ln_in_parallel_attn")
    if not parallel:
        if grouped:
            raise reader.fail("parallel_attn=false is not supported with new_decoder_architecture=true")
        return 0
    norms = (2 if grouped else 1) if asked is None else asked
    if norms not in (1, 2) or (norms == 2 and not grouped):
        raise reader.fail(f"num_ln_in_parallel_attn={asked!r} is not supported for this architecture")
    return norms


ENDS = {"transformer.word_embeddings": "embedding", "transformer.ln_f": "norm", "lm_head": "lm_head"}
LAYER = {
    "self_attention.dense": "attention.o",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
NORMS = {
    0: {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
    1: {"input_layernorm": "attention_norm"},
    2: {"ln_attn": "attention_norm", "ln_mlp": "mlp_norm"},
}
LAYERS = {0: SequentialLayer, 1: OneNormLayer, 2: ParallelLayer}


class FalconModel(ClassicDecoder):
    @staticmethod
    def weights_of(spec: FalconSpec) -> PackedWeights:
        split = ByKVHead if spec.grouped else InTurn
        return PackedWeights(
            plain(ENDS),
            plain(LAYER | NORMS[spec.norms]) | qkv("self_attention.query_key_value.{}"),
            "transformer.h",
            prefix="transformer.",
            qkv="query_key_value",
            split=split(spec.num_heads, spec.num_kv_heads),
        )

    def layer_of(self, spec: FalconSpec) -> type[nn.Module]:
        return LAYERS[spec.norms]
