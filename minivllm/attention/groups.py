"""Attention over KV groups (kv_groups.py): each has block tables of its own, so each has a backend of its own.

A step is prepared once for each group, with its tables and slots, and a layer's call goes to the backend of its group.
All work on the same tensors, in blocks that the pool has given to their group. With one group none of this is there:
the backend is that of the layers.

Layers with recurrent states have backends of another kind, and their groups share the tensors all the same: a state
lies in a page of K and V (HybridAttention). Layers of cross attention are in no group (cross.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import AttentionBackend, AttentionSpec, CrossBackend, KVSpec, StateBackend
from minivllm.attention.cross import WithCrossAttention
from minivllm.kv_groups import KVGroups

if TYPE_CHECKING:
    from minivllm.batch import InputBatch


def in_groups(layers: list[AttentionSpec], groups: KVGroups) -> list[AttentionSpec]:
    """The layers, each with its group, if it is in one."""
    places = groups.places()
    return [replace(layer, group=places[i][0]) if i in places else layer for i, layer in enumerate(layers)]


def make_backend(
    kind: type[AttentionBackend],
    layers: list[AttentionSpec],
    spec: KVSpec,
    num_blocks: int,
    device: torch.device,
    of_states: type[StateBackend] | None = None,
    of_cross: type[CrossBackend] | None = None,
) -> AttentionBackend:
    """For layers that know their groups. of_states: of those with recurrent states, if there are such; of_cross: of
    those of cross attention."""
    if of_cross is not None:
        own = [layer for layer in layers if layer.cross is None]
        return WithCrossAttention(make_backend(kind, own, spec, num_blocks, device, of_states), of_cross())
    if all(layer.group == 0 for layer in layers):
        return kind(layers, spec, num_blocks, device)
    if of_states is not None:
        return HybridAttention(kind, layers, spec, num_blocks, device, of_states)
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
        self, qkv: Tensor, rope: Any, kv: Tensor, meta: list[Any], layer: AttentionSpec, out: Tensor
    ) -> None:
        """For kinds that have it."""
        self.backends[layer.group].rope_and_attend(qkv, rope, kv, meta[layer.group], layer, out)


class HybridMeta(NamedTuple):
    attention: Any  # what the attention layers' backend prepared
    states: dict[int, Any]  # by group
    begun: dict[int, Tensor]  # by group of attention layers: the blocks whose first token is in this step


class HybridAttention:
    """Attention layers, in one group or several, and in groups behind them layers with recurrent states.

    A backend of attention may read keys and values that it then masks, and what is masked must be a number. In a block
    that was a state's some are none, so it is cleared for the first of its tokens."""

    def __init__(
        self,
        kind: type[AttentionBackend],
        layers: list[AttentionSpec],
        spec: KVSpec,
        num_blocks: int,
        device: torch.device,
        of_states: type[StateBackend],
    ):
        own = [layer for layer in layers if layer.state is None]
        self.attention = attention = make_backend(kind, own, spec, num_blocks, device)
        self.kv_shape, self.block_axis, self.kv_layout = attention.kv_shape, attention.block_axis, attention.kv_layout
        self.kv_dtypes, self.host_tables, self.graphs = attention.kv_dtypes, attention.host_tables, "none"
        self.groups, self.block_size, self.device = sorted({layer.group for layer in own}), spec.block_size, device
        with_states: dict[int, list[AttentionSpec]] = {}
        for layer in layers:
            if layer.state is not None:
                with_states.setdefault(layer.group, []).append(layer)
        sizes = spec, num_blocks, device, self.block_axis
        self.states = {group: of_states(of, *sizes) for group, of in with_states.items()}

    def prepare(self, batch: InputBatch) -> HybridMeta:
        own = batch if isinstance(self.attention, GroupedAttention) else batch.of_group(self.groups[0])
        states = {group: backend.prepare(batch.of_group(group)) for group, backend in self.states.items()}
        begun = {group: self._begun(batch, group) for group in self.groups}
        return HybridMeta(self.attention.prepare(own), states, begun)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: HybridMeta, layer: AttentionSpec, out: Tensor
    ) -> None:
        """Of a layer with a state q, k and v are what StateBackend.forward takes in their place."""
        if layer.state is not None:
            self.states[layer.group].forward(q, k, v, kv, meta.states[layer.group], layer, out)
            return
        if len(begun := meta.begun[layer.group]):
            kv.view(torch.uint8).index_fill_(self.block_axis, begun, 0)
        self.attention.forward(q, k, v, kv, meta.attention, layer, out)

    def _begun(self, batch: InputBatch, group: int) -> Tensor:
        tables = batch.block_tables[group]
        ends = -(-batch.seq_lens // self.block_size)
        firsts = -(-(batch.seq_lens - np.diff(batch.query_start)) // self.block_size)
        found = [int(tables[r, at]) for r in range(len(ends)) for at in range(firsts[r], ends[r])]
        return torch.tensor(found, dtype=torch.int64, device=self.device)


def backends_of(backend: AttentionBackend) -> list[AttentionBackend]:
    """Of each KV group."""
    backend = backend.attention if isinstance(backend, WithCrossAttention) else backend
    return backend.backends if isinstance(backend, GroupedAttention) else [backend]
