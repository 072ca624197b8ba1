"""GPT-NeoX (Black et al. 2022) and Pythia: attention and MLP side by side, each of its own norm; the first part of each
head is rotated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from minivllm.models.classic import (
    ByKVHead,
    ClassicDecoder,
    PackedWeights,
    ParallelLayer,
    SequentialLayer,
    plain,
    qkv,
)
from minivllm.models.classic_config import ClassicSpec, read_classic, renamed, rotated
from minivllm.models.spec import ConfigReader

NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}  # of older configs
DEFAULTS = {  # GPTNeoXConfig's
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
PART = 0.25  # of a head, that is rotated where the config does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTNeoXSpec(ClassicSpec):
    parallel: bool


def read_config(reader: ConfigReader, architecture: str) -> GPTNeoXSpec:
    reader = renamed(reader, NAMES, DEFAULTS)
    bias = bool(reader.config.get("attention_bias", True))
    return read_classic(
        reader,
        architecture,
        GPTNeoXSpec,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        parallel=bool(reader.config.get("use_parallel_residual", True)),
        **rotated(reader, PART),
    )


ENDS = {"gpt_neox.embed_in": "embedding", "gpt_neox.final_layer_norm": "norm", "lm_head": "lm_head"}
LAYER = {
    "input_layernorm": "attention_norm",
    "attention.dense": "attention.o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}


class GPTNeoXModel(ClassicDecoder):
    @staticmethod
    def weights_of(spec: GPTNeoXSpec) -> PackedWeights:
        return PackedWeights(
            plain(ENDS),
            plain(LAYER) | qkv("attention.query_key_value.{}"),
            "gpt_neox.layers",
            prefix="gpt_neox.",
            other_names={"embed_out": "lm_head"},
            qkv="query_key_value",
            split=ByKVHead(spec.num_heads, spec.num_kv_heads),
            masks=("attention",),
        )

    def layer_of(self, spec: GPTNeoXSpec) -> type[nn.Module]:
        return ParallelLayer if spec.parallel else SequentialLayer
