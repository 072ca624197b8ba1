"""Attention over KV groups (kv_groups.py): each has block tables of its own, so each has a backend of its own.

A step is prepared once for each group, with its tables and slots, and a layer's call goes to the backend of its group.
All work on the same tensors, in blocks that the pool has given to their group. With one group none of this is there:
the backend is that of the layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.attention.base import AttentionBackend, AttentionSpec, KVSpec
from minivllm.kv_groups import KVGroups

if TYPE_CHECKING:
    from minivllm.batch import InputBatch


def in_groups(layers: list[AttentionSpec], groups: KVGroups) -> list[AttentionSpec]:
    """The layers, each with its group."""
    places = groups.places()
    return [replace(layer, group=places[i][0]) for i, layer in enumerate(layers)]


def make_backend(
    kind: type[AttentionBackend], layers: list[AttentionSpec], spec: KVSpec, num_blocks: int, device: torch.device
) -> AttentionBackend:
    """For layers that know their groups."""
    if all(layer.group == 0 for layer in layers):
        return kind(layers, spec, num_blocks, device)
    return GroupedAttention(kind, layers, spec, num_blocks, device)


class GroupedAttention:
    def __init__(
        self,
        kind: type[AttentionBackend],
        layers: list[AttentionSpec],
        spec: KVSpec,
        num_blocks: int,
        device: torch.device,
    ):
        of_group: dict[int, list[AttentionSpec]] = {}
        for layer in layers:
            of_group.setdefault(layer.group, []).append(layer)
        self.backends = [kind(of_group[group], spec, num_blocks, device) for group in range(len(of_group))]
        first = self.backends[0]
        self.kv_shape = first.kv_shape
        self.graphs, self.block_axis, self.kv_layout = first.graphs, first.block_axis, first.kv_layout
        self.kv_dtypes, self.host_tables = first.kv_dtypes, first.host_tables
        self.is_by_row = all(getattr(backend, "is_by_row", False) for backend in self.backends)

    def prepare(self, batch: InputBatch) -> list[Any]:
        return [backend.prepare(batch.of_group(group)) for group, backend in enumerate(self.backends)]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: list[Any], layer: AttentionSpec, out: Tensor
    ) -> None:
        self.backends[layer.group].forward(q, k, v, kv, meta[layer.group], layer, out)

    def rope_and_attend(
        self, qkv: Tensor, turn: Any, kv: Tensor, meta: list[Any], layer: AttentionSpec, out: Tensor
    ) -> None:
        """For kinds that have it."""
        self.backends[layer.group].rope_and_attend(qkv, turn, kv, meta[layer.group], layer, out)


def backends_of(backend: AttentionBackend) -> list[AttentionBackend]:
    """Of each KV group."""
    return backend.backends if isinstance(backend, GroupedAttention) else [backend]
