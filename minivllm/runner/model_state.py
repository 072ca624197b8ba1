"""What one model family keeps of each request beside K and V: outputs of encoders, positions of its own, states.

Most have PromptEmbeds, one with an encoder has EncodedItems, and a model may declare a part of its own
(`make_state(device)`). The part has a say in a forward by three columns of the batch: `overlays`, rows of x that are no
token's embedding, `rope_positions`, and `encoded`, which encoder output each request reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from minivllm.attention.cross import FIRST_SLOT, Slots
from minivllm.batch import InputBatch, Overlay
from minivllm.plan import Join, StepPlan
from minivllm.request import Item
from minivllm.runner.memory import zeros


class ModelState(Protocol):
    width: int  # numbers a position of prompts that are given as embeddings; 0: it takes none
    contents: dict[str, bytes]  # by digest: what the items of all live requests hold; the worker fills it

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

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

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
        self.contents: dict[str, bytes] = {}
        self._vectors: dict[str, Tensor] = {}  # by digest: [length, width]
        self._items: dict[int, tuple[Item, ...]] = {}  # by row

    def encode(self, plan: StepPlan) -> None:
        for digest in plan.forget:
            self._vectors.pop(digest, None)
        for digest in plan.encode:
            vectors = _numbers(self.contents[digest]).view(-1, self.width)
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
    """K and V of encoder outputs, each in a slot of the cross layers' caches (attention/cross.py) while a request names
    it. An item's content is float32. Memory for a slot is taken when an item gets it and given back when that is
    forgotten, but for the first slot's: it is there from the start, and forwards that no request sees read it. How many
    there may be at once is the scheduler's to keep (scheduler/items.py)."""

    width = 0

    def __init__(self, model: Encodes, dtype: torch.dtype, device: torch.device, caches: Mapping[int, Slots]):
        """caches: by layer, of those of cross attention."""
        self._model, self._dtype, self._device, self._caches = model, dtype, device, caches
        self.contents: dict[str, bytes] = {}
        self._slots: dict[str, int] = {}  # by digest
        self._free = [FIRST_SLOT]
        self._slot_of: dict[int, int] = {}  # by row

    def encode(self, plan: StepPlan) -> None:
        for digest in plan.forget:
            if (slot := self._slots.pop(digest, None)) is not None:  # else the plan that named it has not run
                self._give_back(slot)
        for digest in plan.encode:
            if digest not in self._slots:  # as it is when a step is tried again
                self._slots[digest] = self._free.pop() if self._free else len(self._slots)
            numbers = _numbers(self.contents[digest]).view(self._model.input_shape)
            for layer, kv in self._model.encode(numbers.to(self._device, self._dtype)):
                self._keep(self._caches[layer], self._slots[digest], kv)

    def _keep(self, cache: Slots, slot: int, kv: Tensor) -> None:
        if slot not in cache:
            cache[slot] = zeros(tuple(kv.shape), self._dtype, self._device)
        cache[slot].copy_(kv)

    def _give_back(self, slot: int) -> None:
        self._free.append(slot)
        if slot != FIRST_SLOT:
            for cache in self._caches.values():
                cache.pop(slot, None)  # its encoder may have failed

    def join(self, row: int, join: Join) -> None:
        (item,) = join.items
        self._slot_of[row] = self._slots[item.digest]

    def leave(self, row: int) -> None:
        self._slot_of.pop(row, None)

    def prepare(self, batch: InputBatch) -> None:
        slots = (self._slot_of.get(row, FIRST_SLOT) for row in batch.rows.tolist())  # a dummy's rows have none
        batch.encoded = np.fromiter(slots, np.int64, len(batch.rows))


def _numbers(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.float32)


def make_state(model: nn.Module, width: int, dtype: torch.dtype, device: torch.device, caches: list[Any]) -> ModelState:
    """width: of the model's hidden states; caches: what each layer reads."""
    if hasattr(model, "make_state"):
        return model.make_state(device)
    cross = {i: caches[i] for i, layer in enumerate(model.attention_layers) if layer.cross is not None}
    return EncodedItems(model, dtype, device, cross) if cross else PromptEmbeds(width, dtype, device)
