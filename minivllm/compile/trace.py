"""A model's forward as one graph of torch operations, for any number of tokens, without running it.

The trace is made on fake tensors (shapes without data), so neither weights nor a forward context are needed, and the
number of tokens is an unbacked size: a branch on it cannot be taken, it raises. So the graph that comes out holds for
every number of tokens and there are no guards to check or to drop; the tests assert that none was recorded.

Weights are inputs of the graph, by the names of the attributes that hold them. This lets equal layers share code, and
lets another process trace: `skeleton` is the model pickled without its weights.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.compile.opaque import OpaqueMethod, is_traceable

INPUTS = ("x", "positions")  # of every model's forward: [T, hidden]; [T] int64, or [position_rows, T]


@dataclass(frozen=True, slots=True)
class Trace:
    graph: Any  # torch.fx.GraphModule; placeholders are INPUTS, then the weights
    weights: list[str]
    fake_mode: Any
    num_tokens: Any  # the symbol T


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a module of the model holds: parameters, buffers and plain attributes (packed weights)."""
    return {name: holder[key] for name, (holder, key) in _places(model).items()}


def _places(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    places = {}
    for path, module in model.named_modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            for key, value in holder.items():
                if isinstance(value, Tensor):
                    places[f"{path}.{key}" if path else key] = (holder, key)
    return places


def skeleton(model: nn.Module) -> bytes:
    """The model without its weights: modules, shapes and dtypes. For `trace`, here or in another process."""
    file = io.BytesIO()
    _SkeletonPickler(file, pickle.HIGHEST_PROTOCOL).dump(model)
    return file.getvalue()


class _SkeletonPickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if not is_traceable(value):
            return "method" if hasattr(value, "apply") else "nothing"
        if isinstance(value, Tensor):  # a packed weight has no strides; it is passed through, never read
            strides = None if value.is_mkldnn else value.stride()
            return id(value), tuple(value.shape), value.dtype, strides, str(value.device)
        return None


class _FakeUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, fake_mode: Any):
        super().__init__(file)
        self.fake_mode = fake_mode
        self.made: dict[int, Tensor] = {}  # tensors that were shared stay shared

    def persistent_load(self, key: Any) -> Any:
        if isinstance(key, str):
            return OpaqueMethod() if key == "method" else None
        identity, shape, dtype, strides, device = key
        if identity not in self.made:
            with self.fake_mode, torch.device(device):
                packed = strides is None
                self.made[identity] = (
                    torch.empty(shape, dtype=dtype) if packed else torch.empty_strided(shape, strides, dtype=dtype)
                )
        return self.made[identity]


def trace(pickled: bytes) -> Trace:
    """The graph of a skeleton's forward. Raises what torch raises if the forward depends on the number of tokens."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv()
    fake_mode = FakeTensorMode(shape_env=shapes)
    model = _FakeUnpickler(io.BytesIO(pickled), fake_mode).load()
    for name, module in model.named_modules():
        if isinstance(getattr(module, "method", None), OpaqueMethod):
            module.method = OpaqueMethod()  # layers may have shared one
            module.method.name = name
    places = _places(model)
    weights = [holder[key] for holder, key in places.values()]
    device = next((weight.device for weight in weights), torch.device("cpu"))
    with fake_mode, device, shapes.ignore_fresh_unbacked_symbols():
        num_tokens = shapes.create_unbacked_symint()
        torch._check(num_tokens >= 0)
        rows = getattr(model, "position_rows", 1)
        positions = torch.empty((num_tokens,) if rows == 1 else (rows, num_tokens), dtype=torch.int64)
        inputs = model.embed(torch.empty(num_tokens, dtype=torch.int64)), positions

    def forward(x: Tensor, positions: Tensor, *weights: Tensor) -> Tensor:
        for (holder, key), weight in zip(places.values(), weights, strict=True):
            holder[key] = weight
        return model(x, positions)

    with torch.no_grad(), enable_python_dispatcher():
        graph = make_fx(forward, tracing_mode="real")(*inputs, *weights)
    assert not shapes.guards, f"the forward was specialised: {[str(guard.expr) for guard in shapes.guards]}"
    graph.graph.eliminate_dead_code()
    return Trace(graph, list(places), fake_mode, num_tokens)
