"""The decoder of the Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3, and with experts Mixtral, Qwen3-MoE.

They are one network. What tells them apart is in LlamaSpec: biases, QK-norm, the sliding window of each layer, the
rotary embedding, the head size, tied embeddings, which layers are a mixture of experts. `embed` makes x of tokens; the
forward is a function of (x, positions), whatever x was made of: it knows nothing of requests, blocks or phases;
attention finds its cache by itself (minivllm/compile/context.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import ModelError
from minivllm.layers import sharded
from minivllm.layers.experts import Router, SparseMLP, experts_of
from minivllm.layers.linear import QuantMethod
from minivllm.layers.norm import QKNorm, RMSNorm
from minivllm.layers.rotary import RotaryEmbedding, RotaryTables, Rotation, llama3, plain
from minivllm.models.checkpoint import WeightMap
from minivllm.models.decoder import (
    ATTENTION_WEIGHTS,
    ENDS,
    MLP,
    MLP_WEIGHTS,
    Attention,
    Decoder,
    attention_layers,
    make_lm_head,
    rotate_in_kernel,
)
from minivllm.models.gguf import (
    GGUF_ENDS,
    GGUF_LAYER,
    GGUFNames,
    Metadata,
    decoder_config,
    heads_of_llama,
    shortest,
)
from minivllm.models.llama_config import LlamaSpec
from minivllm.models.spec import Config, RopeSpec
from minivllm.parallel.group import ONE_DEVICE, Ranks

LLAMA_WEIGHTS = WeightMap(ENDS, ATTENTION_WEIGHTS | {"post_attention_layernorm": ("mlp_norm", "")} | MLP_WEIGHTS)


def weight_map(spec: LlamaSpec) -> WeightMap:
    """Of this model: of the matrices of experts there are as many as it has."""
    if spec.experts is None:
        return LLAMA_WEIGHTS
    found = {**LLAMA_WEIGHTS.layer, "mlp.gate": ("mlp.router", "")}
    for e in range(spec.experts.num_experts):
        found |= {f"mlp.experts.{e}.{part}_proj": ("mlp.experts.gate_up", f"{e}.{part}") for part in ("gate", "up")}
        found[f"mlp.experts.{e}.down_proj"] = ("mlp.experts.down", f"{e}.")
    return replace(LLAMA_WEIGHTS, layer=found)


def gguf_config(about: Metadata) -> dict[str, Any]:
    window = about.get("attention.sliding_window")
    sliding_llama = bool(window) and about.architecture == "llama"  # Mistral has no GGUF architecture of its own
    if window and not sliding_llama:
        name = f"{about.architecture}.attention.sliding_window"
        raise ModelError(f'{about.file.path}: metadata "{name}" is {window}: which layers have a window is not said')
    kind = "mistral" if sliding_llama else about.architecture
    return decoder_config(about) | {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "rope_parameters": about.rope_parameters()
        | (_llama3_rope(about) if ROPE_FACTORS in about.file.tensors else {}),
        "hidden_act": "silu",
        **({"sliding_window": window} if sliding_llama else {}),
    }


def _llama3_rope(about: Metadata) -> dict[str, Any]:
    """The parameters behind a table of factors. All published Llama 3 models differ only in the largest factor."""
    factors = about.file.numbers(ROPE_FACTORS).float().flatten()  # [head_size / 2]
    found = {
        "rope_type": "llama3",
        "factor": shortest(float(factors.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = about.rope_parameters()["rope_theta"]
    rope = RopeSpec("llama3", theta, found["factor"], 8192, 1.0, 4.0)
    expected = plain(rope, 2 * len(factors)).per_pair / llama3(rope, 2 * len(factors)).per_pair
    if not torch.allclose(factors, expected.float(), rtol=1e-3):
        path = about.file.path
        raise ModelError(f"{path}: the table {ROPE_FACTORS} is not Llama 3's rope scaling and is not supported")
    return found


def _reordered(about: Metadata, config: Config) -> dict[str, int]:
    """llama.cpp's converter reorders the rows of q and k of the `llama` architecture alone."""
    return heads_of_llama(about, config) if about.architecture == "llama" else {}


ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling as a divisor of each frequency; becomes rope parameters
GGUF = GGUFNames(
    gguf_config,
    top=GGUF_ENDS,
    layer=GGUF_LAYER | {"ffn_norm": "post_attention_layernorm"},
    heads=_reordered,
    unused=(ROPE_FACTORS,),
)


def make_mlp(spec: LlamaSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks) -> MLP | SparseMLP:
    of, size = spec.experts, spec.hidden_size
    if of is None or not of.sparse[index]:
        return MLP(spec, dtype, method, ranks, activation="silu", bias=spec.mlp_bias)
    router = Router(size, of.num_experts, of.experts_per_token, of.normalised)
    return sharded.sparse_mlp(ranks, router, size, of.intermediate_size, of.num_experts, dtype)


class DecoderLayer(nn.Module):
    """index: among the layers of the whole model."""

    norms = ("attention_norm", "mlp_norm", None, None)  # of LayerDescription

    def __init__(self, spec: LlamaSpec, index: int, dtype: torch.dtype, method: QuantMethod, ranks: Ranks = ONE_DEVICE):
        super().__init__()
        make_norm = partial(QKNorm, head_size=spec.head_size, eps=spec.rms_eps, dtype=dtype) if spec.qk_norm else None
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_eps, dtype)
        self.attention = Attention(
            spec, index, dtype, method, ranks, qkv_bias=spec.qkv_bias, o_bias=spec.o_bias, make_norm=make_norm
        )
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_eps, dtype)
        self.mlp = make_mlp(spec, index, dtype, method, ranks)

    def forward(self, x: Tensor, rotate: Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotate)
        return x + self.mlp(self.mlp_norm(x))


class LlamaModel(Decoder):
    def __init__(self, spec: LlamaSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        attention = attention_layers(spec, ranks.placement, spec.head_size**-0.5)
        super().__init__(spec, dtype, device, ranks, weight_map(spec), attention)
        method = self.linear_method
        with device:
            self.embedding = sharded.first_of_stage(ranks, spec.vocab_size, spec.hidden_size, dtype)
            self.rotary = RotaryEmbedding(spec.rope, spec.head_size, spec.max_position, dtype)
            self.layers = self.make_layers(lambda i: DecoderLayer(spec, i, dtype, method, ranks))
            self.norm = sharded.last_of_stage(ranks, RMSNorm(spec.hidden_size, spec.rms_eps, dtype))
            self.lm_head = make_lm_head(spec, self.embedding, dtype, method, ranks)

    def embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T] int64 -> x [T, hidden], in `out` if that is given."""
        return self.embedding(token_ids, out)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, hidden], positions [T] int64 -> hidden [T, hidden], the final norm applied."""
        rotate = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rotate)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> [S, vocab] in fp32."""
        return self.lm_head(hidden)

    @property
    def capture_unsupported_reason(self) -> str | None:
        """Why no capture may hold a whole forward, or None."""
        return next((why for experts in experts_of(self) if (why := experts.products.capture_unsupported_reason)), None)

    def rotate_in_kernel(self) -> None:
        """From now on for an attention backend that can (`rope_and_attend`)."""
        self.rotary = RotaryTables(self.rotary)
        for layer in self.layers:
            layer.attention.mix = rotate_in_kernel
