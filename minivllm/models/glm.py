"""GLM-4 (GLM Team 2024), as transformers has it: Llama's network with gate and up in one matrix, and neighbours rotated
in the first half of each head. GLM-4-0414 has norms behind its sublayers too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from minivllm.models.decoder_config import DecoderSpec, only_silu, read_decoder
from minivllm.models.rope_decoder import FUSED_GATE_UP, WEIGHTS, PreNormLayer, RopeDecoder
from minivllm.models.spec import ConfigReader

DEFAULTS = {  # GlmConfig's and Glm4Config's
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
}
GLM_WEIGHTS = replace(WEIGHTS, fused=FUSED_GATE_UP)
BEHIND = {
    "post_self_attn_layernorm": ("attention_post_norm", ""),
    "post_mlp_layernorm": ("mlp_post_norm", ""),
}
GLM4_WEIGHTS = replace(GLM_WEIGHTS, layer={**GLM_WEIGHTS.layer, **BEHIND})


def read_config(reader: ConfigReader, architecture: str) -> DecoderSpec:
    only_silu(reader)
    return read_decoder(reader, architecture, DEFAULTS, o_bias=False, mlp_bias=False)


class GlmModel(RopeDecoder):
    weights_of = staticmethod(lambda spec: GLM_WEIGHTS)
    interleaved = True


class Glm4Layer(PreNormLayer):
    norms = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), rotate))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


class Glm4Model(GlmModel):
    weights_of = staticmethod(lambda spec: GLM4_WEIGHTS)
    layer = Glm4Layer
