"""OLMo (Groeneveld et al. 2024): LayerNorm without weights, and q, k and v cut off at a number of the config."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.layers.linear import QuantMethod
from minivllm.layers.rotary import Rotation
from minivllm.models.decoder import Attention
from minivllm.models.decoder_config import DecoderSpec, only_silu, read_decoder
from minivllm.models.rope_decoder import PreNormLayer, RopeDecoder
from minivllm.models.spec import ConfigReader
from minivllm.parallel.group import Ranks

DEFAULTS = {"eos_token_id": 50_279}  # OlmoConfig's


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoSpec(DecoderSpec):
    clip: float | None  # q, k and v lie between -clip and clip


def read_config(reader: ConfigReader, architecture: str) -> OlmoSpec:
    only_silu(reader)
    clip = None if reader.config.get("clip_qkv") is None else reader.positive("clip_qkv")
    return read_decoder(reader, architecture, DEFAULTS, OlmoSpec, clip=clip, norm_eps=1e-5, mlp_bias=False)


class WeightlessNorm(nn.Module):
    """LayerNorm's, in fp32 and rounded once."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.shape, self.eps = (size,), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.shape, None, None, self.eps).to(x.dtype)


class ClippedAttention(Attention):
    def __init__(self, spec: OlmoSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        bias = {"qkv_bias": spec.qkv_bias, "o_bias": spec.o_bias}
        super().__init__(spec, index, dtype, method, ranks, **bias, make_norm=None)
        self.clip = spec.clip

    def forward(self, x: Tensor, rotate: Rotation) -> Tensor:
        qkv = self.qkv(x).clamp_(-self.clip, self.clip).view(x.shape[0], -1, self.head_size)
        return self.o(self.mix(self, qkv, rotate).flatten(1))


class OlmoLayer(PreNormLayer):
    def make_norm(self, spec: DecoderSpec, dtype: torch.dtype) -> nn.Module:
        return WeightlessNorm(spec.hidden_size, spec.norm_eps)

    def make_attention(
        self, spec: OlmoSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks
    ) -> Attention:
        if spec.clip is None:
            return super().make_attention(spec, index, dtype, method, ranks)
        return ClippedAttention(spec, index, dtype, method, ranks)


class OlmoModel(RopeDecoder):
    layer = OlmoLayer

    def make_norm(self, spec: DecoderSpec, dtype: torch.dtype) -> nn.Module:
        return WeightlessNorm(spec.hidden_size, spec.norm_eps)
