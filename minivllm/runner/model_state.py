"""What one model family keeps of each request beside K and V: outputs of encoders, positions of its own, states.

A model declares its part (`make_state(device)`); one that does not has PromptEmbeds. The part has a say in a forward by
two columns of the batch: `overlays`, rows of x that are no token's embedding, and `rope_positions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from minivllm.batch import InputBatch, Overlay
from minivllm.plan import Join, StepPlan
from minivllm.request import Item


class ModelState(Protocol):
    width: int  # numbers a position of prompts that are given as embeddings; 0: it takes none

    def encode(self, plan: StepPlan) -> None:
        """Drop the items of `plan.forget`, then make those of `plan.encode` ready. Before the plan's joins."""
        ...

    def join(self, row: int, join: Join) -> None: ...

    def leave(self, row: int) -> None: ...

    def prepare(self, batch: InputBatch) -> None:
        """Fill the batch's `overlays` and `rope_positions` with what it has for them."""
        ...


class NoState:
    """Of a model that takes tokens alone."""

    width = 0

    def encode(self, plan: StepPlan) -> None:
        assert not plan.encode, "items for a model that takes tokens alone"

    def join(self, row: int, join: Join) -> None:
        pass

    def leave(self, row: int) -> None:
        pass

    def prepare(self, batch: InputBatch) -> None:
        pass


class PromptEmbeds:
    """Prompts, or parts of them, given as vectors of the model's width: nothing has to be computed of an item."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device):
        self.width, self.dtype, self.device = width, dtype, device
        self._vectors: dict[str, Tensor] = {}  # by digest: [length, width]
        self._items: dict[int, tuple[Item, ...]] = {}  # by row

    def encode(self, plan: StepPlan) -> None:
        for digest in plan.forget:
            self._vectors.pop(digest, None)
        for digest, content in plan.encode:
            vectors = torch.frombuffer(bytearray(content), dtype=torch.float32).view(-1, self.width)
            self._vectors[digest] = vectors.to(self.device, self.dtype)

    def join(self, row: int, join: Join) -> None:
        if join.items:
            self._items[row] = join.items

    def leave(self, row: int) -> None:
        self._items.pop(row, None)

    def prepare(self, batch: InputBatch) -> None:
        if self._items:
            batch.overlays = list(self._overlays(batch))

    def _overlays(self, batch: InputBatch) -> Iterator[Overlay]:
        ends = batch.query_start.tolist()
        for i, row in enumerate(batch.rows.tolist()):
            for item in self._items.get(row, ()):
                shift = ends[i + 1] - int(batch.seq_lens[i])  # from a position of the request to its token row
                first, end = max(item.offset + shift, ends[i]), min(item.end + shift, ends[i + 1])
                if first < end:
                    begin = first - shift - item.offset
                    yield Overlay(first, end, self._vectors[item.digest][begin : begin + end - first])


def make_state(model: nn.Module, width: int, dtype: torch.dtype, device: torch.device) -> ModelState:
    make = getattr(model, "make_state", None)
    return PromptEmbeds(width, dtype, device) if make is None else make(device)
