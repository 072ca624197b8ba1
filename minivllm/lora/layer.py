"""What LoRA adds to a linear layer: y += scale * B A x for each token, with the matrices of its request's adapter.

`LoRAMethod` decorates whatever method a layer has, so the base weight may be packed or quantised. Which tokens belong
to which adapter is decided once a step (`TokenGroups`, filled by lora/slots.py), for all layers alike: the tokens of
one adapter are multiplied together (Punica's SGMV, Chen et al. 2023), tokens without an adapter are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minivllm.layers.linear import QuantMethod


class Part(NamedTuple):
    """What changes some rows of a stacked weight: q of qkv, gate of gate_up."""

    ranks: slice  # of Delta.a: which rows are this part's A
    rows: slice  # of the layer's output
    b: Tensor  # [rank, n_out of the part]: B transposed, the scale multiplied in


class Delta(NamedTuple):
    """One adapter's change to one linear layer. Parts that the adapter leaves alone are absent."""

    a: Tensor  # [sum of ranks, n_in]: the A of all parts, so that x is read once
    parts: tuple[Part, ...]


class Group(NamedTuple):
    """The tokens of one adapter in a step."""

    slot: int
    tokens: slice | Tensor  # token rows: a slice if they are neighbours, else indices [n] int64


@dataclass(slots=True)
class TokenGroups:
    """This step's groups; none if nobody in it uses an adapter. One object, shared by every layer."""

    groups: Sequence[Group] = field(default_factory=tuple)


Multiply = Callable[[Tensor, Tensor, Sequence[Group], Sequence[Delta | None]], None]


def add_deltas(y: Tensor, x: Tensor, groups: Sequence[Group], deltas: Sequence[Delta | None]) -> None:
    """y [T, n_out] += the delta of each token's slot applied to x [T, n_in]. deltas: one a slot; None changes nothing.

    Two small products a group and part.
    """
    for slot, tokens in groups:
        delta = deltas[slot]
        if delta is None:
            continue
        hidden = x[tokens] @ delta.a.T  # [tokens, sum of ranks]
        for ranks, rows, b in delta.parts:
            y[tokens, rows] += hidden[:, ranks] @ b


def add_deltas_naive(y: Tensor, x: Tensor, groups: Sequence[Group], deltas: Sequence[Delta | None]) -> None:
    """`add_deltas` a token at a time, in float32: its oracle."""
    for slot, tokens in groups:
        for t in torch.arange(len(x))[tokens].tolist():
            for ranks, rows, b in deltas[slot].parts if deltas[slot] is not None else ():
                change = b.float().T @ (deltas[slot].a[ranks].float() @ x[t].float())
                y[t, rows] = (y[t, rows].float() + change).to(y.dtype)


class LoRAMethod:
    """A QuantMethod around the one that a layer has. `deltas` has a place for each slot; lora/slots.py fills them."""

    def __init__(self, inner: QuantMethod, groups: TokenGroups, num_slots: int, multiply: Multiply = add_deltas):
        self.inner = inner
        self.step = groups
        self.deltas: list[Delta | None] = [None] * num_slots
        self.multiply = multiply

    def create(self, layer: nn.Module, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        self.inner.create(layer, n_in, n_out, dtype)

    def finish(self, layer: nn.Module) -> None:
        self.inner.finish(layer)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        y = self.inner.apply(layer, x)
        if self.step.groups:
            self.multiply(y, x, self.step.groups, self.deltas)
        return y
