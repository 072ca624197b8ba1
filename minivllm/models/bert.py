"""BERT (Devlin et al. 2018): an encoder, in which every token sees every other, with the norms behind each sublayer.

What sentence-transformers' small models are (MiniLM among them), and cross-encoders, which have a classification head
over the first token. Like the decoders it is a function of embeddings and positions over packed rows [T]; which rows
are one text is known to attention alone (minivllm/attention/packed.py).
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
from minivllm.errors import ConfigError
from minivllm.layers import sharded
from minivllm.layers.embedding import Embedding
from minivllm.layers.linear import Linear, QuantMethod, choose_method
from minivllm.layers.norm import LayerNorm
from minivllm.models.checkpoint import Network, WeightMap
from minivllm.models.spec import ConfigReader, EncoderSpec
from minivllm.parallel.group import ONE_DEVICE, Ranks

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}

PREFIXES = {"BertModel": "", "BertForSequenceClassification": "bert."}  # before the names of the encoder's tensors


def read_config(reader: ConfigReader, architecture: str) -> EncoderSpec:
    config = reader.config
    _refuse_unsupported(reader)
    hidden, heads = reader.need("hidden_size"), reader.need("num_attention_heads")
    if hidden % heads:
        raise reader.fail(f"{heads} heads do not divide the hidden size of {hidden}")
    return EncoderSpec(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=reader.num_layers(),
        num_heads=heads,
        head_size=hidden // heads,
        intermediate_size=reader.need("intermediate_size"),
        vocab_size=reader.need("vocab_size"),
        max_position=reader.need("max_position_embeddings"),
        num_token_types=reader.optional("type_vocab_size", 2),
        norm_eps=reader.positive("layer_norm_eps", 1e-12),
        activation=config.get("hidden_act", "gelu"),
        dtype=reader.dtype(),
    )


def _refuse_unsupported(reader: ConfigReader) -> None:
    config = reader.config
    position, activation = config.get("position_embedding_type", "absolute"), config.get("hidden_act", "gelu")
    if config.get("quantization_config"):
        raise reader.fail("the checkpoint is quantised, which is not supported for encoders; take the plain model")
    if position != "absolute":
        raise reader.fail(f'position_embedding_type "{position}" is not supported, only "absolute"')
    if activation not in ACTIVATIONS:
        raise reader.fail(f'hidden_act "{activation}" is not supported. Supported: {", ".join(ACTIVATIONS)}')
    if config.get("is_decoder"):
        raise reader.fail("is_decoder=true: BERT as a decoder is not supported")


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
    def __init__(self, spec: EncoderSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        size, inner = spec.hidden_size, spec.intermediate_size
        options: dict[str, Any] = {"bias": True, "dtype": dtype, "method": method}
        self.index, self.num_heads = index, ranks.placement.part(spec.num_heads).size
        self.qkv = sharded.qkv_linear(ranks, size, spec.num_heads, spec.num_heads, spec.head_size, **options)
        self.o = sharded.row_linear(ranks, size, size, **options)
        self.attention_norm = LayerNorm(size, spec.norm_eps, dtype)
        self.up = sharded.column_linear(ranks, size, {"": inner}, **options)
        self.down = sharded.row_linear(ranks, inner, size, **options)
        self.mlp_norm = LayerNorm(size, spec.norm_eps, dtype)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, self.num_heads, -1)).unbind(1)  # each [T, heads, head_size]
        x = self.attention_norm(x + self.o(attend(q, k, v, self.index).flatten(1)))
        return self.mlp_norm(x + self.down(self.activation(self.up(x))))


class BertModel(Network):
    """ranks: which part of the model this is, in a placement without pipeline stages."""

    def __init__(self, spec: EncoderSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        super().__init__()
        if ranks.placement.pp > 1:
            raise ConfigError(f"pp={ranks.placement.pp}: an encoder is not cut into pipeline stages")
        ranks.placement.check(spec)
        self.spec, self.dtype, self.placement = spec, dtype, ranks.placement
        heads = ranks.placement.part(spec.num_heads).size
        layer = AttentionSpec(heads, heads, spec.head_size, spec.head_size**-0.5, causal=False)
        self.attention_layers = [layer] * spec.num_layers
        self.linear_method, self.linear_reason = choose_method(device, dtype)
        method = self.linear_method
        prefix, size, has_head = PREFIXES[spec.architecture], spec.hidden_size, spec.classifier is not None
        # transformers' pooler is trained for classification alone: without a head nobody reads it.
        self.unused = {prefix + "embeddings.position_ids"}
        self.unused |= set() if has_head else {"pooler.dense.weight", "pooler.dense.bias"}
        self.weights = weight_map(prefix, has_head)
        with device:
            self.embedding = sharded.vocabulary_embedding(ranks, spec.vocab_size, size, dtype)
            self.position = Embedding(spec.max_position, size, dtype)
            self.token_type = Embedding(spec.num_token_types, size, dtype)
            self.embedding_norm = LayerNorm(size, spec.norm_eps, dtype)
            self.layers = nn.ModuleList(EncoderLayer(spec, i, dtype, method, ranks) for i in range(spec.num_layers))
            if spec.classifier is not None:
                self.pooler = Linear(size, {"": size}, bias=True, dtype=dtype, method=method)
                self.classifier = Linear(size, {"": len(spec.classifier.labels)}, bias=True, dtype=dtype, method=method)

    def embed(self, token_ids: Tensor, out: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """token_ids, token_types [T] int64 (None: all 0) -> x [T, hidden], in `out` if that is given."""
        types = self.token_type.weight[0] if token_types is None else self.token_type(token_types)
        return torch.add(self.embedding(token_ids), types, out=out)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden], positions [T] int64 -> hidden [T, hidden]."""
        x = self.embedding_norm(x + self.position(positions))
        for layer in self.layers:
            x = layer(x)
        return x

    def classify(self, first: Tensor) -> Tensor:
        """The hidden states of first tokens [B, hidden] -> logits [B, labels]. Only of a model with a head."""
        return self.classifier(torch.tanh(self.pooler(first)))
