"""Command R (Cohere 2024) and Command R7B (2025): attention and MLP take the same norm of x and are added together
(a parallel block); LayerNorm without bias; rotations of neighbours; logits are scaled. In R7B three of four layers see
a window, and the fourth sees everything without positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.layers import sharded
from minivllm.layers.linear import QuantMethod, empty_parameter
from minivllm.models.decoder import Attention
from minivllm.models.decoder_config import DecoderSpec, only_silu, read_decoder
from minivllm.models.rope_decoder import WEIGHTS, PreNormLayer, RopeDecoder
from minivllm.models.spec import FULL, SLIDING, ConfigReader
from minivllm.parallel.group import Ranks

DEFAULTS = {  # CohereConfig's and Cohere2Config's
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
    "bos_token_id": 5,
    "eos_token_id": 255_001,
}
PATTERN = 4  # Cohere2Config's: every fourth layer sees everything
DEFAULT_WINDOW = 4096
COHERE_WEIGHTS = replace(WEIGHTS, layer={k: v for k, v in WEIGHTS.layer.items() if k != "post_attention_layernorm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereSpec(DecoderSpec):
    qk_norm: bool


def read_config(reader: ConfigReader, architecture: str) -> CohereSpec:
    only_silu(reader)
    reader = replace(reader, config={**DEFAULTS, **reader.config})
    if is_first := architecture == "CohereForCausalLM":
        reader = replace(reader, config={"rope_theta": 500_000.0, **reader.config})
    own = {"qk_norm": _asks_for_norms(reader)} if is_first else _alternating(reader)
    return read_decoder(
        reader,
        architecture,
        DEFAULTS,
        CohereSpec,
        norm_eps=reader.positive("layer_norm_eps", 1e-5),
        logit_scale=reader.positive("logit_scale"),
        mlp_bias=False,
        **own,
    )


def _asks_for_norms(reader: ConfigReader) -> bool:
    return bool(reader.config.get("use_qk_norm", False))


def _alternating(reader: ConfigReader) -> dict[str, Any]:
    """What Cohere2 has beside."""
    if _asks_for_norms(reader):
        raise reader.fail("use_qk_norm is not supported in a Cohere2ForCausalLM")
    every = reader.optional("sliding_window_pattern", PATTERN)
    types = [SLIDING if (i + 1) % every else FULL for i in range(reader.num_layers())]
    window = reader.optional("sliding_window", DEFAULT_WINDOW)
    windows = reader.windows(types, window)
    return {"qk_norm": False, "windows": windows, "rotated": tuple(own is not None for own in windows)}


class Norm(nn.Module):
    """LayerNorm without bias, in fp32 and rounded once. Of the last dimension of x [..., *shape]: each head's."""

    def __init__(self, *shape: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight, self.eps = empty_parameter(*shape, dtype=dtype), eps

    def forward(self, x: Tensor) -> Tensor:
        return (F.layer_norm(x.float(), x.shape[-1:], None, None, self.eps) * self.weight.float()).to(x.dtype)


class HeadNorms(Norm):
    """Of the heads of q and k, each with weights of its own [heads + kv_heads, head_size]."""

    def __init__(self, spec: CohereSpec, dtype: torch.dtype, ranks: Ranks):
        at = ranks.placement
        spans = {"q": at.part(spec.num_heads), "k": at.kv_heads(spec.num_kv_heads)}
        heads = spans["q"].size
        super().__init__(heads + spans["k"].size, spec.head_size, eps=spec.norm_eps, dtype=dtype)
        self.rows = {"q": slice(0, heads), "k": slice(heads, None)}
        self.shards = sharded.shards_of(ranks, spans)


class CohereLayer(PreNormLayer):
    def __init__(self, *how):
        super().__init__(*how)
        del self.mlp_norm  # the MLP takes what attention takes

    def make_norm(self, spec: DecoderSpec, dtype: torch.dtype) -> nn.Module:
        return Norm(spec.hidden_size, eps=spec.norm_eps, dtype=dtype)

    def make_attention(
        self, spec: CohereSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks
    ) -> Attention:
        norms = HeadNorms(spec, dtype, ranks) if spec.qk_norm else nn.Identity()
        bias = {"qkv_bias": spec.qkv_bias, "o_bias": spec.o_bias}
        return Attention(spec, index, dtype, method, ranks, **bias, make_norm=lambda *_: norms)

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        normed = self.attention_norm(x)
        return x + self.attention(normed, rotate) + self.mlp(normed)


class CohereModel(RopeDecoder):
    weights_of = staticmethod(lambda spec: COHERE_WEIGHTS)
    layer = CohereLayer
    interleaved = True

    def make_norm(self, spec: DecoderSpec, dtype: torch.dtype) -> nn.Module:
        return Norm(spec.hidden_size, eps=spec.norm_eps, dtype=dtype)
