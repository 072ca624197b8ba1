"""Attention over one whole sequence with no cache: what a model needs to run without an engine."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.compile.context import ForwardContext, forward_context


class NaiveAttention:
    graphs = "none"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv, meta, layer: AttentionSpec, out: Tensor) -> None:
        length = q.shape[0]
        group = layer.num_heads // layer.num_kv_heads
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))  # [T, heads, head_size]
        distance = torch.arange(length)[:, None] - torch.arange(length)  # [T queries, T keys]
        seen = (distance >= 0) & (distance < (layer.sliding_window or length))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * layer.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, v.float()))


def hidden_of(model, forward, num_tokens: int) -> Tensor:
    """[T, hidden] of random tokens, the same for equal T; forward is the model or stands for it."""
    layers = model.attention_layers
    context = ForwardContext(NaiveAttention(), None, [torch.empty(0)] * len(layers), layers)
    token_ids = torch.randint(model.spec.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    with torch.inference_mode(), forward_context(context):
        return forward(token_ids, torch.arange(num_tokens))


def logits_of(model, token_ids: list[int]) -> Tensor:
    """[T, vocab] fp32: the logits after each token of one sequence."""
    layers = model.attention_layers
    context = ForwardContext(NaiveAttention(), None, [torch.empty(0)] * len(layers), layers)
    with torch.inference_mode(), forward_context(context):
        hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)))
        return model.logits(hidden)


def greedy(model, token_ids: list[int], num_tokens: int) -> list[int]:
    """The likeliest continuation, recomputing the whole sequence for each token."""
    ids = list(token_ids)
    for _ in range(num_tokens):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return ids[len(token_ids) :]
