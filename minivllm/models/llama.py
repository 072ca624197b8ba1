"""The decoder of the Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3, and with experts Mixtral, Qwen3-MoE.

They are one network. What tells them apart is in ModelSpec: biases, QK-norm, the sliding window of each layer, the
rotary embedding, the head size, tied embeddings, which layers are a mixture of experts. The forward is a function of
(token_ids, positions): it knows nothing of requests, blocks or phases; attention finds its cache by itself
(minivllm/compile/context.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.compile.context import Turn, attend, attend_turned
from minivllm.layers.embedding import Embedding, LMHead, NoLMHead, TiedLMHead
from minivllm.layers.experts import Experts, Router, SparseMLP, experts_of
from minivllm.layers.linear import Linear, QuantMethod, choose_method
from minivllm.layers.norm import QKNorm, RMSNorm
from minivllm.layers.rotary import Angles, RotaryEmbedding, RotaryTables, Rotation
from minivllm.models.checkpoint import WeightMap
from minivllm.models.spec import ModelSpec

LLAMA_WEIGHTS = WeightMap(
    # Hugging Face's module -> (ours, which of its rows)
    top={
        "model.embed_tokens": ("embedding", ""),
        "model.norm": ("norm", ""),
        "lm_head": ("lm_head", ""),
    },
    layer={
        "input_layernorm": ("attention_norm", ""),
        "self_attn.q_proj": ("attention.qkv", "q"),
        "self_attn.k_proj": ("attention.qkv", "k"),
        "self_attn.v_proj": ("attention.qkv", "v"),
        "self_attn.q_norm": ("attention.qk_norm", "q"),
        "self_attn.k_norm": ("attention.qk_norm", "k"),
        "self_attn.o_proj": ("attention.o", ""),
        "post_attention_layernorm": ("mlp_norm", ""),
        "mlp.gate_proj": ("mlp.gate_up", "gate"),
        "mlp.up_proj": ("mlp.gate_up", "up"),
        "mlp.down_proj": ("mlp.down", ""),
    },
)


def weight_map(spec: ModelSpec) -> WeightMap:
    """Of this model: of the matrices of experts there are as many as it has."""
    found = dict(LLAMA_WEIGHTS.layer)
    if spec.experts is not None:
        found["mlp.gate"] = ("mlp.router", "")
        for e in range(spec.experts.num_experts):
            found |= {f"mlp.experts.{e}.{part}_proj": ("mlp.experts.gate_up", f"{e}.{part}") for part in ("gate", "up")}
            found[f"mlp.experts.{e}.down_proj"] = ("mlp.experts.down", f"{e}.")
    return replace(LLAMA_WEIGHTS, layer=found)


def rotate_then_attend(layer: Attention, qkv: Tensor, rotate: Rotation) -> Tensor:
    """From qkv [T, heads + 2 kv_heads, head_size] to what attention gives [T, heads, head_size], as it is written."""
    qk = rotate(layer.qk_norm(qkv[:, : layer.num_qk_heads]))  # [T, heads + kv_heads, head_size]
    return attend(qk[:, : layer.num_heads], qk[:, layer.num_heads :], qkv[:, layer.num_qk_heads :], layer.index)


def rotate_in_kernel(layer: Attention, qkv: Tensor, angles: Angles) -> Tensor:
    """The same, where the attention backend norms, rotates and writes K and V in one launch."""
    weight, eps = getattr(layer.qk_norm, "weight", None), getattr(layer.qk_norm, "eps", 0.0)
    return attend_turned(qkv, Turn(*angles, weight, eps), layer.num_heads, layer.index)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype, method: QuantMethod):
        super().__init__()
        self.index = index
        self.head_size, self.num_heads = spec.head_size, spec.num_heads
        self.num_qk_heads = spec.num_heads + spec.num_kv_heads
        q, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self.qkv = Linear(spec.hidden_size, {"q": q, "k": kv, "v": kv}, bias=spec.qkv_bias, dtype=dtype, method=method)
        self.o = Linear(q, {"": spec.hidden_size}, bias=spec.o_bias, dtype=dtype, method=method)
        self.mix = rotate_then_attend  # or rotate_in_kernel
        self.qk_norm: nn.Module = nn.Identity()
        if spec.qk_norm:
            self.qk_norm = QKNorm(spec.num_heads, spec.num_kv_heads, spec.head_size, spec.rms_eps, dtype)

    def forward(self, x: Tensor, rotate: Rotation | Angles) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_size)  # [T, heads + 2 kv_heads, head_size]
        return self.o(self.mix(self, qkv, rotate).flatten(1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, method: QuantMethod):
        super().__init__()
        self.size = size = spec.intermediate_size
        self.gate_up = Linear(
            spec.hidden_size, {"gate": size, "up": size}, bias=spec.mlp_bias, dtype=dtype, method=method
        )
        self.down = Linear(size, {"": spec.hidden_size}, bias=spec.mlp_bias, dtype=dtype, method=method)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)  # [T, 2 intermediate]
        return self.down(F.silu(gate_up[:, : self.size]).mul_(gate_up[:, self.size :]))


def make_mlp(spec: ModelSpec, index: int, dtype: torch.dtype, method: QuantMethod) -> MLP | SparseMLP:
    of, size = spec.experts, spec.hidden_size
    if of is None or not of.sparse[index]:
        return MLP(spec, dtype, method)
    router = Router(size, of.num_experts, of.experts_per_token, of.normalised)
    return SparseMLP(router, Experts(size, of.intermediate_size, of.num_experts, dtype))


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype, method: QuantMethod):
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_eps, dtype)
        self.attention = Attention(spec, index, dtype, method)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_eps, dtype)
        self.mlp = make_mlp(spec, index, dtype, method)

    def forward(self, x: Tensor, rotate: Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotate)
        return x + self.mlp(self.mlp_norm(x))


def make_lm_head(spec: ModelSpec, embedding: Embedding, dtype: torch.dtype, method: QuantMethod) -> nn.Module:
    if not spec.has_head:
        return NoLMHead()
    if spec.tie_embeddings:
        return TiedLMHead(embedding, method)
    return LMHead(spec.hidden_size, spec.vocab_size, dtype=dtype, method=method)


class LlamaModel(nn.Module):
    """Parameters are uninitialised: fill every tensor of `checkpoint_tensors()`, then call `finish()`."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.spec = spec
        self.attention_layers = [
            AttentionSpec(spec.num_heads, spec.num_kv_heads, spec.head_size, spec.head_size**-0.5, window)
            for window in spec.windows
        ]
        self.weights = weight_map(spec)
        self.linear_method, self.linear_reason = choose_method(device, dtype)
        method = self.linear_method
        with device:
            self.embedding = Embedding(spec.vocab_size, spec.hidden_size, dtype)
            self.rotary = RotaryEmbedding(spec.rope, spec.head_size, spec.max_position, dtype)
            self.layers = nn.ModuleList(DecoderLayer(spec, i, dtype, method) for i in range(spec.num_layers))
            self.norm = RMSNorm(spec.hidden_size, spec.rms_eps, dtype)
            self.lm_head = make_lm_head(spec, self.embedding, dtype, method)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids [T] int64, positions [T] int64 -> hidden [T, hidden], the final norm applied."""
        rotate = self.rotary(positions)
        x = self.embedding(token_ids)
        for layer in self.layers:
            x = layer(x, rotate)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> [S, vocab] in fp32."""
        return self.lm_head(hidden)

    @property
    def capture_obstacle(self) -> str | None:
        """Why no capture may hold a whole forward, or None."""
        return next((why for experts in experts_of(self) if (why := experts.products.capture_obstacle)), None)

    def rotate_in_kernel(self) -> None:
        """From now on for an attention backend that can (`turn_and_attend`)."""
        self.rotary = RotaryTables(self.rotary)
        for layer in self.layers:
            layer.attention.mix = rotate_in_kernel

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """{name of the checkpoint: the part of a parameter that it fills}."""
        return self.weights.destinations(self)

    def checkpoint_modules(self) -> dict[str, tuple[str, str]]:
        """{module of the checkpoint: (our module that holds it, which part of its rows)}."""
        return self.weights.places(self)

    def finish(self) -> None:
        """Every weight is loaded: repack."""
        for module in list(self.modules()):
            if module is not self and hasattr(module, "finish"):
                module.finish()
