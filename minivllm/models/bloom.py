"""BLOOM (Le Scao et al. 2022): no positions but ALiBi's in the scores, and a norm behind the embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minivllm.layers.norm import LayerNorm
from minivllm.models.classic import ByKVHead, ClassicDecoder, PackedWeights, Rotate, SequentialLayer, plain, qkv
from minivllm.models.classic_config import ClassicSpec, read_classic, renamed
from minivllm.models.spec import ConfigReader
from minivllm.parallel.group import Ranks

NAMES = {
    "hidden_size": "n_embed",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "layer_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "seq_length",
}
DEFAULTS = {  # BloomConfig's
    "vocab_size": 250880,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,  # that published models were trained on: nothing ends there
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "gelu_new",  # of every model: no config says it
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomSpec(ClassicSpec):
    adds_normed: bool  # what a sublayer gives is added to its norm of x, and not to x


def read_config(reader: ConfigReader, architecture: str) -> BloomSpec:
    reader = renamed(reader, NAMES, DEFAULTS)
    return read_classic(
        reader,
        architecture,
        BloomSpec,
        intermediate_size=4 * reader.need("hidden_size"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        alibi=1.0,
        adds_normed=bool(reader.config.get("apply_residual_connection_post_layernorm", False)),
    )


ENDS = {
    "transformer.word_embeddings": "embedding",
    "transformer.word_embeddings_layernorm": "embedding_norm",
    "transformer.ln_f": "norm",
    "lm_head": "lm_head",
}
LAYER = {
    "input_layernorm": "attention_norm",
    "self_attention.dense": "attention.o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}


class NormedSumLayer(SequentialLayer):
    def forward(self, x: Tensor, rotate: Rotate) -> Tensor:
        x = self.attention_norm(x)
        x = self.mlp_norm(x + self.attention(x, rotate))
        return x + self.mlp(x)


class BloomModel(ClassicDecoder):
    @staticmethod
    def weights_of(spec: BloomSpec) -> PackedWeights:
        return PackedWeights(
            plain(ENDS),
            plain(LAYER) | qkv("self_attention.query_key_value.{}"),
            "transformer.h",
            prefix="transformer.",
            qkv="query_key_value",
            split=ByKVHead(spec.num_heads, spec.num_kv_heads),
        )

    def layer_of(self, spec: BloomSpec) -> type[nn.Module]:
        return NormedSumLayer if spec.adds_normed else SequentialLayer

    def make_embeddings(self, spec: BloomSpec, dtype: torch.dtype, ranks: Ranks) -> None:
        super().make_embeddings(spec, dtype, ranks)
        if ranks.placement.is_first_stage:
            self.embedding_norm = LayerNorm(spec.hidden_size, spec.norm_eps, dtype)

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.embedding_norm(x)
