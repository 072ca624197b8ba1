"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP side by side, of one norm; in the first part of each head
neighbours are rotated; the LM head has a bias."""

from __future__ import annotations

from torch import nn

from minivllm.models.classic import ClassicDecoder, OneNormLayer, PackedWeights, plain, qkv
from minivllm.models.classic_config import ClassicSpec, read_classic, renamed
from minivllm.models.spec import ConfigReader, RopeSpec

NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}
DEFAULTS = {  # GPTJConfig's
    "vocab_size": 50400,
    "hidden_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "rotary_dim": 64,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}


def read_config(reader: ConfigReader, architecture: str) -> ClassicSpec:
    reader = renamed(reader, NAMES, DEFAULTS)
    size = reader.need("rotary_dim")
    head_size = reader.need("hidden_size") // reader.need("num_attention_heads")
    if size % 2 or size > head_size:
        raise reader.fail(f"rotary_dim asks to rotate {size} of {head_size} elements of a head")
    biases = {"qkv_bias": False, "o_bias": False, "mlp_bias": True, "head_bias": True}
    return read_classic(reader, architecture, **biases, rope=RopeSpec(), rotary_size=size)


ENDS = {"transformer.wte": "embedding", "transformer.ln_f": "norm", "lm_head": "lm_head"}
LAYER = {
    "ln_1": "attention_norm",
    "attn.out_proj": "attention.o",
    "mlp.fc_in": "mlp.up",
    "mlp.fc_out": "mlp.down",
}


class GPTJModel(ClassicDecoder):
    interleaved = True

    @staticmethod
    def weights_of(spec: ClassicSpec) -> PackedWeights:
        return PackedWeights(
            plain(ENDS),
            plain(LAYER) | qkv("attn.{}_proj"),
            "transformer.h",
            prefix="transformer.",
            masks=("attn",),
        )

    def layer_of(self, spec: ClassicSpec) -> type[nn.Module]:
        return OneNormLayer
