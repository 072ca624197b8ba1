"""What one model family keeps of each request beside K and V: outputs of encoders, positions of its own, states.

Most have PromptEmbeds, one with an encoder has EncodedItems, and a model may declare a part of its own
(`make_state(device)`). The part has a say in a forward by three columns of the batch: `overlays`, rows of x that are no
token's embedding, `rope_positions`, and `encoded`, which encoder output each request reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
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
        """Fill the batch's columns with what it has for them."""
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


class Encodes(Protocol):
    """A model with an encoder. Each of its requests has one item, which all of its tokens read."""

    input_shape: tuple[int, ...]  # of an item

    def encode(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """x of input_shape -> of each layer of cross attention, its number and K and V [2, kv_heads, positions,
        head_size]."""
        ...


class EncodedItems:
    """K and V of encoder outputs, each in a slot of the cross layers' tensors while a request names it. An item's
    content is float32."""

    width = 0

    def __init__(self, model: Encodes, dtype: torch.dtype, device: torch.device, caches: list[Tensor], num_slots: int):
        """caches: of every layer; those of cross attention have num_slots slots, one for each row."""
        self._model, self._dtype, self._device, self._caches = model, dtype, device, caches
        self._slots: dict[str, int] = {}  # by digest
        self._free = list(range(num_slots))[::-1]
        self._slot_of = np.zeros(num_slots, np.int64)  # by row

    def encode(self, plan: StepPlan) -> None:
        for digest in plan.forget:
            if (slot := self._slots.pop(digest, None)) is not None:  # else the plan that named it has not run
                self._free.append(slot)
        for digest, content in plan.encode:
            if digest not in self._slots:  # as it is when a step is tried again
                self._slots[digest] = self._free.pop()
            numbers = torch.frombuffer(bytearray(content), dtype=torch.float32).view(self._model.input_shape)
            for layer, kv in self._model.encode(numbers.to(self._device, self._dtype)):
                self._caches[layer][self._slots[digest]] = kv

    def join(self, row: int, join: Join) -> None:
        (item,) = join.items
        self._slot_of[row] = self._slots[item.digest]

    def leave(self, row: int) -> None:
        pass  # the row names a slot until another request joins there

    def prepare(self, batch: InputBatch) -> None:
        batch.encoded = self._slot_of.take(batch.rows, mode="clip")  # a dummy may have more rows than there are


def make_state(
    model: nn.Module, width: int, dtype: torch.dtype, device: torch.device, caches: list[Tensor]
) -> ModelState:
    """width: of the model's hidden states; caches: what each layer reads."""
    if hasattr(model, "make_state"):
        return model.make_state(device)
    cross = [caches[i] for i, layer in enumerate(model.attention_layers) if layer.cross is not None]
    return EncodedItems(model, dtype, device, caches, len(cross[0])) if cross else PromptEmbeds(width, dtype, device)
