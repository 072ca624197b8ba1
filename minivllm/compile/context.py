"""What attention needs and a model's forward must not carry: the one ambient value of the engine.

A model calls `attend(q, k, v, layer)`. The KV cache, the block tables and the backend come from a context variable that
the runner sets for the length of one forward. So a model is a function of (x, positions) alone, which is what
lets it be traced once, split at this call and captured (vLLM's `forward_context`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minivllm.compile.opaque import opaque

if TYPE_CHECKING:
    from minivllm.attention.base import AttentionBackend, AttentionSpec


@dataclass(frozen=True, slots=True)
class ForwardContext:
    backend: AttentionBackend
    meta: Any  # what backend.prepare() returned for this step
    kv_caches: list[Tensor]  # one a layer, of backend.kv_shape()
    layers: list[AttentionSpec]
    interrupt: Callable[..., None] | None = None  # while a capture is made: gets what `aside` is called with


_current: ContextVar[ForwardContext] = ContextVar("minivllm_forward_context")


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    assert _current.get(None) is None, "a forward must not run inside another one"
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def run_forward(
    forward: Callable[[Any], Tensor],
    batch: Any,
    backend: AttentionBackend,
    kv_caches: list[Tensor],
    layers: list[AttentionSpec],
) -> Tensor:
    """forward(batch) -> hidden [T, hidden], while attention finds what belongs to it. Every forward of the engine is
    run here. What a batch is, is between the backend and `forward`."""
    with forward_context(ForwardContext(backend, backend.prepare(batch), kv_caches, layers)):
        return forward(batch)


@contextmanager
def interrupted_by(interrupt: Callable[..., None]) -> Iterator[None]:
    """Inside of a forward: whatever is done aside is handed over instead of being done."""
    token = _current.set(replace(current(), interrupt=interrupt))
    try:
        yield
    finally:
        _current.reset(token)


def current() -> ForwardContext:
    """Of the forward that runs now."""
    context = _current.get()
    assert context is not None, "outside of a forward"
    return context


def aside(run: Callable[..., None], *tensors: Tensor, **constants: Any) -> None:
    """run(*tensors, **constants): it changes tensors, by what this step alone knows, so no capture may hold it."""
    context = _current.get(None)
    if context is None or context.interrupt is None:
        run(*tensors, **constants)
    else:
        context.interrupt(run, *tensors, **constants)


def _attend_into(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
    context = _current.get()
    context.backend.forward(q, k, v, context.kv_caches[layer], context.meta, context.layers[layer], out)


# Mutates `out` alone as far as a compiler can see: the cache is not among its arguments, because Inductor would copy a
# view of it that is written to (pytorch #131192).
_attend_op = opaque(
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer) -> ()", _attend_into, lambda *_: None
)


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    """Write k and v into layer's cache, then attend. q [T, heads, head_size], k and v [T, kv_heads, head_size] -> like
    q, contiguous. Outside of a forward context the model is being traced: then it is an operation of the graph."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if _current.get(None) is None:
        _attend_op(q, k, v, out, layer)
    else:
        aside(_attend_into, q, k, v, out, layer=layer)
    return out


def attend_latent(q: Tensor, latent: Tensor, expand: Tensor, value_size: int, layer: int) -> Tensor:
    """The same in a layer that keeps a latent vector (attention/base.py: LatentBackend). q [T, heads, head_size],
    latent [T, rank + rope_size], expand [heads, head_size - rope_size + value_size, rank] -> [T, heads, value_size]."""
    out = q.new_empty(*q.shape[:2], value_size)
    if _current.get(None) is None:
        _attend_op(q, latent, expand, out, layer)
    else:
        aside(_attend_into, q, latent, expand, out, layer=layer)
    return out


def attend_state(qkv: Tensor, gates: Tensor, weights: Tensor, value_size: int, layer: int) -> Tensor:
    """The same in a layer with a recurrent state (attention/base.py: StateBackend). qkv [T, channels], gates [T, 2,
    heads] float32, weights [kernel + 2, channels] float32 -> [T, heads, value_size] float32."""
    out = gates.new_empty(gates.shape[0], gates.shape[2], value_size)
    if _current.get(None) is None:
        _attend_op(qkv, gates, weights, out, layer)
    else:
        aside(_attend_into, qkv, gates, weights, out, layer=layer)
    return out


def attend_cross(q: Tensor, layer: int) -> Tensor:
    """The same in a layer of cross attention, which writes nothing (attention/base.py: CrossBackend). q [T, heads,
    head_size] -> like q, contiguous."""
    return attend(q, q, q, layer)


class Rope(NamedTuple):
    """How q and k are normed and rotated."""

    positions: Tensor  # [T] int64
    cos: Tensor  # [max_position, head_size / 2]
    sin: Tensor  # like cos
    weight: Tensor | None  # [2, head_size]: of q's RMSNorm and of k's; None: no norm
    eps: float


def _attend_with_rope_into(
    qkv: Tensor, positions: Tensor, out: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, layer: int
) -> None:
    context, rope = _current.get(), Rope(positions, cos, sin, weight, eps)
    context.backend.rope_and_attend(qkv, rope, context.kv_caches[layer], context.meta, context.layers[layer], out)


_attend_with_rope_op = opaque(
    "attend_with_rope(Tensor qkv, Tensor positions, Tensor(a!) out, Tensor cos, Tensor sin, Tensor? weight, float eps, "
    "int layer) -> ()",
    _attend_with_rope_into,
    lambda *_: None,
)


def attend_with_rope(qkv: Tensor, rope: Rope, num_heads: int, layer: int) -> Tensor:
    """As attend, of q, k and v [T, heads + 2 kv_heads, head_size] as the product gave them: for a backend that norms,
    rotates and writes them to the cache in one launch (`rope_and_attend`). -> [T, heads, head_size]."""
    out = qkv.new_empty(qkv.shape[0], num_heads, qkv.shape[2])
    positions, cos, sin, weight, eps = rope
    if _current.get(None) is None:
        _attend_with_rope_op(qkv, positions, out, cos, sin, weight, eps, layer)
    else:
        aside(_attend_with_rope_into, qkv, positions, out, cos=cos, sin=sin, weight=weight, eps=eps, layer=layer)
    return out
