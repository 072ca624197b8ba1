"""Layers that keep one recurrent state a request, and not K and V of its tokens: their sizes, by config.json.

Two families say so: Qwen's since Qwen3-Next (Gated DeltaNet, Yang et al., 2025), and IBM's Granite 4 (Mamba 2, Dao and
Gu, 2024). In both the other layers are attention, and every layer has an MLP or experts behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minivllm.errors import ConfigError, ModelError
from minivllm.kv_groups import StateSpec

LINEAR, FULL, WINDOW = ("linear_attention", "mamba"), ("full_attention", "attention"), "sliding_attention"
_GEMMAS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}  # one layer in so many sees all
CHUNK = 64  # tokens of a prompt that a state takes together, by products of matrices
_OF_QWEN = {  # what transformers takes where a config says nothing
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_OF_GRANITE = {"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2}


@dataclass(frozen=True, slots=True)
class States:
    num_layers: int  # that have one
    each: StateSpec

    @property
    def num_in(self) -> int:
        """Numbers that a layer makes of a token: q, k and v, what gates the answer, and how much is kept and added."""
        gates = 2 if self.each.rule == "gated_delta" else 1
        return self.each.channels + self.num_out + gates * self.each.num_v_heads

    @property
    def num_out(self) -> int:
        """Numbers of a layer's answer, before they are projected."""
        return self.each.num_v_heads * self.each.v_size

    @property
    def bytes(self) -> int:
        """Of a request's state in one layer, in float32."""
        return 4 * self.each.num_floats

    def parameters(self, hidden: int) -> int:
        """Of a layer's projections. Convolutions and norms, below a hundredth, are left out."""
        return hidden * (self.num_in + self.num_out)

    def flops(self, num_decodes: float, num_prompt_tokens: float) -> float:
        """Of a layer. A decode scales the matrix of each head, adds to it and answers; by the delta rule it also takes
        out what the key had. A prompt does so chunk by chunk, and within one by products of its tokens with each other:
        by the delta rule twice as many."""
        of = self.each
        matrix, inside = of.k_size * of.v_size, CHUNK * (of.k_size + of.v_size)
        one, chunked = 5 * matrix, 4 * matrix + 2 * inside
        if of.rule == "gated_delta":
            one, chunked = one + 2 * matrix, chunked + 2 * inside
        return of.num_v_heads * (num_decodes * one + num_prompt_tokens * chunked)

    def over(self, count: int) -> States:
        """What each of so many devices has: heads of values in equal parts, those of keys more than once if there are
        fewer. Raises ConfigError."""
        of = self.each
        if of.num_v_heads % count or (of.num_k_heads % count and count % of.num_k_heads):
            heads = f"{of.num_v_heads} and {of.num_k_heads} heads of a state"
            raise ConfigError(f"executor.device: {count} devices cannot have equal parts of {heads}")
        parts = {"num_v_heads": of.num_v_heads // count, "num_k_heads": -(-of.num_k_heads // count)}
        return replace(self, each=of._replace(**parts))


def layer_kinds(config: Mapping[str, Any], num_layers: int) -> Sequence[str] | None:
    """Of each layer, as layer_types has it; or what it is but for every so-manieth, as Qwen's and older configs of
    Gemma's say, or leave to the model's type. None: nothing is said."""
    if types := config.get("layer_types"):
        return types
    if config.get("linear_num_value_heads"):
        other, every = LINEAR[0], config.get("full_attention_interval") or 4
    else:
        other, every = WINDOW, config.get("sliding_window_pattern") or _GEMMAS.get(config.get("model_type", ""))
    return [FULL[0] if (i + 1) % every == 0 else other for i in range(num_layers)] if every else None


def read_states(config: Mapping[str, Any], num_layers: int, where: str) -> States | None:
    """None: no layer has one. Raises ModelError."""
    kinds = layer_kinds(config, num_layers)
    if kinds is None and config.get("mamba_d_state"):
        raise ModelError(f"{where}: no field layer_types says which layers keep a recurrent state")
    if not (count := sum(kind in LINEAR for kind in kinds or ())):
        return None
    if count == num_layers:
        raise ModelError(f"{where}: a model without a layer of attention is not modelled yet")
    if config.get("linear_num_value_heads"):
        sizes = (config.get(name) or default for name, default in _OF_QWEN.items())
        return States(count, StateSpec(*sizes, rule="gated_delta"))
    if not (heads := config.get("mamba_n_heads")):
        raise ModelError(f"{where}: its recurrent states are of a kind that is not modelled (no mamba_n_heads)")
    groups, size, kernel, expand = (config.get(name) or default for name, default in _OF_GRANITE.items())
    inner = expand * config["hidden_size"]
    return States(count, StateSpec(groups, heads, size, inner // heads, kernel, rule="ssd"))
