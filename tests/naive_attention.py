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
        if layer.soft_cap is not None:
            scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
        if layer.slopes is not None:
            scores = scores - torch.tensor(layer.slopes)[:, None, None] * distance
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, v.float()))


class NaiveLatentAttention:
    """K and V of each head made of every token's vector, then as above."""

    graphs = "none"

    def forward(self, q: Tensor, latent: Tensor, expand: Tensor, kv, meta, layer: AttentionSpec, out: Tensor) -> None:
        rank, rope_size = layer.latent
        nope_size, scores = layer.head_size - rope_size, []
        both = torch.stack([latent[:, :rank].float() @ head.float().T for head in expand], 1)  # [T, heads, K and V]
        for h in range(layer.num_heads):
            unturned = q[:, h, :nope_size].float() @ both[:, h, :nope_size].T
            scores.append(unturned + q[:, h, nope_size:].float() @ latent[:, rank:].float().T)
        seen = torch.ones(len(q), len(q)).tril().bool()
        weights = (torch.stack(scores) * layer.scale).masked_fill(~seen, float("-inf")).softmax(-1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, both[:, :, nope_size:]))


class NaiveHybridAttention(NaiveAttention):
    """Layers with a recurrent state beside others."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv, meta, layer: AttentionSpec, out: Tensor) -> None:
        if layer.state is None:
            super().forward(q, k, v, kv, meta, layer, out)
        else:
            take_tokens(q, k, v, layer, out)


def take_tokens(qkv: Tensor, gates: Tensor, weights: Tensor, layer: AttentionSpec, out: Tensor) -> None:
    """Token by token and head by head, from nothing: gated_delta (Gated DeltaNet, Yang et al. 2025) and ssd (Mamba-2,
    Dao and Gu 2024)."""
    of, num_tokens = layer.state, len(qkv)
    inputs = torch.nn.functional.pad(qkv.float(), (0, 0, of.kernel - 1, 0))
    *taps, bias, skips = weights
    mixed = torch.stack([(inputs[t : t + of.kernel] * torch.stack(taps)).sum(0) + bias for t in range(num_tokens)])
    mixed = mixed * mixed.sigmoid()
    width, share = of.num_k_heads * of.k_size, of.num_v_heads // of.num_k_heads
    if of.rule == "ssd":  # v, k, q
        swapped = torch.arange(of.channels).split([of.channels - 2 * width, width, width])
        mixed, skips = (x[..., torch.cat(swapped[::-1])] for x in (mixed, skips))
    for h in range(of.num_v_heads):
        keys, values = slice(h // share * of.k_size, (h // share + 1) * of.k_size), slice(h * of.v_size, None)
        q, k = mixed[:, :width][:, keys], mixed[:, width : 2 * width][:, keys]
        v, skip = (x[..., 2 * width :][..., values][..., : of.v_size] for x in (mixed, skips))
        if of.rule == "gated_delta":
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            q = q / of.k_size**0.5
        known = torch.zeros(of.k_size, of.v_size)
        for t in range(num_tokens):
            known = known * gates[t, 0, h].exp()
            replaced = k[t] @ known if of.rule == "gated_delta" else 0
            known = known + torch.outer(k[t], gates[t, 1, h] * (v[t] - replaced))
            out[t, h] = q[t] @ known + skip * v[t]


def naive_for(layers: list[AttentionSpec]) -> NaiveAttention | NaiveLatentAttention:
    if any(layer.state is not None for layer in layers):
        return NaiveHybridAttention()
    return NaiveAttention() if layers[0].latent is None else NaiveLatentAttention()


def hidden_of(model, forward, num_tokens: int) -> Tensor:
    """[T, hidden] of random tokens, the same for equal T; forward is the model or stands for it."""
    layers = model.attention_layers
    context = ForwardContext(naive_for(layers), None, [torch.empty(0)] * len(layers), layers)
    token_ids = torch.randint(model.spec.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    with torch.inference_mode(), forward_context(context):
        return forward(model.embed(token_ids), torch.arange(num_tokens))


def logits_of(model, token_ids: list[int]) -> Tensor:
    """[T, vocab] fp32: the logits after each token of one sequence."""
    layers = model.attention_layers
    context = ForwardContext(naive_for(layers), None, [torch.empty(0)] * len(layers), layers)
    with torch.inference_mode(), forward_context(context):
        hidden = model(model.embed(torch.tensor(token_ids)), torch.arange(len(token_ids)))
        return model.logits(hidden)


def greedy(model, token_ids: list[int], num_tokens: int) -> list[int]:
    """The likeliest continuation, recomputing the whole sequence for each token."""
    ids = list(token_ids)
    for _ in range(num_tokens):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return ids[len(token_ids) :]
