"""Token embedding and LM head, the two ends of a decoder. They may share one matrix (tied embeddings)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.layers.linear import Linear, QuantMethod, empty_parameter


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, hidden]."""
        return F.embedding(token_ids, self.weight)


class LMHead(Linear):
    """hidden [S, hidden] -> logits [S, vocab] in fp32, multiplied in the model's dtype."""

    output_dtype = torch.float32

    def __init__(self, hidden_size: int, vocab_size: int, *, dtype: torch.dtype, method: QuantMethod):
        super().__init__(hidden_size, {"": vocab_size}, dtype=dtype, method=method)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).float()


class TiedLMHead(nn.Module):
    """An LM head whose matrix is the embedding's.

    `finish` lets the method repack its own view of the matrix: a packed copy for the product and the rows for the
    look-up are then both kept, which costs one embedding in memory and saves a reorder of the model's largest matrix
    on each step.
    """

    output_dtype = torch.float32

    def __init__(self, embedding: Embedding, method: QuantMethod):
        super().__init__()
        self.weight = embedding.weight
        self.bias = None
        self.method = method

    def finish(self) -> None:
        self.method.finish(self)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.method.apply(self, hidden).float()


class NoLMHead(nn.Module):
    """Of a decoder that only embeds."""

    def forward(self, hidden: Tensor) -> Tensor:
        raise AssertionError("the model was loaded without its LM head")
