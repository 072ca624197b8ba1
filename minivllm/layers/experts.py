"""A mixture of experts (Shazeer et al. 2017): a router gives each token to a few of many small MLPs, and their results
are added by its weights.

    router    softmax over all experts, the top k of it, divided by their sum where the model is made so
    experts   SwiGLU of a size of its own, as MLP of minivllm/models/decoder.py; the matrices of all lie in two stacks

The router multiplies in float32 whatever the model's dtype is: which experts are taken is a jump, and logits of 8 bits
would often be equal. Two ways to compute the experts, chosen when the model is loaded: `TorchExperts` and
`TritonExperts`. In both a token's numbers depend on its neighbours as those of a linear layer do, by the rounding of
products of several rows, and its experts are added in the order of its own choice.

The experts' matrices keep the model's dtype. On a CPU they are multiplied by F.linear: neither packed in 4 or 8 bits
nor as the tiles of layers/linear.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.compile.context import aside
from minivllm.compile.opaque import opaque
from minivllm.layers.linear import NO_SHARDS, QuantMethod, Unquantized, empty_parameter, row_ranges
from minivllm.layers.stored import Shard, TensorSpec, whole

if TYPE_CHECKING:
    from minivllm.kernels.dispatch import Dispatch


class Routes(NamedTuple):
    """Of each token, its experts, the heaviest first."""

    ids: Tensor  # [T, top_k] int64, no two of a token equal
    weights: Tensor  # [T, top_k] float32


class Router(nn.Module):
    def __init__(self, n_in: int, num_experts: int, top_k: int, normalised: bool):
        super().__init__()
        self.top_k, self.normalised = top_k, normalised
        self.weight = empty_parameter(num_experts, n_in, dtype=torch.float32)

    def forward(self, x: Tensor) -> Routes:
        """x [T, n_in] -> Routes."""
        shares = F.linear(x.float(), self.weight).softmax(-1)  # [T, experts]
        weights, ids = shares.topk(self.top_k, -1)
        return Routes(ids, weights / weights.sum(-1, keepdim=True) if self.normalised else weights)


class MatrixStack(nn.Module):
    """A matrix of every expert, each of stacked `parts` as Linear's. rows: of "{expert}.{part}". Its method says what
    the checkpoint keeps them in; what `Products` multiply is `weight` [experts, n_out, n_in]."""

    shards: Mapping[str, Shard] = NO_SHARDS

    def __init__(self, num_experts: int, n_in: int, parts: dict[str, int], dtype: torch.dtype, first: int = 0):
        super().__init__()
        own = row_ranges(parts)
        self.n_in, self.shape = n_in, (num_experts, sum(parts.values()), n_in)
        self.rows = {f"{first + e}.{part}": (e, rows) for e in range(num_experts) for part, rows in own.items()}
        self.method: QuantMethod = UnquantizedStack()
        self.method.create(self, n_in, sum(parts.values()), dtype)

    def declared(self, part: str) -> tuple[TensorSpec, ...]:
        """What of the checkpoint a matrix is read from."""
        shard, (_, rows) = self.shards.get(part), self.rows[part]
        n_out = whole(rows.stop - rows.start, "outputs", shard)
        return self.method.tensors(part, n_out, whole(self.n_in, "inputs", shard))

    def finish(self) -> None:
        self.method.finish(self)


class UnquantizedStack(Unquantized):
    """The checkpoint's matrices as they are."""

    def create(self, layer: nn.Module, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        layer.weight = empty_parameter(*layer.shape, dtype=dtype)


class Products(Protocol):
    """How the experts are computed."""

    capture_unsupported_reason: ClassVar[str | None]  # why no capture may hold it, or None

    def __call__(self, x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
        """x [T, hidden], gate_up [experts, 2 * size, hidden], down [experts, hidden, size] -> like x."""
        ...


def _by_expert(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, gate_up: Tensor, down: Tensor) -> None:
    order = ids.flatten().argsort(stable=True)  # of pairs (token, one of its experts), by expert
    tokens, pair_weights = order // ids.shape[1], weights.flatten()[order]
    found, counts = ids.flatten()[order].unique_consecutive(return_counts=True)
    parts, start = x.new_empty(len(order), x.shape[1]), 0  # of each pair, in the order of tokens
    for e, count in zip(found.tolist(), counts.tolist(), strict=True):
        own = slice(start, start + count)
        gate, up = F.linear(x[tokens[own]], gate_up[e]).chunk(2, -1)
        results = F.linear(F.silu(gate).mul_(up), down[e])
        parts[order[own]] = (results * pair_weights[own, None]).to(x.dtype)
        start += count
    torch.sum(parts.view(*ids.shape, x.shape[1]), 1, out=out)


def _in_kernel(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, gate_up: Tensor, down: Tensor) -> None:
    _kernel()(x, ids, weights, gate_up, down, out)


def _kernel() -> Callable[..., Tensor]:
    from minivllm.kernels.triton.moe import moe

    return moe


_ARGUMENTS = "(Tensor x, Tensor ids, Tensor weights, Tensor(a!) out, Tensor gate_up, Tensor down) -> ()"
_by_expert_op = opaque("experts" + _ARGUMENTS, _by_expert, lambda *_: None)
_in_kernel_op = opaque("experts_in_kernel" + _ARGUMENTS, _in_kernel, lambda *_: None)


class TorchExperts:
    """Pairs sorted by expert, and two products for each expert that has some: a step of one token reads the matrices of
    its own experts alone. The host must know how many pairs each has, so it is done aside of captures."""

    capture_unsupported_reason = "torch computes its experts, and asks which of them have tokens (runner.kernels=torch)"

    def __call__(self, x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        aside(_by_expert_op, x, *routes, out, gate_up=gate_up, down=down)
        return out


class TritonExperts:
    """Four launches, whose grids follow from the number of tokens (kernels/triton/experts.py): a capture may hold
    them."""

    capture_unsupported_reason = None

    def __call__(self, x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _in_kernel_op(x, *routes, out, gate_up, down)
        return out


class Experts(nn.Module):
    """first: the checkpoint's number of the first of them."""

    def __init__(self, n_in: int, size: int, num_experts: int, dtype: torch.dtype, first: int = 0):
        super().__init__()
        self.gate_up = MatrixStack(num_experts, n_in, {"gate": size, "up": size}, dtype, first)
        self.down = MatrixStack(num_experts, size, {"": n_in}, dtype, first)
        self.products: Products = TorchExperts()

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        return self.products(x, routes, self.gate_up.weight, self.down.weight)


class SparseMLP(nn.Module):
    """What stands where a dense layer has its MLP."""

    def __init__(self, router: Router, experts: Experts):
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, x: Tensor) -> Tensor:
        """x [T, n_in] -> like x."""
        return self.experts(x, self.router(x))


class MixtureMLP(nn.Module):
    """Chosen experts, and shared ones: these are one MLP, as wide as all of them."""

    def __init__(self, routed: SparseMLP, shared: nn.Module):
        super().__init__()
        self.routed, self.shared = routed, shared

    def forward(self, x: Tensor) -> Tensor:
        """x [T, n_in] -> like x."""
        return self.routed(x) + self.shared(x)


def experts_of(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def choose_experts(model: nn.Module, dtype: torch.dtype, kernels: Dispatch | None) -> None:
    """Once, when the model is loaded. kernels: of the engine; None: Triton's are not asked for."""
    found = experts_of(model)

    def proof(device: torch.device) -> bool:
        from minivllm.kernels.triton import proofs

        return proofs.experts(device, dtype)

    if found and kernels is not None and kernels.uses("layer of experts", proof):
        for experts in found:
            experts.products = TritonExperts()
