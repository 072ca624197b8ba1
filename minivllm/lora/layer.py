"""What LoRA adds to a linear layer: y += scale * B A x for each token, with the matrices of its request's adapter.

`LoRAMethod` decorates whatever method a layer has, so the base weight may be packed or quantised. Which tokens belong
to which adapter is decided once a step (`TokenGroups`, set by lora/slots.py), for all layers alike: the tokens of one
adapter are multiplied together (Punica's SGMV, Chen et al. 2023), tokens without an adapter are not touched.

Three ways to multiply. `TorchProducts` runs everywhere: two small products a group and part. For a decode step's few
tokens these calls cost more than their arithmetic, so on a CPU `KernelProducts` hands all small groups of a layer to
one call of a C++ kernel (kernels/cpu/lora.cpp) and only large ones, such as a long prompt, to torch. On a GPU
`TritonProducts` takes two launches for all groups and parts of a layer (kernels/triton/shrink_expand.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minivllm.compile.context import aside
from minivllm.kernels.cpu import lora as cpu_kernel
from minivllm.layers.linear import Linear, QuantMethod, Unquantized
from minivllm.upload import upload

if TYPE_CHECKING:
    from minivllm.kernels.dispatch import Dispatch


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


class TokenGroups:
    """This step's groups; none if nobody in it uses an adapter. One object, shared by every layer."""

    def __init__(self, device: torch.device):
        self.device = device
        self.groups: Sequence[Group] = ()

    def set(self, found: Sequence[tuple[int, np.ndarray]]) -> None:
        """found: (slot, its token rows in order)."""
        self.groups = [Group(slot, self._rows(tokens)) for slot, tokens in found]

    def _rows(self, tokens: np.ndarray) -> slice | Tensor:
        first, last = int(tokens[0]), int(tokens[-1])
        if last - first + 1 == len(tokens):
            return slice(first, last + 1)
        return upload(tokens, self.device)


class TorchProducts:
    """One layer's deltas by slot."""

    Step = TokenGroups

    def __init__(self, step: TokenGroups, num_slots: int, layer: Linear):
        self.step = step
        self.deltas: list[Delta | None] = [None] * num_slots

    def fill(self, slot: int, delta: Delta | None) -> None:
        self.deltas[slot] = delta

    @property
    def in_one_call(self) -> bool:
        """Whether the kernel alone does this step's work, so that it may be called from C++."""
        return False

    def add(self, y: Tensor, x: Tensor) -> None:
        """y [T, n_out] += what this step's adapters add for x [T, n_in]."""
        if self.step.groups:
            add_deltas(y, x, self.step.groups, self.deltas)


class KernelGroups(TokenGroups):
    """Groups of at most MAX_TOKENS are the kernel's, the others remain in `groups`."""

    MAX_TOKENS = 256

    tasks: cpu_kernel.Tasks | None = None

    def set(self, found: Sequence[tuple[int, np.ndarray]]) -> None:
        small = [group for group in found if len(group[1]) <= self.MAX_TOKENS]
        self.tasks = cpu_kernel.Tasks(small) if small else None
        super().set([group for group in found if len(group[1]) > self.MAX_TOKENS])


class KernelProducts(TorchProducts):
    Step = KernelGroups

    def __init__(self, step: KernelGroups, num_slots: int, layer: Linear):
        super().__init__(step, num_slots, layer)
        self.table = cpu_kernel.SlotTable(num_slots, layer.n_in, max(rows.stop for rows in layer.rows.values()))

    def fill(self, slot: int, delta: Delta | None) -> None:
        super().fill(slot, delta)
        self.table.clear(slot) if delta is None else self.table.fill(slot, *delta)

    @property
    def in_one_call(self) -> bool:
        return not self.step.groups

    def add(self, y: Tensor, x: Tensor) -> None:
        if self.step.tasks is not None:
            self.table.add(y, x, self.step.tasks)
        super().add(y, x)


class TritonGroups(TokenGroups):
    """All groups are the kernels', as tasks. Layers that these do not fit read `groups`."""

    tasks: Any = None  # kernels.triton.lora.Tasks

    def set(self, found: Sequence[tuple[int, np.ndarray]]) -> None:
        from minivllm.kernels.triton.lora import Tasks

        self.tasks = Tasks(found, self.device) if found else None
        super().set(found)


class TritonProducts(TorchProducts):
    """The adapters' matrices lie in one table, in which each has as many ranks as the largest so far: it is made for
    the first adapter, and grows for one of more ranks. A layer of which some part does not begin and end at multiples
    of 16 is left to torch."""

    Step = TritonGroups

    def __init__(self, step: TritonGroups, num_slots: int, layer: Linear):
        super().__init__(step, num_slots, layer)
        self.n_in, self.columns = layer.n_in, list(layer.rows.values())
        self.fits = all(part.start % 16 == part.stop % 16 == 0 for part in self.columns)
        self.table: Any = None  # kernels.triton.lora.SlotTable

    def fill(self, slot: int, delta: Delta | None) -> None:
        if not self.fits:
            super().fill(slot, delta)
        elif delta is not None:
            self._make_room(delta)
            self.table.fill(slot, *delta)
        elif self.table is not None:
            self.table.clear(slot)

    def _make_room(self, delta: Delta) -> None:
        from minivllm.kernels.triton.lora import SlotTable

        rank = max(part.ranks.stop - part.ranks.start for part in delta.parts)
        if self.table is None:
            where = delta.a.dtype, delta.a.device
            self.table = SlotTable(len(self.deltas), self.n_in, self.columns, rank, *where)
        elif rank > self.table.sizes.rank:
            self.table = self.table.grown(rank)

    def add(self, y: Tensor, x: Tensor) -> None:
        if not self.fits:
            super().add(y, x)
        elif self.step.tasks is not None and self.table is not None:
            self.table.add(y, x, self.step.tasks)


def proves_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Tokens of two adapters of different ranks, and one without; a part that one of them leaves alone."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / 8).to(device, dtype)

    layer = Linear(96, {"a": 32, "b": 48}, dtype=dtype, method=Unquantized())
    a, b = layer.rows.values()
    deltas = [
        Delta(random(8, 96), (Part(slice(0, 4), a, random(4, 32)), Part(slice(4, 8), b, random(4, 48)))),
        Delta(random(20, 96), (Part(slice(0, 20), b, random(20, 48)),)),
    ]
    step = TritonGroups(device)
    products = TritonProducts(step, len(deltas), layer)
    for slot, delta in enumerate(deltas):
        products.fill(slot, delta)
    step.set([(1, np.array([0, 3, 4])), (0, np.array([2, 5]))])
    x, y = random(7, 96), random(7, 80)
    wanted = y.double()
    add_deltas_naive(wanted, x, step.groups, deltas)
    products.add(y, x)
    unit = torch.finfo(dtype).eps
    return torch.allclose(y.double(), wanted, atol=8 * unit, rtol=4 * unit)


class ProductsChoice(NamedTuple):
    kind: type[TorchProducts]
    reason: str


def choose_products(device: torch.device, dtype: torch.dtype, kernels: Dispatch | None = None) -> ProductsChoice:
    """kernels: of the engine; None: Triton's are not asked for."""
    if kernels is not None and kernels.uses("lora", lambda device: proves_triton(device, dtype)):
        return ProductsChoice(TritonProducts, "two Triton launches a layer for all adapters of a step")
    if device.type != "cpu":
        return ProductsChoice(TorchProducts, f"two products a group: no kernel is used on this {device.type} device")
    if dtype not in cpu_kernel.DTYPES:
        return ProductsChoice(TorchProducts, f"two products a group: the kernel does not take {dtype}")
    if (why := cpu_kernel.unsupported_reason()) is not None:
        return ProductsChoice(TorchProducts, f"two products a group: {why}")
    return ProductsChoice(KernelProducts, "one C++ call a layer for all adapters of a decode step")


class LoRAMethod:
    """A QuantMethod around the one that a layer has."""

    traceable = False  # what it adds changes from step to step

    def __init__(self, inner: QuantMethod, products: TorchProducts):
        self.inner = inner
        self.products = products

    def create(self, layer: nn.Module, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        self.inner.create(layer, n_in, n_out, dtype)

    def finish(self, layer: nn.Module) -> None:
        self.inner.finish(layer)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        y = self.inner.apply(layer, x)
        aside(self.products.add, y, x)
        return y
