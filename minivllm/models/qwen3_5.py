"""Qwen 3.5's text decoder (Qwen Team 2026): of four layers three are linear attention, which keeps one state for all
tokens (Gated DeltaNet, Yang et al. 2025), and the fourth is attention, whose answers are gated.

So a request's memory hardly grows with its length. Both kinds stand in one pool of blocks (minivllm/kv_groups.py), and
what a state does with tokens is its backend's (minivllm/attention/state.py). Norms multiply by 1 + weight, as Gemma's.
The text model of the models that see is read too; what they see with is left in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.compile.context import attend, attend_state
from minivllm.errors import ModelError
from minivllm.layers import sharded
from minivllm.layers.linear import QuantMethod, empty_parameter
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import PairedRotaryEmbedding
from minivllm.models.checkpoint import WeightMap
from minivllm.models.decoder import ATTENTION_WEIGHTS, ENDS, MLP, MLP_WEIGHTS, Decoder, attention_layers, make_lm_head
from minivllm.models.gemma3 import HeadNorm, Norm
from minivllm.models.qwen3_5_config import Qwen35Spec, read_config
from minivllm.parallel.group import ONE_DEVICE, Ranks

__all__ = ["Qwen35Model", "read_config"]

STATE_WEIGHTS = {
    "linear_attn": ("linear", ""),
    "linear_attn.in_proj_qkv": ("linear.qkvz", "qkv"),
    "linear_attn.in_proj_z": ("linear.qkvz", "z"),
    "linear_attn.in_proj_b": ("linear.ba", "b"),
    "linear_attn.in_proj_a": ("linear.ba", "a"),
    "linear_attn.conv1d": ("linear.conv", ""),
    "linear_attn.norm": ("linear.norm", ""),
    "linear_attn.out_proj": ("linear.o", ""),
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
        self.conv = Convolution(self.state.channels, self.state.kernel, dtype)
        self.A_log = empty_parameter(heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(heads, dtype=torch.float32)
        self.norm = RMSNorm(self.state.v_size, spec.norm_eps, torch.float32)
        self.o = sharded.row_linear(ranks, values, size, bias=False, dtype=dtype, method=method)

    def forward(self, x: Tensor, rotate: Any) -> Tensor:
        """A state knows the order of its tokens: nothing is rotated."""
        qkv, z = self.qkvz(x).split([self.state.channels, self.state.num_v_heads * self.state.v_size], 1)
        b, a = self.ba(x).float().chunk(2, 1)
        log_decay = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        gates = torch.stack((log_decay, b.sigmoid()), 1)  # [T, 2, heads]
        answers = attend_state(qkv, gates, self.conv.taps, self.state.v_size, self.index)
        return self.o(self._gated(answers, z.view(answers.shape)).flatten(1))

    def _gated(self, answers: Tensor, z: Tensor) -> Tensor:
        """Normed first (transformers, Qwen3_5RMSNormGated)."""
        return (self.norm(answers) * F.silu(z.float())).to(z.dtype)


class Convolution(nn.Module):
    """Of each channel by itself; what it is applied to is the state's."""

    def __init__(self, channels: int, kernel: int, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter(channels, 1, kernel, dtype=dtype)

    def finish(self) -> None:
        """[kernel, channels]"""
        self.register_buffer("taps", self.weight.data[:, 0].T.float().contiguous(), persistent=False)


class DecoderLayer(nn.Module):
    """index: among the layers of the whole model."""

    def __init__(self, spec: Qwen35Spec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        size, eps = spec.hidden_size, spec.norm_eps
        self.attention_norm, self.mlp_norm = Norm(size, eps), Norm(size, eps)
        self.kind, mixer = ("linear", LinearAttention) if spec.linear[index] else ("attention", GatedAttention)
        setattr(self, self.kind, mixer(spec, index, dtype, method, ranks))
        self.mlp = MLP(spec, dtype, method, ranks, activation="silu", bias=False)

    def forward(self, x: Tensor, rotate: Any) -> Tensor:
        x = x + getattr(self, self.kind)(self.attention_norm(x), rotate)
        return x + self.mlp(self.mlp_norm(x))


def layers_of(spec: Qwen35Spec, ranks: Ranks) -> list[AttentionSpec]:
    at = ranks.placement
    own = at.layers(spec.num_layers)
    is_linear = spec.linear[own.start : own.stop]
    each = zip(attention_layers(spec, at, spec.scale), is_linear, strict=True)
    return [replace(layer, state=spec.state) if linear else layer for layer, linear in each]


class Qwen35Model(Decoder):
    by_row_unsupported_reason = "a state takes many tokens by products of matrices, and few one by one"

    def __init__(self, spec: Qwen35Spec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        if ranks.placement.tp > 1:
            raise ModelError("layers of linear attention are not cut into parts: tp must be 1 for this model")
        layers = layers_of(spec, ranks)
        if all(layer.state is not None for layer in layers):
            raise ModelError("states lie in pages of K and V: each stage must have a layer of attention")
        super().__init__(spec, dtype, device, ranks, QWEN_WEIGHTS, layers)
        method = self.linear_method
        with device:
            self.embedding = sharded.first_of_stage(ranks, spec.vocab_size, spec.hidden_size, dtype)
            sizes = spec.rotary_size, spec.head_size, spec.max_position
            self.rotary = PairedRotaryEmbedding(spec.rope, *sizes, dtype, interleaved=False)
            self.layers = self.make_layers(lambda i: DecoderLayer(spec, i, dtype, method, ranks))
            self.norm = sharded.last_of_stage(ranks, Norm(spec.hidden_size, spec.norm_eps))
            self.lm_head = make_lm_head(spec, self.embedding, dtype, method, ranks)

    def embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T] int64 -> x [T, hidden], in `out` if that is given."""
        return self.embedding(token_ids, out)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden], positions [T] int64 -> hidden [T, hidden], the final norm applied."""
        rotate = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rotate)
        return self.norm(x)

    def describe(self) -> str:
        return f"{sum(self.spec.linear)} of {len(self.spec.linear)} layers have recurrent states, the others gates"

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> [S, vocab] in fp32."""
        return self.lm_head(hidden)
