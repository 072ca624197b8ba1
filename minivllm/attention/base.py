"""The attention seam: who writes K and V into the paged cache and attends over it.

A backend sees one batch of tokens in request order: request r owns query rows query_start[r] : query_start[r+1], which
are the last tokens of its seq_lens[r] tokens. There is no prefill or decode flag: a decode is a request with one query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minivllm.runner.batch import InputBatch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None  # a query at position p sees keys p - window + 1 .. p
    soft_cap: float | None = None  # scores become cap * tanh(scores / cap)
    causal: bool = True  # False: every token sees every other (encoders); attention/packed.py alone can do that


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one token costs in one layer's cache."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype  # int8 or float8_e4m3fn (codes.py): with a float32 scale for each token and head of K and of V
    beside: int = 0  # bytes a block that another model keeps under the same block ids (a draft model)

    @property
    def bytes_per_block(self) -> int:
        """K and V of block_size tokens in all layers."""
        per_head = self.head_size * self.dtype.itemsize + (4 if self.dtype.itemsize == 1 else 0)
        return 2 * self.num_layers * self.num_kv_heads * per_head * self.block_size + self.beside


# Layouts that several backends know, called as FlashInfer does: [2 (K, V), num_blocks, ...] and then
NHD = "NHD"  # block_size, kv_heads, head_size
HND = "HND"  # kv_heads, block_size, head_size


def check_layers(layers: list[AttentionSpec], spec: KVSpec) -> None:
    """What every backend builds on: whole groups of heads, and layers that all fit the cache."""
    for layer in layers:
        assert layer.num_heads % layer.num_kv_heads == 0, layer
        assert (layer.num_kv_heads, layer.head_size) == (spec.num_kv_heads, spec.head_size), (layer, spec)


class AttentionBackend(Protocol):
    """One registry entry of the `runner.attention` axis.

    The constructor takes (layers: list[AttentionSpec], spec: KVSpec, num_blocks: int, device: torch.device).
    `unavailable()` says in a sentence why the backend cannot run here, or returns None.

    `graphs` says of which whole forwards it can be a part that is captured and replayed: none, decodes (one query of
    each request), any equal number of queries, any. Their batches are padded (runner/batch.py: pad_requests); then all
    shapes of the metadata, and all numbers in it, must follow from the number of requests alone, and forward() may
    neither read the metadata on the host nor allocate by it. Its tensors are copied to where they were captured.
    """

    graphs: ClassVar[Literal["none", "decode", "uniform", "any"]]
    block_axis: ClassVar[int]  # which dimension of kv_shape() counts blocks
    kv_layout: ClassVar[str]  # what lies where in a tensor of kv_shape(), by name: equal names can share a cache
    kv_codes: ClassVar[frozenset[torch.dtype]]  # of 8 bits that KVSpec.dtype may be; scales are part of kv_shape()
    host_tables: ClassVar[bool]  # whether prepare() reads block_tables, slot_mapping and positions on the host; else
    # they may be tensors on its device

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None: ...

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Of one layer's cache with so many blocks: the device's, or the host's that blocks are swapped to."""
        ...

    def prepare(self, batch: InputBatch) -> Any:
        """Once a step: whatever all layers share (index tensors, masks, the split into decodes and prefills)."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: Any, layer: AttentionSpec, out: Tensor
    ) -> None:
        """Write k, v [T, kv_heads, head_size] at the batch's slots of kv, then attend q [T, heads, head_size] into
        out."""
        ...
