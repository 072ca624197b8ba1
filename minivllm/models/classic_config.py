"""What configs of GPT-2's kin say (classic.py has what their networks share). No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minivllm.models.decoder_config import rope_of, rotary_size
from minivllm.models.spec import FULL, SLIDING, Config, ConfigReader, ModelSpec, RopeSpec

# What configs call an activation -> one of classic.py's.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicSpec(ModelSpec):
    norm_eps: float
    activation: str  # of an MLP without a gate: one of classic.py's ACTIVATIONS
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    head_bias: bool = False
    rope: RopeSpec | None = None  # None: q and k are not rotated
    rotary_size: int = 0  # of a head: the first of it are rotated
    num_positions: int = 0  # rows of a table of learnt positions; 0: there is none
    alibi: float = 0.0  # what ALiBi's slopes are multiplied by; 0: scores have no such bias

    @property
    def num_mlp_parameters(self) -> int:
        return self.num_layers * 2 * self.hidden_size * self.intermediate_size


def renamed(reader: ConfigReader, names: Mapping[str, str], defaults: Config) -> ConfigReader:
    """Of a config in the usual names. names: {usual: the family's}; defaults: what transformers takes when the config
    does not say."""
    own = {usual: reader.config[theirs] for usual, theirs in names.items() if theirs in reader.config}
    return replace(reader, config={**defaults, **reader.config, **own})


def read_classic(reader: ConfigReader, architecture: str, kind: type[ClassicSpec] = ClassicSpec, **own: Any) -> Any:
    """The fields that all have, and a family's `own`, which come before them. reader: in the usual names."""
    heads, hidden = reader.need("num_attention_heads"), reader.need("hidden_size")
    if hidden % heads:
        raise reader.fail(f"{heads} heads do not divide the hidden size of {hidden}")
    ends, window = reader.token_ids("bos_token_id"), reader.config.get("sliding_window")
    fields: dict[str, Any] = {
        "architecture": architecture,
        "hidden_size": hidden,
        "num_layers": reader.num_layers(),
        "num_heads": heads,
        "num_kv_heads": reader.optional("num_key_value_heads", heads),
        "head_size": hidden // heads,
        "intermediate_size": reader.optional("intermediate_size", 4 * hidden),
        "vocab_size": reader.need("vocab_size"),
        "tie_embeddings": bool(reader.config["tie_word_embeddings"]),
        "windows": reader.windows([SLIDING if window else FULL] * reader.num_layers(), window),
        "max_position": reader.need("max_position_embeddings"),
        "bos_token_id": ends[0] if ends else None,
        "eos_token_ids": reader.token_ids("eos_token_id"),
        "dtype": reader.dtype(),
        "norm_eps": reader.positive("layer_norm_eps"),
        "activation": _activation(reader),
    }
    spec = reader.checked(kind(**fields | own))
    if spec.head_bias and spec.tie_embeddings:
        raise reader.fail("tie_word_embeddings is not supported beside an LM head that has a bias")
    return spec


def _activation(reader: ConfigReader) -> str:
    if (name := reader.config["hidden_act"]) not in ACTIVATIONS:
        raise reader.fail(f'activation "{name}" is not supported. Supported: {", ".join(ACTIVATIONS)}')
    return ACTIVATIONS[name]


def slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi's, of each head: of a power of two of them a geometric series from 2^(-8/n) to 2^-8; of other numbers those
    of the power below, and every other one of the power above (Press et al. 2022)."""
    power = 1 << (num_heads.bit_length() - 1)
    found = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return tuple(found + between[: num_heads - power])


def rotated(reader: ConfigReader, part: float = 1.0) -> dict[str, Any]:
    """The fields of a family that rotates the first `part` of each head, or as much as its config says."""
    head_size, rope = reader.need("hidden_size") // reader.need("num_attention_heads"), rope_of(reader)
    size = rotary_size(reader, head_size, part)
    return {"rope": rope, "rotary_size": size, "max_position": reader.max_position(rope)}
