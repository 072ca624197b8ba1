"""Token embedding and LM head, the two ends of a decoder. They may share one matrix (tied embeddings)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from minivllm.compile.opaque import opaque
from minivllm.kernels.cpu import blocks as kernels
from minivllm.kernels.cpu.blocks import KINDS, Blocks
from minivllm.layers.linear import NO_SHARDS, Linear, QuantMethod, empty_parameter
from minivllm.layers.stored import Shard, TensorSpec, whole


class Embedding(nn.Module):
    blocks: Blocks | None = None  # the rows are in `weight`

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype)

    def forward(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T] int64 -> [T, hidden], in `out` if that is given."""
        return torch.index_select(self.weight, 0, token_ids, out=out)


def _look_up(token_ids: Tensor, rows: Tensor, out: Tensor, kind: int) -> None:
    out.copy_(kernels.look_up(Blocks(KINDS[kind], rows), token_ids, out.dtype))


_ARGUMENTS = "(Tensor token_ids, Tensor rows, Tensor(a!) out, int kind) -> ()"
_look_up_op = opaque("look_up" + _ARGUMENTS, _look_up, lambda *_: None)


class BlockEmbedding(nn.Module):
    """An embedding whose rows stay blocks of a GGUF file, mapped and not copied: a token's row is de-quantised when it
    is looked up."""

    weight = None

    def __init__(self, blocks: Blocks, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.kind, self.rows = KINDS.index(blocks.kind), blocks.rows
        self.hidden_size, self.dtype = hidden_size, dtype

    @property
    def blocks(self) -> Blocks:
        return Blocks(KINDS[self.kind], self.rows)

    def forward(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T] int64 -> [T, hidden], in `out` if that is given."""
        if out is None:
            out = self.rows.new_empty(token_ids.shape[0], self.hidden_size, dtype=self.dtype)
        _look_up_op(token_ids, self.rows, out, self.kind)
        return out


class LMHead(Linear):
    """hidden [S, hidden] -> logits [S, vocab] in fp32, multiplied in the model's dtype."""

    output_dtype = torch.float32

    def __init__(
        self, hidden_size: int, vocab_size: int, *, bias: bool = False, dtype: torch.dtype, method: QuantMethod
    ):
        super().__init__(hidden_size, {"": vocab_size}, bias=bias, dtype=dtype, method=method)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).float()


class TiedLMHead(nn.Module):
    """An LM head whose matrix is the embedding's.

    `finish` lets the method repack its own view of the matrix: a packed copy for the product and the rows for the
    look-up are then both kept, which costs one embedding in memory and saves a reorder of the model's largest matrix
    on each step.
    """

    output_dtype = torch.float32
    shards: Mapping[str, Shard] = NO_SHARDS

    def __init__(self, embedding: Embedding, method: QuantMethod):
        super().__init__()
        self.weight = embedding.weight
        self.shape = embedding.weight.shape
        self.bias = None
        self.method = method

    def declared(self, part: str) -> tuple[TensorSpec, ...]:
        """Nothing but what a method reads for itself: the matrix is loaded as the embedding's."""
        n_out = whole(self.shape[0], "outputs", self.shards.get(part))
        return self.method.tensors(part, n_out, self.shape[1]) if self.weight is None else ()

    def finish(self) -> None:
        self.method.finish(self)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.method.apply(self, hidden).float()


class NoLMHead(nn.Module):
    """Of a decoder that only embeds, and of a pipeline's stages before the last."""

    def forward(self, hidden: Tensor) -> Tensor:
        raise AssertionError("the model was loaded without its LM head")
