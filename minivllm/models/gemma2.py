"""Gemma 2 (Gemma Team 2024): Gemma 3's network without norms of q and k, and one rotary base; every other layer sees a
window, and scores and logits are capped: cap * tanh(x / cap)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import ModelError
from minivllm.layers.linear import QuantMethod
from minivllm.models.decoder import MLP
from minivllm.models.decoder_config import DecoderSpec, read_decoder
from minivllm.models.gemma3 import GEMMA_WEIGHTS, Norm
from minivllm.models.gemma3 import GGUF as GEMMA3_NAMES
from minivllm.models.gguf import NUMBER, Metadata, decoder_config
from minivllm.models.rope_decoder import PreNormLayer, RopeDecoder
from minivllm.models.spec import FULL, SLIDING, ConfigReader
from minivllm.parallel.group import ONE_DEVICE, Ranks

DEFAULTS = {  # Gemma2Config's
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def read_config(reader: ConfigReader, architecture: str) -> DecoderSpec:
    reader = replace(reader, config={**DEFAULTS, **reader.config})
    if (act := reader.config["hidden_activation"]) != "gelu_pytorch_tanh":
        raise reader.fail(f'hidden_activation "{act}" is not supported, only "gelu_pytorch_tanh"')
    if reader.config.get("use_bidirectional_attention"):
        raise reader.fail("use_bidirectional_attention is not supported: a token sees those before it")
    return read_decoder(
        reader,
        architecture,
        DEFAULTS,
        types=[FULL if i % 2 else SLIDING for i in range(reader.num_layers())],
        window=reader.need("sliding_window"),
        scale=reader.positive("query_pre_attn_scalar") ** -0.5,
        embedding_scale=reader.need("hidden_size") ** 0.5,
        score_cap=_cap(reader, "attn_logit_softcapping"),
        logit_cap=_cap(reader, "final_logit_softcapping"),
        mlp_bias=False,
    )


def _cap(reader: ConfigReader, field: str) -> float | None:
    return None if reader.config.get(field) is None else reader.positive(field)


def gguf_config(about: Metadata) -> dict[str, Any]:
    """As llama.cpp reads it (src/llama-model.cpp, LLM_ARCH_GEMMA2)."""
    config = decoder_config(about)
    is_27b = config["num_hidden_layers"] == 46  # the scale of scores is in no file: the 27B model's is another one
    return config | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "rope_parameters": about.rope_parameters(),
        "sliding_window": about.get("attention.sliding_window", int, 4096),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_27b
        else config["head_dim"],
        "attn_logit_softcapping": about.get("attn_logit_softcapping", NUMBER, 50.0),
        "final_logit_softcapping": about.get("final_logit_softcapping", NUMBER, 30.0),
        "hidden_activation": "gelu_pytorch_tanh",
    }


GGUF = GEMMA3_NAMES._replace(config=gguf_config)


class Gemma2Layer(PreNormLayer):
    norms = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")

    def make_norm(self, spec: DecoderSpec, dtype: torch.dtype) -> nn.Module:
        return Norm(spec.hidden_size, spec.norm_eps)

    def make_mlp(self, spec: DecoderSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks) -> MLP:
        return MLP(spec, dtype, method, ranks, activation="gelu_tanh", bias=False)

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), rotate))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


class Gemma2Model(RopeDecoder):
    weights_of = staticmethod(lambda spec: GEMMA_WEIGHTS)
    layer = Gemma2Layer

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        if dtype == torch.float16:  # vLLM refuses it too (_FLOAT16_NOT_SUPPORTED_MODELS)
            raise ModelError("Gemma 2's hidden states do not fit float16: take bfloat16 or float32")
        super().__init__(spec, dtype, device, ranks)
        self.embedding_scale = float(torch.tensor(spec.embedding_scale).to(dtype))

    def make_norm(self, spec: DecoderSpec, dtype: torch.dtype) -> nn.Module:
        return Norm(spec.hidden_size, spec.norm_eps)
