"""Operations that a traced graph names but does not look into, and at which it is split.

Attention is one: it reads the step's context. Any other that a compiler cannot take is registered the same way: a
product over packed weights that chooses its kernel by the number of tokens, a library's call on a layout of its own.
The compiled parts before and after it are called in turn with it, and it runs as it would without compiling.

    packed_linear = opaque(
        "packed_linear(Tensor x, Tensor packed, int threshold) -> Tensor",
        run=lambda x, packed, threshold: ...,
        fake=lambda x, packed, threshold: x.new_empty(x.shape[0], packed.shape[0]),
    )

What changes from step to step must reach it as a tensor of the model (a parameter, a buffer or a plain attribute of a
module) or through a context variable; numbers are constants of the trace, and a string names a module of the model,
which `run` gets in its place.

An object whose class says `traceable = False` (a ctypes structure, a table of pointers) is no part of a trace: it is
neither sent to a builder nor described in a program's key. Where it is a linear layer's method, the layer becomes the
operation `linear`, and what its method is and does, packed weights or adapters, is found when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "minivllm"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_run: dict[Any, Callable[..., Any]] = {}  # OpOverload -> what it does
_by_name: dict[str, Callable[..., Any]] = {}


def opaque(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register minivllm::<schema> and return the operation, to be called in a model's forward.

    schema: in torch's notation, with one tensor or nothing as its result; arguments are tensors, numbers, strings,
    lists of numbers or None, and an argument that is written to is marked: Tensor(a!).
    run: on real tensors. fake: what shape and dtype would come out, for any number of tokens (no branch on it).
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    operation = getattr(getattr(torch.ops, NAMESPACE), name).default
    _run[operation] = _by_name[name] = run
    return operation


def is_traceable(value: Any) -> bool:
    return getattr(type(value), "traceable", True)


def _linear(x: Tensor, out: Tensor, layer: Any) -> None:
    out.copy_(layer.method.apply(layer, x))


# Its result is memory that a piece before it has made, so that pieces may be captured.
_linear_op = opaque("linear(Tensor x, Tensor(a!) out, str layer) -> ()", _linear, lambda *_: None)


class OpaqueMethod:
    """In a trace, for a QuantMethod that cannot be traced. name: of the layer."""

    name = ""

    def apply(self, layer: Any, x: Tensor) -> Tensor:
        """x [T, n_in] -> [T, n_out] of x's dtype."""
        out = x.new_empty(x.shape[0], max(rows.stop for rows in layer.rows.values()))
        _linear_op(x, out, self.name)
        return out


def is_opaque(target: Any) -> bool:
    return target in _run


def name_of(operation: Any) -> str:
    return operation.name().partition("::")[2].partition(".")[0]


def find(name: str) -> Callable[..., Any]:
    """What the operation of this name runs, without torch's dispatcher. Raises KeyError: nobody registered it."""
    return _by_name[name]
