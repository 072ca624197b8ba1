"""Whisper (Radford et al. 2022): text for speech. An encoder reads 30 seconds of sound at once, as a log-mel
spectrogram; a decoder of GPT-2's kin writes, and each of its layers reads the encoder's output by cross attention.

The encoder's part is done once a recording, K and V of every cross layer with it (`encode`); what runs in steps is the
decoder, a function of (x, positions) as every network here (minivllm/attention/cross.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.compile.context import attend_cross
from minivllm.errors import ConfigError
from minivllm.layers import sharded
from minivllm.layers.linear import QuantMethod
from minivllm.layers.norm import LayerNorm
from minivllm.layers.stored import Destination
from minivllm.models.checkpoint import WeightMap
from minivllm.models.classic import ACTIVATIONS, ClassicDecoder, PlainMLP, Rotate, SequentialLayer, plain, qkv
from minivllm.models.classic_config import ClassicSpec, read_classic, renamed
from minivllm.models.spec import ConfigReader
from minivllm.parallel.group import ONE_DEVICE, Ranks
from minivllm.parallel.placement import Placement

FRAMES_PER_SECOND = 100  # of the spectrogram; of these the encoder makes half as many positions
NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
    "max_position_embeddings": "max_target_positions",
    "hidden_act": "activation_function",
}
DEFAULTS = {  # WhisperConfig's
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "max_source_positions": 1500,
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "max_position_embeddings": 448,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,  # torch's: a config does not say
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperSpec(ClassicSpec):
    num_mels: int  # of a frame of the spectrogram
    encoder_layers: int
    encoder_heads: int
    encoder_intermediate_size: int

    @property
    def num_frames(self) -> int:
        """Of the spectrogram; the encoder takes two for a position."""
        return 2 * self.num_source

    @property
    def num_parameters(self) -> int:
        """Norms and biases, about a thousandth, are left out."""
        size, cross = self.hidden_size, 4 * self.hidden_size**2
        encoder = self.encoder_layers * (4 * size**2 + 2 * size * self.encoder_intermediate_size)
        encoder += 3 * size * (self.num_mels + size) + self.num_source * size
        own = self.num_layers * (4 * size**2 + cross) + self.num_mlp_parameters
        return encoder + own + (self.vocab_size + self.num_positions) * size


def read_config(reader: ConfigReader, architecture: str) -> WhisperSpec:
    reader = renamed(reader, NAMES, DEFAULTS)
    if reader.config.get("scale_embedding"):
        raise reader.fail("scale_embedding=true is not supported: no published model has it")
    if not reader.config["tie_word_embeddings"]:
        raise reader.fail("tie_word_embeddings=false is not supported: Whisper's head is its embedding")
    num_source, heads = reader.need("max_source_positions"), reader.need("encoder_attention_heads")
    if 2 * num_source % FRAMES_PER_SECOND:
        raise reader.fail(f"max_source_positions={num_source} is no number of whole seconds, of 50 positions each")
    if (size := reader.need("hidden_size")) % heads:
        raise reader.fail(f"{heads} heads of the encoder do not divide the hidden size of {size}")
    return read_classic(
        reader,
        architecture,
        WhisperSpec,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        num_positions=reader.need("max_position_embeddings"),
        num_kv_heads=reader.need("num_attention_heads"),
        num_mels=reader.need("num_mel_bins"),
        num_source=num_source,
        encoder_layers=reader.need("encoder_layers"),
        encoder_heads=heads,
        encoder_intermediate_size=reader.need("encoder_ffn_dim"),
    )


SELF_ATTENTION = plain({"self_attn_layer_norm": "attention_norm", "self_attn.out_proj": "attention.o"})
MLP = plain({"final_layer_norm": "mlp_norm", "fc1": "mlp.up", "fc2": "mlp.down"})
LAYER = SELF_ATTENTION | qkv("self_attn.{}_proj") | MLP
CROSS = {
    **plain({"encoder_attn_layer_norm": "cross_norm", "encoder_attn.out_proj": "cross.o"}),
    "encoder_attn.q_proj": ("cross.q", ""),
    "encoder_attn.k_proj": ("cross.kv", "k"),
    "encoder_attn.v_proj": ("cross.kv", "v"),
}
ENDS = {
    "model.encoder.conv1": "encoder.conv1",
    "model.encoder.conv2": "encoder.conv2",
    "model.encoder.embed_positions": "encoder.position",
    "model.encoder.layer_norm": "encoder.norm",
    "model.decoder.embed_tokens": "embedding",
    "model.decoder.embed_positions": "position",
    "model.decoder.layer_norm": "norm",
    "proj_out": "lm_head",
}


class WhisperWeights(WeightMap):
    """A product that makes keys has no bias."""

    def destinations(self, model: nn.Module) -> dict[str, Destination]:
        found = super().destinations(model)
        return {name: to for name, to in found.items() if not name.endswith("k_proj.bias")}


# -------------------------------------------------------------------------------------------------------- the encoder


class EncoderAttention(nn.Module):
    """Every position sees every other."""

    def __init__(self, spec: WhisperSpec, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        size, heads = spec.hidden_size, spec.encoder_heads
        options: dict[str, Any] = {"bias": True, "dtype": dtype, "method": method}
        self.num_heads = ranks.placement.part(heads).size
        self.qkv = sharded.qkv_linear(ranks, size, heads, heads, size // heads, **options)
        self.o = sharded.row_linear(ranks, size, size, **options)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, self.num_heads, -1)).permute(1, 2, 0, 3).unsqueeze(1)
        return self.o(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))  # of [1, heads, P, D] each


class EncoderLayer(nn.Module):
    def __init__(self, spec: WhisperSpec, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        self.attention_norm = LayerNorm(spec.hidden_size, spec.norm_eps, dtype)
        self.attention = EncoderAttention(spec, dtype, method, ranks)
        self.mlp_norm = LayerNorm(spec.hidden_size, spec.norm_eps, dtype)
        self.mlp = PlainMLP(replace(spec, intermediate_size=spec.encoder_intermediate_size), dtype, method, ranks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Encoder(nn.Module):
    def __init__(self, spec: WhisperSpec, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        size = spec.hidden_size
        self.conv1 = nn.Conv1d(spec.num_mels, size, kernel_size=3, padding=1, dtype=dtype)
        self.conv2 = nn.Conv1d(size, size, kernel_size=3, stride=2, padding=1, dtype=dtype)
        self.position = nn.Embedding(spec.num_source, size, dtype=dtype)
        self.layers = nn.ModuleList(EncoderLayer(spec, dtype, method, ranks) for _ in range(spec.encoder_layers))
        self.norm = LayerNorm(size, spec.norm_eps, dtype)
        self.activate = ACTIVATIONS[spec.activation]

    def forward(self, mels: Tensor) -> Tensor:
        """A log-mel spectrogram [mels, frames] -> [frames / 2, hidden]."""
        x = self.activate(self.conv2(self.activate(self.conv1(mels)))).T + self.position.weight
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


# -------------------------------------------------------------------------------------------------------- the decoder


class CrossAttention(nn.Module):
    """index: among all layers of attention."""

    def __init__(self, spec: WhisperSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__()
        size = spec.hidden_size
        options: dict[str, Any] = {"bias": True, "dtype": dtype, "method": method}
        self.index, self.head_size = index, spec.head_size
        self.q = sharded.column_linear(ranks, size, {"": size}, **options)
        self.kv = sharded.column_linear(ranks, size, {"k": size, "v": size}, **options)
        self.o = sharded.row_linear(ranks, size, size, **options)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(x.shape[0], -1, self.head_size)
        return self.o(attend_cross(q, self.index).flatten(1))

    def keep(self, encoded: Tensor) -> Tensor:
        """[positions, hidden] -> K and V [2, heads, positions, head_size]."""
        return self.kv(encoded).unflatten(1, (2, -1, self.head_size)).permute(1, 2, 0, 3)


class WhisperLayer(SequentialLayer):
    def __init__(self, spec: WhisperSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks):
        super().__init__(spec, index, dtype, method, ranks)
        self.cross_norm = LayerNorm(spec.hidden_size, spec.norm_eps, dtype)
        self.cross = CrossAttention(spec, spec.num_layers + index, dtype, method, ranks)

    def forward(self, x: Tensor, rotate: Rotate) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotate)
        x = x + self.cross(self.cross_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class WhisperModel(ClassicDecoder):
    """Of its layers of attention the decoder's own come first, then as many of cross attention."""

    def __init__(self, spec: WhisperSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        if ranks.placement.pp > 1:
            raise ConfigError(f"pp={ranks.placement.pp}: a model with an encoder is not cut into pipeline stages")
        super().__init__(spec, dtype, device, ranks)
        self.input_shape = (spec.num_mels, spec.num_frames)
        with device:
            self.encoder = Encoder(spec, dtype, self.linear_method, ranks)
        for name, module in self.named_modules():
            if name.endswith((".qkv", ".kv")):  # in no checkpoint (WhisperWeights)
                nn.init.zeros_(module.bias[module.rows["k"]])

    @staticmethod
    def weights_of(spec: WhisperSpec) -> WeightMap:
        encoder = {
            f"model.encoder.layers.{i}.{theirs}": (f"encoder.layers.{i}.{ours}", part)
            for i in range(spec.encoder_layers)
            for theirs, (ours, part) in LAYER.items()
        }
        return WhisperWeights(plain(ENDS) | encoder, LAYER | CROSS, "model.decoder.layers")

    def layer_of(self, spec: WhisperSpec) -> type[nn.Module]:
        return WhisperLayer

    def attention_of(self, spec: WhisperSpec, at: Placement) -> list[AttentionSpec]:
        layers = super().attention_of(spec, at)
        return [*layers, *(replace(layer, cross=spec.num_source) for layer in layers)]

    def encode(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """A log-mel spectrogram [mels, frames] -> of each layer of cross attention, its number and K and V [2, heads,
        positions, head_size]."""
        encoded = self.encoder(x)
        for layer in self.layers:
            yield layer.cross.index, layer.cross.keep(encoded)
