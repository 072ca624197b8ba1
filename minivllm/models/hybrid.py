"""What decoders share some of whose layers keep a recurrent state (attention/state.py) and the others K and V: which
layer is what, the weights of a state's convolution, and what such a model cannot do.

A layer's mixer is its `attention` in either case. A state knows the order of its tokens, so that of linear attention
rotates nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.errors import ModelError
from minivllm.kv_groups import StateSpec
from minivllm.layers.description import Description
from minivllm.layers.linear import empty_parameter
from minivllm.models.decoder_config import HybridSpec
from minivllm.models.rope_decoder import RopeDecoder
from minivllm.parallel.group import ONE_DEVICE, Ranks


class HybridDecoder(RopeDecoder):
    def __init__(self, spec: HybridSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        if any(spec.linear) and ranks.placement.tp > 1:
            raise ModelError("layers of linear attention are not cut into parts: tp must be 1 for this model")
        super().__init__(spec, dtype, device, ranks)
        if all(layer.state is not None for layer in self.attention_layers):
            raise ModelError("states lie in pages of K and V: each stage must have a layer of attention")

    @staticmethod
    def attention_of(spec: HybridSpec, ranks: Ranks) -> list[AttentionSpec]:
        own = ranks.placement.layers(spec.num_layers)
        each = zip(RopeDecoder.attention_of(spec, ranks), spec.linear[own.start : own.stop], strict=True)
        return [replace(layer, state=spec.state) if linear else layer for layer, linear in each]

    @property
    def by_row_unsupported_reason(self) -> str | None:
        has_states = any(self.spec.linear)
        return "a state takes many tokens by products of matrices, and few one by one" if has_states else None

    def describe(self) -> Description | str:
        count = sum(self.spec.linear)
        return f"{count} of {self.spec.num_layers} layers have recurrent states" if count else super().describe()


class Convolution(nn.Module):
    """The weights of one over tokens, of each of a state's channels by itself."""

    def __init__(self, state: StateSpec, bias: bool, dtype: torch.dtype):
        super().__init__()
        self.state = state
        self.weight = empty_parameter(state.channels, 1, state.kernel, dtype=dtype)
        self.bias = empty_parameter(state.channels, dtype=dtype) if bias else None

    def with_skip(self, skip: Tensor) -> Tensor:
        """skip [value heads]: of v -> [kernel + 2, channels] float32, as a StateBackend takes them."""
        weights = self.weight.new_zeros(self.state.weights_shape, dtype=torch.float32)
        *taps, bias, of_v = weights
        for tap, own in zip(taps, self.weight.data[:, 0].T, strict=True):
            tap.copy_(own)
        if self.bias is not None:
            bias.copy_(self.bias.data)
        of_v[self.state.places[2]] = skip.repeat_interleave(self.state.v_size).float()
        return weights
