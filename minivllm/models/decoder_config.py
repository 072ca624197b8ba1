"""What configs of decoders say that are Llama's with differences, each in a file of its own. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from minivllm.kv_groups import StateSpec
from minivllm.models.spec import FULL, ConfigReader, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """Of rope_decoder.py's networks. Scales multiply, and are 1 where a model has none."""

    norm_eps: float
    rope: RopeSpec
    rotary_size: int  # of a head: the first of it are rotated
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    scale: float  # of scores
    score_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a sublayer adds
    logit_scale: float = 1.0
    logit_cap: float | None = None
    rotated: tuple[bool, ...] = ()  # of each layer: whether q and k are; empty: of all


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSpec(DecoderSpec):
    """Of hybrid.py's networks."""

    state: StateSpec
    linear: tuple[bool, ...]  # of each layer: whether it keeps a state, and no K and V


S = TypeVar("S", bound=DecoderSpec)


def read_decoder(
    reader: ConfigReader,
    architecture: str,
    defaults: dict[str, Any],
    kind: type[S] = DecoderSpec,
    *,
    types: Sequence[str] | None = None,
    window: int | None = None,
    **own: Any,
) -> S:
    """The fields that all have, and a family's `own`, which come before them. defaults: what transformers takes when
    the config does not say. types: of layers whose config does not name them, and their window; None: no layer has
    one, whatever the config says."""
    reader = replace(reader, config={**defaults, **reader.config})
    heads, hidden = reader.need("num_attention_heads"), reader.need("hidden_size")
    head_size = reader.optional("head_dim", hidden // heads)
    bias, ends = bool(reader.config.get("attention_bias", False)), reader.token_ids("bos_token_id")
    rope = own["rope"] if "rope" in own else rope_of(reader)
    fields: dict[str, Any] = {
        "architecture": architecture,
        "hidden_size": hidden,
        "num_layers": reader.num_layers(),
        "num_heads": heads,
        "num_kv_heads": reader.optional("num_key_value_heads", heads),
        "head_size": head_size,
        "intermediate_size": reader.need("intermediate_size"),
        "vocab_size": reader.need("vocab_size"),
        "tie_embeddings": bool(reader.config.get("tie_word_embeddings", False)),
        "windows": (None,) * reader.num_layers() if types is None else reader.windows(types, window),
        "max_position": reader.max_position(rope),
        "bos_token_id": ends[0] if ends else None,
        "eos_token_ids": reader.token_ids("eos_token_id"),
        "dtype": reader.dtype(),
        "has_head": architecture in (reader.config.get("architectures") or [architecture]),
        "norm_eps": reader.positive("rms_norm_eps", 1e-6),
        "rope": rope,
        "rotary_size": rotary_size(reader, head_size),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(reader.config.get("mlp_bias", False)),
        "scale": head_size**-0.5,
    }
    return reader.checked(kind(**fields | own))


def rope_of(reader: ConfigReader) -> RopeSpec:
    """As reader.rope(), of a network that rotates a part of each head if its config says so."""
    config = {key: value for key, value in reader.config.items() if key != PARTIAL}
    for field in ("rope_parameters", "rope_scaling"):
        if config.get(field):
            config[field] = {key: value for key, value in config[field].items() if key != PARTIAL}
    return replace(reader, config=config).rope()


def rotary_size(reader: ConfigReader, head_size: int, part: float = 1.0) -> int:
    """How much of a head is rotated; part: of it, where the config does not say."""
    size = int(head_size * reader.number(PARTIAL, reader.number(PARTIAL, part), reader.rope_parameters()))
    if size % 2 or not 0 < size <= head_size:
        raise reader.fail(f"{PARTIAL} asks to rotate {size} of {head_size} elements of a head")
    return size


def linear_layers(reader: ConfigReader, default: Sequence[str]) -> tuple[bool, ...]:
    """Of each layer, whether `layer_types` says that it keeps a state; default: what they are where it is missing."""
    count, types = reader.num_layers(), reader.config.get("layer_types") or default
    if len(types) != count or set(types) - {*LINEAR, *FULL_NAMES}:
        raise reader.fail(f"layer_types must name {LINEAR[0]} or {FULL} for {count} layers")
    if not set(types) - set(LINEAR):
        raise reader.fail("no layer has attention: a model of states alone is not supported")
    return tuple(kind in LINEAR for kind in types)


def only_silu(reader: ConfigReader) -> None:
    if (act := reader.config.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise reader.fail(f'hidden_act "{act}" is not supported, only "silu"')


PARTIAL = "partial_rotary_factor"
# What `layer_types` calls layers with a state, and others: in transformers 5, and what Mamba's configs had before.
LINEAR, FULL_NAMES = ("linear_attention", "mamba"), (FULL, "attention")
