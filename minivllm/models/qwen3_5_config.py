"""What configs of Qwen 3.5's text decoder say (qwen3_5.py has the network). No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from minivllm.kv_groups import StateSpec
from minivllm.models.decoder_config import LINEAR, HybridSpec, linear_layers, only_silu, read_decoder
from minivllm.models.spec import FULL, ConfigReader

# What transformers takes when a config does not say (Qwen3_5TextConfig).
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
}
TEXT = "Qwen3_5ForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Spec(HybridSpec):
    @property
    def num_parameters(self) -> int:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        attention = self.hidden_size * self.head_size * (3 * heads + 2 * kv_heads)  # q's gates, too
        values = self.state.num_v_heads * self.state.v_size
        linear = self.hidden_size * (self.state.channels + 2 * values + 2 * self.state.num_v_heads)
        mixers = sum(linear if is_linear else attention for is_linear in self.linear)
        ends = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return mixers + self.num_mlp_parameters + ends


def read_config(reader: ConfigReader, architecture: str) -> Qwen35Spec:
    """Of the text model, or of the one that sees, whose text model it is."""
    if architecture != TEXT:
        reader = _of_text(reader)
    reader = replace(reader, config={**DEFAULTS, **reader.config})
    only_silu(reader)
    state = StateSpec(
        num_k_heads=reader.need("linear_num_key_heads"),
        num_v_heads=reader.need("linear_num_value_heads"),
        k_size=reader.need("linear_key_head_dim"),
        v_size=reader.need("linear_value_head_dim"),
        kernel=reader.need("linear_conv_kernel_dim"),
        rule="gated_delta",
    )
    if state.num_v_heads % state.num_k_heads:
        raise reader.fail(f"{state.num_v_heads} value heads cannot share {state.num_k_heads} key heads evenly")
    every = reader.optional("full_attention_interval", 4)
    types = [LINEAR[0] if (i + 1) % every else FULL for i in range(reader.num_layers())]
    linear = linear_layers(reader, types)
    return read_decoder(reader, architecture, {}, Qwen35Spec, state=state, linear=linear)


def _of_text(reader: ConfigReader) -> ConfigReader:
    own = reader.config.get("text_config")
    if not isinstance(own, dict):
        raise reader.fail("text_config is missing: the text model's fields")
    tied = {of["tie_word_embeddings"] for of in (reader.config, own) if of.get("tie_word_embeddings") is not None}
    if len(tied) > 1:
        raise reader.fail("tie_word_embeddings differs from that of text_config")
    ends = {key: reader.config[key] for key in ("tie_word_embeddings", "architectures") if key in reader.config}
    return replace(reader, config={**ends, **own} | {"architectures": ends.get("architectures")})
