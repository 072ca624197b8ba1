"""Attention over whole sequences that lie one after the other, without a cache: for models that pool.

A model that embeds runs each text once, so nothing is kept and nothing is paged. Rows [T] hold the sequences back to
back and linear layers see no padding. Only here neighbours of like length are padded to the longest of them and
attended in one call: at most twice the products (they are a small part of a step of short texts) for a number of calls
that grows with the logarithm of the lengths. The caller sorts its sequences by length; in any order the result is the
same, in more calls.

Padding never shows: its rows are copies of the sequence's last token, its keys are masked, or lie after all queries
that are read where attention is causal. Oracles: `attend_dense` (attention/reference.py) and its two-way
counterpart in tests/attention/test_packed.py, one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.batch import InputBatch
from minivllm.errors import ConfigError

MAX_RATIO = 2  # of the lengths that share a call


class Group(NamedTuple):
    """B sequences, padded to L tokens."""

    rows: slice  # of the packed tensors
    num: int  # B
    length: int  # L
    lengths: Tensor  # [B] int64
    spread: Tensor | None  # [B * L] int64: the packed row of each place; None: no padding, the rows as they lie
    places: Tensor | None  # [rows] int64: the place of each packed row, the way back


class Mask(NamedTuple):
    bias: Tensor | None  # bool, broadcast to [B, heads, L, L]; True: may be seen
    is_causal: bool


class PackedMeta(NamedTuple):
    groups: list[Group]
    masks: dict[AttentionSpec, list[Mask]]  # by group


class PackedAttention:
    """Stands where an AttentionBackend stands in a forward context; `kv` is not looked at."""

    graphs: ClassVar[Literal["none", "decode", "uniform", "any"]] = "none"

    def __init__(self, layers: list[AttentionSpec], device: torch.device):
        for layer in layers:
            assert layer.num_heads % layer.num_kv_heads == 0, layer
            assert layer.causal or layer.sliding_window is None, layer
            if why := unsupported(layer):
                raise ConfigError(f"a model with {why} generates, and neither embeds nor classifies texts yet")
        self.specs = list(dict.fromkeys(layers))
        self.device = device

    def prepare(self, batch: InputBatch) -> PackedMeta:
        """Of whole sequences, none of them empty."""
        return self.prepare_lengths(batch.seq_lens.tolist())

    def prepare_lengths(self, lengths: Sequence[int]) -> PackedMeta:
        """lengths: of the sequences, each at least 1, in the order of the rows."""
        groups = [make_group(start, run, self.device) for start, run in runs(lengths)]
        return PackedMeta(groups, {spec: [make_mask(group, spec) for group in groups] for spec in self.specs})

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, meta: PackedMeta, layer: AttentionSpec, out: Tensor
    ) -> None:
        """q [T, heads, D], k and v [T, kv_heads, D] -> out, like q."""
        grouped = layer.num_heads != layer.num_kv_heads
        for group, mask in zip(meta.groups, meta.masks[layer], strict=True):
            queries, keys, values = (padded(x, group) for x in (q, k, v))
            result = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask.bias,
                is_causal=mask.is_causal,
                scale=layer.scale,
                enable_gqa=grouped,
            )  # [B, heads, L, D]
            by_place = result.transpose(1, 2).flatten(0, 1)  # [B * L, heads, D]
            out[group.rows] = by_place if group.places is None else by_place.index_select(0, group.places)


def unsupported(layer: AttentionSpec) -> str | None:
    """What of it this attention does not compute, or None."""
    found = {
        "slopes of scores (ALiBi)": layer.slopes,
        "a soft cap on scores": layer.soft_cap,
        "latent attention": layer.latent,
        "recurrent states": layer.state,
        "cross attention": layer.cross,
    }
    return next((what for what, value in found.items() if value is not None), None)


def runs(lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """(first row, lengths) of neighbours whose longest is at most MAX_RATIO times their shortest."""
    start, run = 0, list(lengths[:1])
    for length in lengths[1:]:
        if max(*run, length) > MAX_RATIO * min(*run, length):
            yield start, run
            start, run = start + sum(run), []
        run.append(length)
    if run:
        yield start, run


def make_group(start: int, lengths: list[int], device: torch.device) -> Group:
    num, longest, total = len(lengths), max(lengths), sum(lengths)
    rows, sizes = slice(start, start + total), torch.tensor(lengths)
    if total == num * longest:
        return Group(rows, num, longest, sizes.to(device), None, None)
    starts = start + sizes.cumsum(0) - sizes  # [B]
    column = torch.arange(longest)
    spread = starts[:, None] + torch.minimum(column, sizes[:, None] - 1)  # [B, L]
    places = (column < sizes[:, None]).flatten().nonzero().flatten()  # [rows]
    return Group(rows, num, longest, sizes.to(device), spread.flatten().to(device), places.to(device))


def make_mask(group: Group, spec: AttentionSpec) -> Mask:
    place = torch.arange(group.length, device=group.lengths.device)
    if spec.causal and spec.sliding_window is not None and spec.sliding_window < group.length:
        distance = place[:, None] - place
        return Mask((distance >= 0) & (distance < spec.sliding_window), False)
    if spec.causal or group.spread is None:
        return Mask(None, spec.causal)
    return Mask((place < group.lengths[:, None])[:, None, None], False)


def padded(x: Tensor, group: Group) -> Tensor:
    """[T, heads, D] -> [B, heads, L, D]"""
    x = x[group.rows] if group.spread is None else x.index_select(0, group.spread)
    return x.unflatten(0, (group.num, group.length)).transpose(1, 2)
