"""BERT (Devlin et al. 2018): an encoder, in which every token sees every other, with the norms behind each sublayer.

What sentence-transformers' small models are (MiniLM among them), and cross-encoders, which have a classification head
over the first token. Like the decoders it is a function of token ids and positions over packed rows [T]; which rows are
one text is known to attention alone (minivllm/attention/packed.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.compile.context import attend
from minivllm.layers.embedding import Embedding
from minivllm.layers.linear import Linear, QuantMethod, choose_method
from minivllm.layers.norm import LayerNorm
from minivllm.models.checkpoint import WeightMap
from minivllm.models.encoder_spec import ENCODERS, EncoderSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}

_TOP = {
    "embeddings.word_embeddings": ("embedding", ""),
    "embeddings.position_embeddings": ("position", ""),
    "embeddings.token_type_embeddings": ("token_type", ""),
    "embeddings.LayerNorm": ("embedding_norm", ""),
}
_HEAD = {"pooler.dense": ("pooler", "")}
_LAYER = {
    "attention.self.query": ("qkv", "q"),
    "attention.self.key": ("qkv", "k"),
    "attention.self.value": ("qkv", "v"),
    "attention.output.dense": ("o", ""),
    "attention.output.LayerNorm": ("attention_norm", ""),
    "intermediate.dense": ("up", ""),
    "output.dense": ("down", ""),
    "output.LayerNorm": ("mlp_norm", ""),
}


def weight_map(prefix: str, has_head: bool) -> WeightMap:
    top = {prefix + theirs: ours for theirs, ours in (_TOP | _HEAD if has_head else _TOP).items()}
    classifier = {"classifier": ("classifier", "")} if has_head else {}
    return WeightMap(top | classifier, _LAYER, f"{prefix}encoder.layer")


class EncoderLayer(nn.Module):
    def __init__(self, spec: EncoderSpec, index: int, dtype: torch.dtype, method: QuantMethod):
        super().__init__()
        size, inner = spec.hidden_size, spec.intermediate_size
        options: dict[str, Any] = {"bias": True, "dtype": dtype, "method": method}
        self.index, self.num_heads = index, spec.num_heads
        self.qkv = Linear(size, {"q": size, "k": size, "v": size}, **options)
        self.o = Linear(size, {"": size}, **options)
        self.attention_norm = LayerNorm(size, spec.norm_eps, dtype)
        self.up = Linear(size, {"": inner}, **options)
        self.down = Linear(inner, {"": size}, **options)
        self.mlp_norm = LayerNorm(size, spec.norm_eps, dtype)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, self.num_heads, -1)).unbind(1)  # each [T, heads, head_size]
        x = self.attention_norm(x + self.o(attend(q, k, v, self.index).flatten(1)))
        return self.mlp_norm(x + self.down(self.activation(self.up(x))))


class BertModel(nn.Module):
    """Parameters are uninitialised: fill every tensor of `checkpoint_tensors()`, then call `finish()`."""

    def __init__(self, spec: EncoderSpec, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.spec = spec
        layer = AttentionSpec(spec.num_heads, spec.num_heads, spec.head_size, spec.head_size**-0.5, causal=False)
        self.attention_layers = [layer] * spec.num_layers
        self.linear_method, self.linear_reason = choose_method(device, dtype)
        method = self.linear_method
        prefix, size, has_head = ENCODERS[spec.architecture], spec.hidden_size, spec.num_labels > 0
        # transformers' pooler is trained for classification alone: without a head nobody reads it.
        self.unused = {prefix + "embeddings.position_ids"}
        self.unused |= set() if has_head else {"pooler.dense.weight", "pooler.dense.bias"}
        self.weights = weight_map(prefix, has_head)
        with device:
            self.embedding = Embedding(spec.vocab_size, size, dtype)
            self.position = Embedding(spec.max_position, size, dtype)
            self.token_type = Embedding(spec.num_token_types, size, dtype)
            self.embedding_norm = LayerNorm(size, spec.norm_eps, dtype)
            self.layers = nn.ModuleList(EncoderLayer(spec, i, dtype, method) for i in range(spec.num_layers))
            if has_head:
                self.pooler = Linear(size, {"": size}, bias=True, dtype=dtype, method=method)
                self.classifier = Linear(size, {"": spec.num_labels}, bias=True, dtype=dtype, method=method)

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """token_ids, positions, token_types [T] int64 (None: all 0) -> hidden [T, hidden]."""
        types = self.token_type.weight[0] if token_types is None else self.token_type(token_types)
        x = self.embedding_norm(self.embedding(token_ids) + types + self.position(positions))
        for layer in self.layers:
            x = layer(x)
        return x

    def classify(self, first: Tensor) -> Tensor:
        """The hidden states of first tokens [B, hidden] -> [B, labels]. Only of a model with a head."""
        return self.classifier(torch.tanh(self.pooler(first)))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return self.weights.destinations(self)

    def checkpoint_modules(self) -> dict[str, tuple[str, str]]:
        return self.weights.places(self)

    def finish(self) -> None:
        """Every weight is loaded: repack."""
        for module in list(self.modules()):
            if module is not self and hasattr(module, "finish"):
                module.finish()
