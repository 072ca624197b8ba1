"""Recurrent states on a CPU, by a kernel in C++ (kernels/cpu): beside attention layers whose pages are each one run of
memory, as those of cpu.py are. state.py has the rule, and the reference that this is held to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec, KVSpec
from minivllm.attention.state import spans_of, state_of
from minivllm.kernels.cpu import state as kernel

if TYPE_CHECKING:
    from minivllm.batch import InputBatch


class _Step(NamedTuple):
    spans: np.ndarray  # [n, 4] int32
    starts: np.ndarray  # [R + 1] int32: which of them are whose
    num_tokens: int


class StateCPU:
    def __init__(
        self, layers: list[AttentionSpec], spec: KVSpec, num_blocks: int, device: torch.device, block_axis: int
    ):
        assert block_axis == 0 and all(layer.state is not None for layer in layers), layers
        self.block_size = spec.block_size

    def prepare(self, batch: InputBatch) -> _Step:
        of_requests = list(spans_of(batch, self.block_size))
        spans = [span for spans in of_requests for span in spans]
        starts = np.cumsum([0, *map(len, of_requests)], dtype=np.int32)
        return _Step(np.array(spans, np.int32).reshape(-1, 4), starts, batch.num_tokens)

    def forward(
        self, qkv: Tensor, gates: Tensor, weights: Tensor, kv: Tensor, meta: _Step, layer: AttentionSpec, out: Tensor
    ) -> None:
        kernel.take(qkv, gates, weights, kv, meta.spans, meta.starts, state_of(layer), out)
        out[meta.num_tokens :] = 0  # padding rows: nobody reads them, but they pass through the layers that follow
