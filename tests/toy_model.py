"""A model of one layer, whose two pieces are small: for a form whose building and loading costs."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.attention.base import AttentionSpec
from minivllm.compile.context import attend

HEADS, HEAD_SIZE, HIDDEN, VOCAB = 2, 8, 16, 64


class ToyLayer(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.qkv = nn.Parameter(torch.randn(3 * HIDDEN, HIDDEN) / 4, requires_grad=False)
        self.norm = nn.Parameter(torch.rand(HIDDEN), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, (HIDDEN,), self.norm, 1e-6)
        q, k, v = (normed @ self.qkv.T).view(-1, 3 * HEADS, HEAD_SIZE).split(HEADS, dim=1)
        return x + F.silu(attend(q, k, v, self.number).reshape(-1, HIDDEN))


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(VOCAB, HIDDEN), requires_grad=False)
        self.layers = nn.ModuleList(ToyLayer(i) for i in range(1))
        self.attention_layers = [AttentionSpec(HEADS, HEADS, HEAD_SIZE, HEAD_SIZE**-0.5)]
        self.spec = SimpleNamespace(vocab_size=VOCAB)

    def embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.index_select(self.embedding, 0, token_ids, out=out)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + positions[:, None] / 100
        for layer in self.layers:
            x = layer(x)
        return x
