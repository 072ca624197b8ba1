"""Two backends as one: `runner.attention=flash,triton` gives requests with one query to the first and all others to the
second. (mini-sglang, whose --attn has such pairs, names the backend of prefills first.)

Both work on one cache, so they must agree on where things lie in it: on the name of their layout, on the dtype, and on
kv_shape(). A step's decodes are written and attended first. No request reads what another one writes in the same step,
so the order changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from minivllm.attention.base import AttentionBackend, AttentionSpec, KVSpec
from minivllm.attention.rows import batch_of, put, split, take
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.batch import InputBatch


class _Share(NamedTuple):
    """What one of the two does in a step."""

    rows: slice | Tensor
    meta: Any  # its own


class _Meta(NamedTuple):
    shares: tuple[_Share | None, _Share | None]
    num_tokens: int


class PairBackend:
    """Made for two backends by `pair`."""

    kinds: ClassVar[tuple[type[AttentionBackend], type[AttentionBackend]]]
    kv_layout: ClassVar[str]
    kv_dtypes: ClassVar[frozenset[torch.dtype]]
    host_tables: ClassVar[bool]
    block_axis: ClassVar[int]

    def __init__(self, layers: list[AttentionSpec], spec: KVSpec, num_blocks: int, device: torch.device):
        self.device = torch.device(device)
        self.backends = first, second = tuple(kind(layers, spec, num_blocks, device) for kind in self.kinds)
        shapes = first.kv_shape(num_blocks), second.kv_shape(num_blocks)
        if shapes[0] != shapes[1]:
            names = " and ".join(kind.__name__ for kind in self.kinds)
            raise ConfigError(
                f"{names} cannot share a KV cache of {spec.dtype}: its shape is {shapes[0]} or {shapes[1]}"
            )

        # A step of decodes is the first one's alone, and one of as many drafts for each request the second one's: each
        # can be captured if that can. No name says that drafts can and decodes cannot.
        drafts: Literal["decode", "uniform"] = "uniform" if second.graphs in ("uniform", "any") else "decode"
        self.graphs: Literal["none", "decode", "uniform"] = "none" if first.graphs == "none" else drafts

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return next(filter(None, (kind.unavailable(device) for kind in cls.kinds)), None)

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        return self.backends[0].kv_shape(num_blocks)

    def prepare(self, batch: InputBatch) -> _Meta:
        shares = (
            part and _Share(part.rows, backend.prepare(batch_of(batch, part)))
            for backend, part in zip(self.backends, split(batch, self.device), strict=True)
        )
        return _Meta(tuple(shares), batch.num_tokens)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: _Meta, layer: AttentionSpec, out: Tensor
    ) -> None:
        for backend, share in zip(self.backends, meta.shares, strict=True):
            if share is None:
                continue
            rows, own_meta = share
            own = take(q, rows), take(k, rows), take(v, rows)
            if isinstance(rows, slice):
                backend.forward(*own, kv, own_meta, layer, out[rows])
            else:
                result = torch.empty_like(own[0], memory_format=torch.contiguous_format)
                backend.forward(*own, kv, own_meta, layer, result)
                put(out, rows, result)
        if out.shape[0] > meta.num_tokens:  # padding is computed by neither
            out[meta.num_tokens :].zero_()


def pair(first: type[AttentionBackend], second: type[AttentionBackend]) -> type[PairBackend]:
    """The backend that gives decodes to `first` and the rest to `second`. Raises ConfigError if they cannot share a
    cache."""
    if first is second:
        raise ConfigError(f"a pair of attention backends is two different ones, not {first.__name__} twice")
    if (first.kv_layout, first.block_axis) != (second.kv_layout, second.block_axis):
        raise ConfigError(
            f"{first.__name__} and {second.__name__} cannot share a KV cache: the layout of one is "
            f'"{first.kv_layout}", of the other "{second.kv_layout}"'
        )
    shared = {"kv_dtypes": first.kv_dtypes & second.kv_dtypes, "block_axis": first.block_axis}
    shared["host_tables"] = first.host_tables or second.host_tables
    shared["adds_slopes"] = all(getattr(kind, "adds_slopes", False) for kind in (first, second))
    members = {"kinds": (first, second), "kv_layout": first.kv_layout, **shared}
    return type(f"{first.__name__}And{second.__name__}", (PairBackend,), members)
