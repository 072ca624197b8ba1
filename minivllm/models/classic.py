"""What decoders of GPT-2's kin share: LayerNorm, biases, an MLP without a gate, positions that are learnt or rotated,
blocks one after the other or side by side, and files that keep q, k and v as one matrix. A family's file says which of
these it is made of. As every network here it is a function of (x, positions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.layers import sharded
from minivllm.layers.embedding import Embedding
from minivllm.layers.linear import QuantMethod
from minivllm.layers.norm import LayerNorm
from minivllm.layers.rotary import PairedRotaryEmbedding, RotaryEmbedding, unturned
from minivllm.models.checkpoint import KINDS, WeightMap
from minivllm.models.classic_config import ClassicSpec, slopes
from minivllm.models.decoder import Attention, Decoder, attention_layers, gelu_tanh, make_lm_head
from minivllm.models.gguf import Metadata, decoder_config
from minivllm.parallel.group import ONE_DEVICE, Ranks
from minivllm.parallel.placement import Placement

Rotate = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Rotate] = {"gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu": F.relu}
Split = Callable[[Tensor], Sequence[Tensor]]  # of rows; models are pickled, so it is no closure


# ------------------------------------------------------------------------------------------------------- the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights(WeightMap):
    """Of files that keep q, k and v as one matrix, whose parts this table calls {module}.q, .k and .v; or matrices as
    [n_in, n_out] (transformers' Conv1D). Both are said by the last name of a module."""

    prefix: str = ""  # of all modules but a head's, which some files leave out
    other_names: Mapping[str, str] = field(default_factory=dict)  # of modules in older files: this table's
    turned: frozenset[str] = frozenset()
    qkv: str = ""
    split: Split | None = None  # into the rows of q, k and v
    masks: tuple[str, ...] = ()  # modules with buffers that nobody asks for

    def read(self, tensors: Iterable[tuple[str, Any, Path]]) -> Iterator[tuple[str, Any, Path]]:
        for name, tensor, file in tensors:
            module, _, kind = name.rpartition(".")
            module = self._named(module)
            last = _last(module)
            if last in self.masks:
                continue
            if kind == "weight" and last in self.turned:
                tensor = _whole(tensor).T
            if last == self.qkv and kind in KINDS:
                for part, rows in self.parts(module, _whole(tensor)).items():
                    yield f"{part}.{kind}", rows, file
            else:
                yield f"{module}.{kind}", tensor, file

    def kept_in(self, module: str) -> str:
        packed = module.rpartition(".")[0]
        return packed if self.qkv and _last(packed) == self.qkv else module

    def parts(self, module: str, rows: Tensor) -> Mapping[str, Tensor]:
        if self.split is None or _last(module) != self.qkv:
            return {module: rows}
        return {f"{module}.{part}": own for part, own in zip("qkv", self.split(rows), strict=True)}

    def _named(self, module: str) -> str:
        module = self.other_names.get(module, module)
        return module if module in ("lm_head", "score") or module.startswith(self.prefix) else self.prefix + module


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _whole(tensor: Any) -> Tensor:
    """A view of the mapped file where it can be."""
    return tensor if isinstance(tensor, Tensor) else tensor.read()


@dataclass(frozen=True, slots=True)
class InTurn:
    """All heads of q, then those of k and of v."""

    num_heads: int
    num_kv_heads: int

    def __call__(self, rows: Tensor) -> Sequence[Tensor]:
        """rows [(heads + 2 kv_heads) * head_size, ...] -> those of q, of k and of v."""
        size = rows.shape[0] // (self.num_heads + 2 * self.num_kv_heads)
        return rows.split([self.num_heads * size, self.num_kv_heads * size, self.num_kv_heads * size])


@dataclass(frozen=True, slots=True)
class ByKVHead:
    """Each KV head's q, its k, its v, and so on."""

    num_heads: int
    num_kv_heads: int

    def __call__(self, rows: Tensor) -> Sequence[Tensor]:
        """As InTurn's."""
        group = self.num_heads // self.num_kv_heads
        heads = rows.unflatten(0, (self.num_kv_heads, group + 2, -1))  # [kv_heads, group + 2, head_size, ...]
        return [heads[:, :group].flatten(0, 2), heads[:, group].flatten(0, 1), heads[:, group + 1].flatten(0, 1)]


def plain(names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Of a WeightMap: modules that are whole in both. names: {checkpoint's: ours}."""
    return {theirs: (ours, "") for theirs, ours in names.items()}


def qkv(name: str) -> dict[str, tuple[str, str]]:
    """Of a WeightMap: a layer's q, k and v. name: the checkpoint's, with {} where the letter stands."""
    return {name.format(part): ("attention.qkv", part) for part in "qkv"}


def gguf_config(about: Metadata) -> dict[str, Any]:
    """What config.json says of one with LayerNorm, but for its names."""
    config = decoder_config(about, "attention.layer_norm_epsilon")
    return config | {"layer_norm_eps": config.pop("rms_norm_eps"), "rope_parameters": about.rope_parameters()}


# -------------------------------------------------------------------------------------------------------- the layers


class PlainMLP(nn.Module):
    """Two products and an activation between them: no gate."""

    def __init__(self, spec: ClassicSpec, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        size, hidden, bias = spec.intermediate_size, spec.hidden_size, spec.mlp_bias
        self.activate = ACTIVATIONS[spec.activation]
        self.up = sharded.column_linear(ranks, hidden, {"": size}, bias=bias, dtype=dtype, method=method)
        self.down = sharded.row_linear(ranks, size, hidden, bias=bias, dtype=dtype, method=method)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.up(x)))


class OneNormLayer(nn.Module):
    """Attention and MLP side by side, of the same normed x (Wang and Komatsuzaki 2021). index: among the layers of the
    whole model."""

    def __init__(self, spec: ClassicSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        self.attention_norm = LayerNorm(spec.hidden_size, spec.norm_eps, dtype)
        biases = {"qkv_bias": spec.qkv_bias, "o_bias": spec.o_bias}
        self.attention = Attention(spec, index, dtype, method, ranks, **biases, make_norm=None)
        self.mlp = PlainMLP(spec, dtype, method, ranks)

    def forward(self, x: Tensor, rotate: Rotate) -> Tensor:
        normed = self.attention_norm(x)
        return x + self.attention(normed, rotate) + self.mlp(normed)


class SequentialLayer(OneNormLayer):
    """One after the other, each of its own norm of x."""

    def __init__(self, spec: ClassicSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__(spec, index, dtype, method, ranks)
        self.mlp_norm = LayerNorm(spec.hidden_size, spec.norm_eps, dtype)

    def forward(self, x: Tensor, rotate: Rotate) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotate)
        return x + self.mlp(self.mlp_norm(x))


class ParallelLayer(SequentialLayer):
    """Side by side, each of its own norm of the same x."""

    def forward(self, x: Tensor, rotate: Rotate) -> Tensor:
        return x + self.attention(self.attention_norm(x), rotate) + self.mlp(self.mlp_norm(x))


# ------------------------------------------------------------------------------------------------------- the network


class NoRotary(nn.Module):
    def forward(self, positions: Tensor) -> Rotate:
        return unturned


class ClassicDecoder(Decoder):
    """weights_of: a spec's table of names."""

    weights_of: ClassVar[Callable[[Any], WeightMap]]
    interleaved = False  # whether a rotation's pairs are neighbours, and not of two halves
    first_position = 0  # the row of the table of positions that a text begins with

    def __init__(self, spec: ClassicSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        attention = self.attention_of(spec, ranks.placement)
        super().__init__(spec, dtype, device, ranks, type(self).weights_of(spec), attention)
        method, layer = self.linear_method, self.layer_of(spec)
        with device:
            self.make_embeddings(spec, dtype, ranks)
            self.rotary = self.make_rotary(spec, dtype)
            self.layers = self.make_layers(lambda i: layer(spec, i, dtype, method, ranks))
            self.norm = sharded.last_of_stage(ranks, LayerNorm(spec.hidden_size, spec.norm_eps, dtype))
            self.lm_head = make_lm_head(spec, self.embedding, dtype, method, ranks, bias=spec.head_bias)

    def layer_of(self, spec: Any) -> type[nn.Module]:
        return SequentialLayer

    def attention_of(self, spec: Any, at: Placement) -> list[AttentionSpec]:
        layers = attention_layers(spec, at, spec.head_size**-0.5)
        if not spec.alibi:
            return layers
        own = at.part(spec.num_heads)
        found = tuple(spec.alibi * slope for slope in slopes(spec.num_heads)[own.start : own.stop])
        return [replace(layer, slopes=found) for layer in layers]

    def make_embeddings(self, spec: Any, dtype: torch.dtype, ranks: Ranks) -> None:
        self.embedding = sharded.first_of_stage(ranks, spec.vocab_size, spec.hidden_size, dtype)
        if spec.num_positions and ranks.placement.is_first_stage:
            self.position = Embedding(spec.num_positions, spec.hidden_size, dtype)

    def make_rotary(self, spec: Any, dtype: torch.dtype) -> nn.Module:
        if spec.rope is None:
            return NoRotary()
        if spec.rotary_size == spec.head_size and not self.interleaved:
            return RotaryEmbedding(spec.rope, spec.head_size, spec.max_position, dtype)
        sizes = spec.rotary_size, spec.head_size, spec.max_position
        return PairedRotaryEmbedding(spec.rope, *sizes, dtype, interleaved=self.interleaved)

    def describe(self) -> str:
        """Why no kernel computes all of a layer in one call: description.py says RMS norms and gates alone."""
        return f"all {len(self.layers)} layers have LayerNorm and an MLP without a gate"

    def embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T] int64 -> x [T, hidden], in `out` if that is given."""
        return self.embedding(token_ids, out)

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        """What the first layer of all is given. Asked in the first stage alone."""
        return x + self.position(positions + self.first_position) if self.spec.num_positions else x

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden], positions [T] int64 -> hidden [T, hidden], the final norm applied."""
        rotate = self.rotary(positions)
        if self.placement.is_first_stage:
            x = self.place(x, positions)
        for layer in self.layers:
            x = layer(x, rotate)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> [S, vocab] in fp32."""
        return self.lm_head(hidden)
