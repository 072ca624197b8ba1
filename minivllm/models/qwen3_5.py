"""Qwen 3.5's text decoder (Qwen Team 2026): of four layers three are linear attention, which keeps one state for all
tokens (Gated DeltaNet, Yang et al. 2025), and the fourth is attention, whose answers are gated.

So a request's memory hardly grows with its length. Both kinds stand in one pool of blocks (minivllm/kv_groups.py), and
what a state does with tokens is its backend's (minivllm/attention/state.py). Norms multiply by 1 + weight, as Gemma's.
The text model of the models that see is read too; what they see with is left in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.compile.context import attend, attend_state
from minivllm.layers import sharded
from minivllm.layers.linear import QuantMethod, empty_parameter
from minivllm.layers.norm import RMSNorm
from minivllm.models.checkpoint import WeightMap
from minivllm.models.decoder import ATTENTION_WEIGHTS, ENDS, MLP_WEIGHTS
from minivllm.models.gemma3 import HeadNorm, Norm
from minivllm.models.hybrid import Convolution, HybridDecoder
from minivllm.models.qwen3_5_config import Qwen35Spec, read_config
from minivllm.models.rope_decoder import PreNormLayer
from minivllm.parallel.group import Ranks

__all__ = ["Qwen35Model", "read_config"]

STATE_WEIGHTS = {
    "linear_attn": ("attention", ""),
    "linear_attn.in_proj_qkv": ("attention.qkvz", "qkv"),
    "linear_attn.in_proj_z": ("attention.qkvz", "z"),
    "linear_attn.in_proj_b": ("attention.ba", "b"),
    "linear_attn.in_proj_a": ("attention.ba", "a"),
    "linear_attn.conv1d": ("attention.conv", ""),
    "linear_attn.norm": ("attention.norm", ""),
    "linear_attn.out_proj": ("attention.out", ""),
}
LAYER = ATTENTION_WEIGHTS | STATE_WEIGHTS | {"post_attention_layernorm": ("mlp_norm", "")} | MLP_WEIGHTS
NOT_TEXT = ("model.visual.", "mtp.")  # what it sees with, and layers that guess the token after the next


@dataclass(frozen=True, slots=True)
class TextWeights(WeightMap):
    """Also of files in which the text model is a part."""

    def read(self, tensors: Iterable[tuple[str, Any, Path]]) -> Iterator[tuple[str, Any, Path]]:
        for name, tensor, file in tensors:
            if not name.startswith(NOT_TEXT):
                yield name.replace("model.language_model.", "model.", 1), tensor, file


QWEN_WEIGHTS = TextWeights(ENDS, LAYER)


class GatedAttention(nn.Module):
    """index: among the layers of the whole model. Each query head has a gate of its size beside it."""

    def __init__(self, spec: Qwen35Spec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        at, size, self.head_size = ranks.placement, spec.hidden_size, spec.head_size
        self.index = index - at.layers(spec.num_layers).start
        self.num_heads, self.num_kv_heads = at.part(spec.num_heads).size, at.kv_heads(spec.num_kv_heads).size
        heads = 2 * spec.num_heads, spec.num_kv_heads, spec.head_size
        self.qkv = sharded.qkv_linear(ranks, size, *heads, bias=spec.qkv_bias, dtype=dtype, method=method)
        n_q = spec.num_heads * spec.head_size
        self.o = sharded.row_linear(ranks, n_q, size, bias=spec.o_bias, dtype=dtype, method=method)
        self.qk_norm = HeadNorm(self.num_heads, self.num_kv_heads, spec.head_size, spec.norm_eps)

    def forward(self, x: Tensor, rotate: Any) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_size)  # [T, 2 heads + 2 kv_heads, head_size]
        q_and_gates, k, v = qkv.split([2 * self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        qk = rotate(self.qk_norm(torch.cat((q_and_gates[:, ::2], k), 1)))
        attended = attend(qk[:, : self.num_heads], qk[:, self.num_heads :], v, self.index)
        return self.o((attended * torch.sigmoid(q_and_gates[:, 1::2])).flatten(1))


class LinearAttention(nn.Module):
    """index: among the layers of the whole model."""

    def __init__(self, spec: Qwen35Spec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        size, self.state = spec.hidden_size, spec.state
        heads, values = self.state.num_v_heads, self.state.num_v_heads * self.state.v_size
        self.index = index - ranks.placement.layers(spec.num_layers).start
        linear = partial(sharded.column_linear, ranks, size, bias=False, dtype=dtype, method=method)
        self.qkvz = linear({"qkv": self.state.channels, "z": values})
        self.ba = linear({"b": heads, "a": heads})
        self.conv = Convolution(self.state, bias=False, dtype=dtype)
        self.A_log = empty_parameter(heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(heads, dtype=torch.float32)
        self.norm = RMSNorm(self.state.v_size, spec.norm_eps, torch.float32)
        self.out = sharded.row_linear(ranks, values, size, bias=False, dtype=dtype, method=method)

    def finish(self) -> None:
        nothing = self.A_log.new_zeros(self.state.num_v_heads)
        self.register_buffer("weights", self.conv.with_skip(nothing), persistent=False)

    def forward(self, x: Tensor, rotate: Any) -> Tensor:
        qkv, z = self.qkvz(x).split([self.state.channels, self.state.num_v_heads * self.state.v_size], 1)
        b, a = self.ba(x).float().chunk(2, 1)
        log_decay = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        gates = torch.stack((log_decay, b.sigmoid()), 1)  # [T, 2, heads]
        answers = attend_state(qkv, gates, self.weights, self.state.v_size, self.index)
        return self.out(self._gated(answers, z.view(answers.shape)).flatten(1))

    def _gated(self, answers: Tensor, z: Tensor) -> Tensor:
        """Normed first (transformers, Qwen3_5RMSNormGated)."""
        return (self.norm(answers) * F.silu(z.float())).to(z.dtype)


class Qwen35Layer(PreNormLayer):
    def make_norm(self, spec: Qwen35Spec, dtype: torch.dtype) -> nn.Module:
        return Norm(spec.hidden_size, spec.norm_eps)

    def make_attention(
        self, spec: Qwen35Spec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks
    ) -> nn.Module:
        mixer = LinearAttention if spec.linear[index] else GatedAttention
        return mixer(spec, index, dtype, method, ranks)


class Qwen35Model(HybridDecoder):
    weights_of = staticmethod(lambda spec: QWEN_WEIGHTS)
    layer = Qwen35Layer

    def make_norm(self, spec: Qwen35Spec, dtype: torch.dtype) -> nn.Module:
        return Norm(spec.hidden_size, spec.norm_eps)
