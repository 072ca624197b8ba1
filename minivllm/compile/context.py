"""What attention needs and a model's forward must not carry: the one ambient value of the engine.

A model calls `attend(q, k, v, layer)`. The KV cache, the block tables and the backend come from a context variable that
the runner sets for the length of one forward. So a model is a function of (token_ids, positions) alone, which is what
lets it be traced once, split at this call and captured (vLLM's `forward_context`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minivllm.attention.base import AttentionBackend, AttentionSpec


@dataclass(frozen=True, slots=True)
class ForwardContext:
    backend: AttentionBackend
    meta: Any  # what backend.prepare() returned for this step
    kv_caches: list[Tensor]  # one a layer, of backend.kv_shape()
    layers: list[AttentionSpec]


_current: ContextVar[ForwardContext] = ContextVar("minivllm_forward_context")


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    assert _current.get(None) is None, "a forward must not run inside another one"
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    """Write k and v into layer's cache, then attend. q [T, heads, head_size], k and v [T, kv_heads, head_size] -> like
    q."""
    context = _current.get()
    out = torch.empty_like(q)
    context.backend.forward(q, k, v, context.kv_caches[layer], context.meta, context.layers[layer], out)
    return out
