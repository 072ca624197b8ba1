"""AdapterSlots: a worker's adapters. All that are loaded lie in host memory; those that a step needs are in slots.

    load(key) -> host --a step needs it--> slot --the least recently used goes for another--> host -> drop(key)

A slot is a place on the device for one adapter's matrices at their own rank (nothing is padded to max_rank; for the
Triton kernels, to the largest rank so far). The scheduler lets at most as many adapters run as there are slots
(lora/scheduling.py), so a step always finds its own. On a CPU the two are one memory, and what the kernel reads in a
slot is a packed copy (kernels/cpu/lora.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from minivllm.errors import AdapterError
from minivllm.layers.linear import Linear
from minivllm.layers.stored import Shard
from minivllm.lora.layer import Delta, LoRAMethod, Part, TorchProducts, choose_products
from minivllm.lora.peft import Matrices, Target, read_adapter
from minivllm.models.checkpoint import is_part, whole_of

if TYPE_CHECKING:
    from minivllm.kernels.dispatch import Dispatch
    from minivllm.plan import Join

NO_ADAPTER = 0  # the number of "" in AdapterSlots._number_of


class NoAdapters:
    """A worker without LoRA."""

    def join(self, row: int, join: Join) -> None:
        if join.adapter:
            raise AdapterError(f'the request names LoRA adapter "{join.adapter}", and LoRA is off (lora.enabled)')

    def leave(self, row: int) -> None:
        pass

    def are_used_by(self, rows: Iterable[int]) -> bool:
        return False

    def prepare(self, rows: np.ndarray, query_start: np.ndarray) -> None:
        pass  # no layer asks for groups

    def load(self, key: str, path: str) -> int:
        raise AdapterError("LoRA is off: turn it on with lora.enabled=true")

    def drop(self, key: str) -> None:
        raise AdapterError("LoRA is off: turn it on with lora.enabled=true")


@dataclass(slots=True)
class _Loaded:
    number: int
    deltas: dict[str, Delta]  # by the name of our module, on the host


class AdapterSlots:
    def __init__(
        self,
        model: nn.Module,
        num_slots: int,
        max_rank: int,
        max_rows: int,
        dtype: torch.dtype,
        kernels: Dispatch | None = None,
    ):
        """Wraps the linear layers of a model that is loaded and finished. max_rows: requests that a worker can hold.
        kernels: of the engine; None: no Triton kernel is asked for."""
        self._places, self._weights = linear_places(model), model.weights
        modules = {ours: model.get_submodule(ours) for ours, _ in self._places.values()}
        whole = whole_of(model) if is_part(model) else model
        self._targets, self._parts = targets(whole), parts_of_fused(whole)
        self._rows_of = {ours: module.rows for ours, module in modules.items()}
        self._shards_of = {ours: module.shards for ours, module in modules.items()}
        self._max_rank, self._dtype = max_rank, dtype
        self._device = next(model.parameters()).device
        kind, self.reason = choose_products(self._device, dtype, kernels)
        self._step = kind.Step(self._device)
        self._products: dict[str, TorchProducts] = {}
        for name, module in modules.items():
            self._products[name] = kind(self._step, num_slots, module)
            module.method = LoRAMethod(module.method, self._products[name])
        self._loaded: dict[str, _Loaded] = {}
        self._key_of: dict[int, str] = {}
        self._num_loads = 0
        self._slot_of: dict[int, int] = {}  # adapter number -> slot, the least recently used first
        self._free = list(range(num_slots))
        self._number_in = np.zeros(max_rows, np.int64)  # row -> adapter number

    # --- loading

    def load(self, key: str, path: str) -> int:
        """Read an adapter into host memory; its largest rank. Raises AdapterError."""
        assert key not in self._loaded, f"{key} is loaded already"
        matrices = self._unfused(read_adapter(path, self._targets, self._max_rank))
        self._num_loads += 1
        self._loaded[key] = _Loaded(self._num_loads, self._stack(matrices))
        self._key_of[self._num_loads] = key
        return max(m.a.shape[0] for m in matrices.values())

    def drop(self, key: str) -> None:
        """Forget an adapter that no live request uses."""
        loaded = self._loaded.pop(key)
        del self._key_of[loaded.number]
        slot = self._slot_of.pop(loaded.number, None)
        if slot is not None:
            self._fill(slot, {})
            self._free.append(slot)

    def _unfused(self, matrices: dict[str, Matrices]) -> dict[str, Matrices]:
        """A change of a matrix that the checkpoint keeps fused, as one of each of its parts: the same A, its rows of
        B."""
        found = {}
        for module, own in matrices.items():
            parts = self._parts.get(module, {module: own.b.shape[0]})
            for part, b in zip(parts, own.b.split(list(parts.values())), strict=True):
                found[part] = own._replace(b=b)
        return found

    def _stack(self, matrices: dict[str, Matrices]) -> dict[str, Delta]:
        """The checkpoint's modules gathered into ours, in the model's dtype."""
        of_module: dict[str, list[tuple[str, Matrices]]] = {}
        for packed, found in matrices.items():
            for theirs, rows in self._weights.parts(packed, found.b).items():
                if theirs not in self._places:
                    continue  # a layer of another rank
                ours, part = self._places[theirs]
                own = _held(found._replace(b=rows), self._shards_of[ours].get(part))
                of_module.setdefault(ours, []).append((part, own))
        return {ours: self._delta(ours, parts) for ours, parts in of_module.items()}

    def _delta(self, module: str, found: list[tuple[str, Matrices]]) -> Delta:
        parts, start = [], 0
        for name, (a, b, scale) in found:
            end = start + a.shape[0]
            scaled = (b.float() * scale).T.to(self._dtype).contiguous()
            parts.append(Part(slice(start, end), self._rows_of[module][name], scaled))
            start = end
        return Delta(torch.cat([m.a.to(self._dtype) for _, m in found]), tuple(parts))

    # --- a step

    def join(self, row: int, join: Join) -> None:
        self._number_in[row] = self._loaded[join.adapter].number if join.adapter else NO_ADAPTER

    def leave(self, row: int) -> None:
        self._number_in[row] = NO_ADAPTER

    def are_used_by(self, rows: Iterable[int]) -> bool:
        """Whether some request of these rows has an adapter."""
        return bool((self._number_in[np.fromiter(rows, np.int64)] != NO_ADAPTER).any())

    def prepare(self, rows: np.ndarray, query_start: np.ndarray) -> None:
        """Group the tokens of this step by slot, bringing in the adapters that have none. Both as in InputBatch."""
        numbers = self._number_in[rows]  # [R]
        used = np.unique(numbers[numbers != NO_ADAPTER]).tolist()
        self._make_resident(used)
        of_token = np.repeat(numbers, np.diff(query_start))  # [T]
        self._step.set([(self._slot_of[n], np.flatnonzero(of_token == n)) for n in used])

    def _make_resident(self, used: list[int]) -> None:
        for number in used:  # those that are here become the most recently used, before anybody is evicted
            if (slot := self._slot_of.pop(number, None)) is not None:
                self._slot_of[number] = slot
        for number in used:
            if number not in self._slot_of:
                self._slot_of[number] = self._take_slot(used)
                self._fill(self._slot_of[number], self._loaded[self._key_of[number]].deltas)

    def _take_slot(self, used: Iterable[int]) -> int:
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._slot_of))
        assert oldest not in used, "a step has more adapters than there are slots"
        return self._slot_of.pop(oldest)

    def _fill(self, slot: int, deltas: dict[str, Delta]) -> None:
        for name, products in self._products.items():
            delta = deltas.get(name)
            products.fill(slot, delta and self._to_device(delta))

    def _to_device(self, delta: Delta) -> Delta:
        parts = tuple(part._replace(b=part.b.to(self._device)) for part in delta.parts)
        return Delta(delta.a.to(self._device), parts)

    @property
    def resident(self) -> list[str]:
        """Keys of the adapters in slots, the least recently used first."""
        return [self._key_of[number] for number in self._slot_of]


def linear_places(model: nn.Module) -> dict[str, tuple[str, str]]:
    """{module of the checkpoint: (our linear layer, its part)}, of the decoder's layers: what an adapter may change."""
    return {
        theirs: (ours, part)
        for theirs, (ours, part) in model.checkpoint_modules().items()
        if ours.startswith(model.stack) and isinstance(model.get_submodule(ours), Linear)
    }


def targets(model: nn.Module) -> dict[str, Target]:
    """{module of the files: its shape}, of what an adapter may change. Several of ours may be one there."""
    found: dict[str, Target] = {}
    for theirs, (ours, part) in linear_places(model).items():
        own, name = _target(model.get_submodule(ours), part), model.weights.kept_in(theirs)
        found[name] = Target(own.n_in, own.n_out + (found[name].n_out if name in found else 0))
    for module, parts in parts_of_fused(model).items():
        n_in = [found.pop(part).n_in for part in parts][0]
        found[module] = Target(n_in, sum(parts.values()))
    return found


def parts_of_fused(model: nn.Module) -> dict[str, dict[str, int]]:
    """{module that the checkpoint has: {module that its map names: how many outputs}}, of matrices that it keeps
    fused (WeightMap)."""
    places, found = linear_places(model), {}
    for fused, parts in model.weights.fused.items():
        prefixes = [theirs.removesuffix(parts[0]) for theirs in places if theirs.endswith(f".{parts[0]}")]
        for prefix in prefixes:
            of = {f"{prefix}{part}": places[f"{prefix}{part}"] for part in parts}
            found[f"{prefix}{fused}"] = {
                theirs: _target(model.get_submodule(ours), rows).n_out for theirs, (ours, rows) in of.items()
            }
    return found


def _target(linear: Linear, part: str) -> Target:
    rows = linear.rows[part]
    return Target(linear.n_in, rows.stop - rows.start)


def _held(matrices: Matrices, shard: Shard | None) -> Matrices:
    """What changes the outputs that a layer holds: their rows of B; or what reads the inputs that it holds: their
    columns of A, whose products the ranks' sum then adds."""
    if shard is None:
        return matrices
    own = slice(shard.start, shard.stop)
    return matrices._replace(b=matrices.b[own]) if shard.along == "outputs" else matrices._replace(a=matrices.a[:, own])
