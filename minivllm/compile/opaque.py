"""Operations that a traced graph names but does not look into, and at which it is split.

Attention is one: it reads the step's context. Any other that a compiler cannot take is registered the same way: a
product over packed weights that chooses its kernel by the number of tokens, a library's call on a layout of its own.
The compiled parts before and after it are called in turn with it, and it runs as it would without compiling.

    packed_linear = opaque(
        "packed_linear(Tensor x, Tensor packed, int threshold) -> Tensor",
        run=lambda x, packed, threshold: ...,
        fake=lambda x, packed, threshold: x.new_empty(x.shape[0], packed.shape[0]),
    )

A whole module is opaque if it has an `opaque_size`: see OpaqueModule.

What changes from step to step must reach it as a tensor of the model (a parameter, a buffer or a plain attribute of a
module) or through a context variable; numbers and strings are constants of the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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


def is_opaque(target: Any) -> bool:
    return target in _run


def name_of(operation: Any) -> str:
    return operation.name().partition("::")[2].partition(".")[0]


def find(name: str) -> Callable[..., Any]:
    """What the operation of this name runs, without torch's dispatcher. Raises KeyError: nobody registered it."""
    return _by_name[name]


def _unbound(x: Tensor, path: str, size: int) -> Tensor:
    raise AssertionError(f"{path}: a program calls the model's own module")


CALL_MODULE = "call_module"
_call_module = opaque(
    f"{CALL_MODULE}(Tensor x, str path, int size) -> Tensor",
    _unbound,
    lambda x, path, size: x.new_empty(x.shape[0], size),
)


class OpaqueModule(nn.Module):
    """Stands in a trace for a module whose `opaque_size` is not None: x [T, any] -> [T, opaque_size] in x's dtype.

    The program calls the module itself, as eager code would, so whatever it reads may change from step to step.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.path = ""  # in the model, set by the trace

    def forward(self, x: Tensor) -> Tensor:
        return _call_module(x, self.path, self.size)
