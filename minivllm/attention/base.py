"""The attention seam: who writes K and V into the paged cache and attends over it.

A backend sees one batch of tokens in request order: request r owns query rows query_start[r] : query_start[r+1], which
are the last tokens of its seq_lens[r] tokens. There is no prefill or decode flag: a decode is a request with one query.

A layer says of which kind it is, and each kind has backends of its own: of K and V by heads an AttentionBackend, of one
latent vector a token a LatentBackend, of one state for all tokens a StateBackend, of an encoder's output a
CrossBackend. All are called alike, so nothing between a model and them knows the kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from minivllm.kv_groups import CROSS, FULL, LATENT, STATE, Latent, LayerKind, StateSpec

if TYPE_CHECKING:
    from minivllm.batch import InputBatch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of one attention layer."""

    num_heads: int
    num_kv_heads: int  # of a latent layer all heads: each has K and V of its own, once they are made of the vector
    head_size: int  # of q and K; of a latent layer the part that turns with the position is the last
    scale: float
    sliding_window: int | None = None  # a query at position p sees keys p - window + 1 .. p
    soft_cap: float | None = None  # scores become cap * tanh(scores / cap)
    slopes: tuple[float, ...] | None = None  # of each head: slope * (key - query) is added to scores (ALiBi)
    row_wise: bool = False  # the bits of a query's result may not depend on what is computed beside it (cpu.py)
    causal: bool = True  # False: every token sees every other (encoders); attention/packed.py alone can do that
    latent: Latent | None = None  # what is kept of a token in the place of K and V (attention/latent.py)
    state: StateSpec | None = None  # what is kept of all tokens in that place (attention/state.py); then the heads are
    # those of the attention layers beside it, whose pages it shares
    cross: int | None = None  # positions of an encoder's output, which is read in the place of the request's own tokens
    group: int = field(default=0, hash=False)  # the KV group whose block tables it reads (attention/groups.py)

    @property
    def kind(self) -> LayerKind:
        if not self.causal:
            return LayerKind("none")
        if self.latent is not None:
            return LATENT
        if self.state is not None:
            return STATE
        if self.cross is not None:
            return CROSS
        return FULL if self.sliding_window is None else LayerKind("window", self.sliding_window)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one token costs in one layer's cache."""

    num_layers: int  # that a block is kept for: all layers, or as many as each KV group has
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: (
        torch.dtype
    )  # int8 or float8_e4m3fn (quantised_kv.py): with a float32 scale for each token and head of K and of V
    beside: int = 0  # bytes a block that another model keeps under the same block ids (a draft model)
    vectors: int = 2  # that a token has for each head: K and V; 1: a latent vector, which is of all heads

    @property
    def bytes_per_block(self) -> int:
        """Of block_size tokens in num_layers layers."""
        per_head = self.head_size * self.dtype.itemsize + (4 if self.dtype.itemsize == 1 else 0)
        return self.vectors * self.num_layers * self.num_kv_heads * per_head * self.block_size + self.beside


def kv_spec(layers: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> KVSpec:
    """What layers of one size keep; dtype: in the cache."""
    of, latent = layers[0], layers[0].latent
    if latent is None:
        return KVSpec(len(layers), of.num_kv_heads, of.head_size, block_size, dtype)
    return KVSpec(len(layers), 1, latent.size, block_size, dtype, vectors=1)


# Layouts that several backends know, called as FlashInfer does: [2 (K, V), num_blocks, ...] and then
NHD = "NHD"  # block_size, kv_heads, head_size
HND = "HND"  # kv_heads, block_size, head_size


def check_layers(layers: list[AttentionSpec], spec: KVSpec) -> None:
    """What every backend builds on: whole groups of heads, and layers that all fit the cache."""
    for layer in layers:
        assert layer.latent is None and layer.num_heads % layer.num_kv_heads == 0, layer
        assert (layer.num_kv_heads, layer.head_size) == (spec.num_kv_heads, spec.head_size), (layer, spec)


class AttentionBackend(Protocol):
    """One registry entry of the `runner.attention` axis.

    The constructor takes (layers: list[AttentionSpec], spec: KVSpec, num_blocks: int, device: torch.device).
    `unavailable()` says in a sentence why the backend cannot run here, or returns None. One that adds the slopes of an
    AttentionSpec to scores says so by `adds_slopes = True`; one that says nothing gets no such layer (select.py).

    `graphs` says of which whole forwards it can be a part that is captured and replayed: none, decodes (one query of
    each request), any equal number of queries, any. Their batches are padded (batch.py: pad_requests); then all
    shapes of the metadata, and all numbers in it, must follow from the number of requests alone, and forward() may
    neither read the metadata on the host nor allocate by it. Its tensors are copied to where they were captured.
    """

    graphs: ClassVar[Literal["none", "decode", "uniform", "any"]]
    block_axis: ClassVar[int]  # which dimension of kv_shape() counts blocks
    kv_layout: ClassVar[str]  # what lies where in a tensor of kv_shape(), by name: equal names can share a cache
    kv_dtypes: ClassVar[frozenset[torch.dtype]]  # that KVSpec.dtype may be beside the model's; scales are in kv_shape()
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


class LatentBackend(Protocol):
    """The same for layers that keep a latent vector a token: one registry entry of the `runner.attention` axis for
    models of such layers (features.LATENT_ATTENTION). kv_shape() has one vector where that of K and V has two."""

    graphs: ClassVar[Literal["none", "decode", "uniform", "any"]]
    block_axis: ClassVar[int]
    kv_layout: ClassVar[str]
    kv_dtypes: ClassVar[frozenset[torch.dtype]]
    host_tables: ClassVar[bool]

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None: ...

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]: ...

    def prepare(self, batch: InputBatch) -> Any: ...

    def forward(
        self, q: Tensor, latent: Tensor, expand: Tensor, kv: Tensor, meta: Any, layer: AttentionSpec, out: Tensor
    ) -> None:
        """Write latent [T, rank + rope_size] at the batch's slots of kv, then attend q [T, heads, head_size] into out
        [T, heads, value_size]. expand [heads, head_size - rope_size + value_size, rank] makes of a token's first
        `rank` numbers, for each head, the part of its K that does not turn, and its V."""
        ...


class StateBackend(Protocol):
    """The same for layers that keep a recurrent state: one registry entry of the `runner.attention` axis for such
    layers (features.STATE_ATTENTION). They lie in the pages of the attention layers beside them, so the constructor
    takes what theirs does and which dimension of their tensors counts blocks (attention/groups.py)."""

    def prepare(self, batch: InputBatch) -> Any: ...

    def forward(
        self, qkv: Tensor, gates: Tensor, weights: Tensor, kv: Tensor, meta: Any, layer: AttentionSpec, out: Tensor
    ) -> None:
        """Take each request's tokens into its state, which is read from its block tables and written to them, behind
        every block that the tokens fill and behind the last of them.

        qkv [T, channels]: q's heads, k's and v's (StateSpec.places), before the convolution. gates [T, 2, value heads]
        float32: the logarithm of what is left of the state, and how much of v is taken into it. weights [kernel + 2,
        channels] float32 (StateSpec.weights_shape). out [T, value heads, value size] float32: what the state answers
        to q."""
        ...


class CrossBackend(Protocol):
    """The same for layers of cross attention: one registry entry of the `runner.attention` axis for such layers
    (features.CROSS_ATTENTION). What they read is written before the forward, by a model's state
    (runner/model_state.py)."""

    def prepare(self, batch: InputBatch) -> Any:
        """batch.encoded says which slot each request reads."""
        ...

    def forward(self, q: Tensor, kv: dict[int, Tensor], meta: Any, layer: AttentionSpec, out: Tensor) -> None:
        """Attend q [T, heads, head_size] to all positions of its request's slot, into out. kv: by slot, [2 (K, V),
        kv_heads, positions, head_size]."""
        ...
