"""One request on the real model, with a cache that you can hold in your hand: the laboratory of chapters 1 to 4.

The model is the engine's own (minivllm/models/llama.py). Only what stands behind `attend()` differs: where the engine
has a pool of blocks for all requests, here each layer has one object that keeps what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.attention.reference import attend_dense
from minivllm.compile.context import ForwardContext, forward_context


class Cache(Protocol):
    """K and V of one layer and one request."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [n, kv_heads, head_size] of the next n tokens -> those of all tokens so far."""
        ...


class NoCache:
    """For one pass over a whole text: what came before is nothing, and nothing is kept."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


class CachedAttention:
    """What the model's attend() calls: remember the new tokens, then look at all of them."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, meta: Any, layer: AttentionSpec, out: Tensor
    ) -> None:
        keys, values = cache.append(k, v)
        out[:] = attend_dense(q, keys, values, layer)


class OneRequest:
    """A request's past: one cache a layer, and how many tokens are in them."""

    def __init__(self, model: nn.Module, make_cache: Callable[[AttentionSpec], Cache]):
        self.model = model
        self.caches = [make_cache(layer) for layer in model.attention_layers]
        self.num_tokens = 0

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int]) -> Tensor:
        """The next tokens in, the logits after each of them out: [len(token_ids), vocab]."""
        return self.model.logits(self.hidden(token_ids))

    @torch.inference_mode()
    def next_token(self, token_ids: Sequence[int]) -> int:
        """Feed them; the likeliest token after the last. Logits are computed for that one alone."""
        return int(self.model.logits(self.hidden(token_ids)[-1:]).argmax())

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        start, self.num_tokens = self.num_tokens, self.num_tokens + len(token_ids)
        context = ForwardContext(CachedAttention(), None, self.caches, self.model.attention_layers)
        with forward_context(context):
            x = self.model.embed(torch.tensor(token_ids))
            return self.model(x, torch.arange(start, self.num_tokens))


def all_logits(model: nn.Module, token_ids: Sequence[int]) -> Tensor:
    """One pass over a whole text, with nothing remembered: the logits after each token, [len(token_ids), vocab]."""
    return OneRequest(model, lambda layer: NoCache()).feed(token_ids)
