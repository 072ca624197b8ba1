"""Gemma 3's text decoder (Gemma Team 2025): five layers that see a window to one that sees everything, each kind with a
rotary base of its own; a norm before and one behind each sublayer; GeGLU; embeddings times the root of their size.

Norms multiply by 1 + weight, in fp32, and round once (transformers, modeling_gemma3.py). Soft caps are Gemma 2's, where
a config has them. As every network here it is a function of (x, positions).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.errors import ModelError
from minivllm.layers import sharded
from minivllm.layers.linear import QuantMethod, empty_parameter
from minivllm.layers.norm import QKNorm
from minivllm.layers.rotary import RotaryEmbedding, Rotation
from minivllm.models.checkpoint import WeightMap
from minivllm.models.decoder import (
    ATTENTION_WEIGHTS,
    ENDS,
    MLP,
    MLP_WEIGHTS,
    Attention,
    Decoder,
    attention_layers,
    make_lm_head,
)
from minivllm.models.gemma3_config import Gemma3Spec, read_config
from minivllm.models.gguf import GGUF_ENDS, GGUF_LAYER, NUMBER, GGUFNames, Metadata, decoder_config
from minivllm.models.spec import FULL, SLIDING
from minivllm.parallel.group import ONE_DEVICE, Ranks

__all__ = ["GGUF", "Gemma3Model", "read_config"]

BEHIND_ATTENTION = {
    "post_attention_layernorm": ("attention_post_norm", ""),
    "pre_feedforward_layernorm": ("mlp_norm", ""),
}
BEHIND_MLP = {"post_feedforward_layernorm": ("mlp_post_norm", "")}
GEMMA_WEIGHTS = WeightMap(ENDS, ATTENTION_WEIGHTS | BEHIND_ATTENTION | MLP_WEIGHTS | BEHIND_MLP)


def gguf_config(about: Metadata) -> dict[str, Any]:
    """As llama.cpp reads it (src/llama-model.cpp, LLM_ARCH_GEMMA3)."""
    config = decoder_config(about)
    layers, window = config["num_hidden_layers"], about.get("attention.sliding_window")
    every = about.get("attention.sliding_window_pattern", int, 6)
    local_theta = about.get("rope.freq_base_swa", NUMBER, 10_000.0)
    is_27b = layers == 62  # the scale of scores is in no file: that of the 27B model alone is not the head size's
    of_scale = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "layer_types": [SLIDING if window and (i + 1) % every else FULL for i in range(layers)],
        **({"sliding_window": window} if window else {}),
        "query_pre_attn_scalar": of_scale,
        "rope_parameters": {
            FULL: about.rope_parameters(),
            SLIDING: {"rope_theta": local_theta, "rope_type": "default"},
        },
        "final_logit_softcapping": about.get("final_logit_softcapping", NUMBER) or None,
        "hidden_activation": "gelu_pytorch_tanh",
    }


GGUF_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF = GGUFNames(
    gguf_config,
    top=GGUF_ENDS,
    layer=GGUF_LAYER | GGUF_NORMS,
    heads=lambda about, config: {},
    changes=dict.fromkeys(("attn_norm", "attn_q_norm", "attn_k_norm", *GGUF_NORMS, "output_norm"), "raised"),
)


class Norm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dimension, in fp32 and rounded once."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = empty_parameter(size, dtype=torch.float32)
        self.shape, self.eps = (size,), eps

    def finish(self) -> None:
        self.register_buffer("factor", 1.0 + self.weight.data, persistent=False)

    @property
    def multiplier(self) -> Tensor:
        """[size] float32: what x / rms(x) is multiplied by. Once it is finished."""
        return self.factor

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.shape, self.factor, self.eps).to(x.dtype)


class HeadNorm(QKNorm):
    """The same of each head of q and of k."""

    rounds = False

    def __init__(self, num_heads: int, num_kv_heads: int, head_size: int, eps: float):
        super().__init__(num_heads, num_kv_heads, head_size, eps, torch.float32)

    def finish(self) -> None:
        super().finish()
        self.per_head.add_(1.0)

    def forward(self, qk: Tensor) -> Tensor:
        return super().forward(qk.float()).to(qk.dtype)


class DecoderLayer(nn.Module):
    """index: among the layers of the whole model."""

    norms = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")  # of LayerDescription

    def __init__(self, spec: Gemma3Spec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        size, eps = spec.hidden_size, spec.rms_eps
        self.is_local = spec.windows[index] is not None
        self.attention_norm, self.attention_post_norm = Norm(size, eps), Norm(size, eps)
        make_norm = partial(HeadNorm, head_size=spec.head_size, eps=eps)
        self.attention = Attention(
            spec, index, dtype, method, ranks, qkv_bias=spec.bias, o_bias=spec.bias, make_norm=make_norm
        )
        self.mlp_norm, self.mlp_post_norm = Norm(size, eps), Norm(size, eps)
        self.mlp = MLP(spec, dtype, method, ranks, activation="gelu_tanh", bias=False)

    def forward(self, x: Tensor, rotate: Rotation) -> Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), rotate))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


class Gemma3Model(Decoder):
    def __init__(self, spec: Gemma3Spec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        if dtype == torch.float16:  # vLLM refuses it too (_FLOAT16_NOT_SUPPORTED_MODELS)
            raise ModelError("Gemma 3's hidden states do not fit float16: take bfloat16 or float32")
        attention = attention_layers(spec, ranks.placement, spec.scale, spec.score_cap)
        super().__init__(spec, dtype, device, ranks, GEMMA_WEIGHTS, attention)
        self.embedding_scale = float(torch.tensor(spec.hidden_size**0.5).to(dtype))
        method = self.linear_method
        with device:
            self.embedding = sharded.first_of_stage(ranks, spec.vocab_size, spec.hidden_size, dtype)
            self.rotary = RotaryEmbedding(spec.rope, spec.head_size, spec.max_position, dtype)
            self.local_rotary = RotaryEmbedding(spec.local_rope, spec.head_size, spec.max_position, dtype)
            self.layers = self.make_layers(lambda i: DecoderLayer(spec, i, dtype, method, ranks))
            self.norm = sharded.last_of_stage(ranks, Norm(spec.hidden_size, spec.rms_eps))
            self.lm_head = make_lm_head(spec, self.embedding, dtype, method, ranks)

    def embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T] int64 -> x [T, hidden], in `out` if that is given."""
        x = self.embedding(token_ids, out)
        return x.mul_(self.embedding_scale) if self.placement.is_first_stage else x

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden], positions [T] int64 -> hidden [T, hidden], the final norm applied."""
        rotations = self.rotary(positions), self.local_rotary(positions)
        for layer in self.layers:
            x = layer(x, rotations[layer.is_local])
        return self.norm(x)

    def rotary_of(self, layer: DecoderLayer) -> RotaryEmbedding:
        return self.local_rotary if layer.is_local else self.rotary

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> [S, vocab] in fp32."""
        logits, cap = self.lm_head(hidden), self.spec.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)
