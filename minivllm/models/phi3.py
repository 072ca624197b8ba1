"""Phi-3, Phi-3.5 and Phi-4 (Microsoft 2024): Llama's network, with q, k and v in one matrix, gate and up in another.
LongRoPE stretches the rotary embedding; Phi-4-mini rotates three quarters of a head.

LongRoPE has two tables of factors, and takes the long one for every token as soon as a sequence is longer than the
context that the model was trained with first. What is cached was rotated by the short one, so this network's longest
sequence is that context, where all computes what transformers does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from minivllm.models.decoder_config import DecoderSpec, only_silu, read_decoder, rope_of, rotary_size
from minivllm.models.rope_decoder import FUSED_GATE_UP, FUSED_QKV, WEIGHTS, RopeDecoder
from minivllm.models.spec import SLIDING, ConfigReader, RopeSpec

DEFAULTS = {  # Phi3Config's
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 32_000,
    "max_position_embeddings": 4096,
}
LONGROPE = ("longrope", "su", "yarn")  # older names; these models have no other


def read_config(reader: ConfigReader, architecture: str) -> DecoderSpec:
    only_silu(reader)
    config = reader.config
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    is_long = (parameters.get("rope_type") or parameters.get("type")) in LONGROPE
    original, longest = _original(reader, parameters), reader.optional("max_position_embeddings", 4096)
    window = config.get("sliding_window")
    return read_decoder(
        reader,
        architecture,
        DEFAULTS,
        types=[SLIDING] * reader.num_layers(),
        window=None if window is None else reader.need("sliding_window"),
        rope=_longrope(reader, parameters, original, longest) if is_long else rope_of(reader),
        max_position=min(longest, original) if is_long else longest,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )


def _original(reader: ConfigReader, parameters: dict[str, Any]) -> int:
    """The context that the model was trained with first."""
    field = "original_max_position_embeddings"
    stated = parameters.get(field)
    return replace(reader, config=parameters).need(field) if stated is not None else reader.optional(field, 4096)


def _longrope(reader: ConfigReader, parameters: dict[str, Any], original: int, longest: int) -> RopeSpec:
    factor = reader.positive("factor", longest / original, parameters)
    sharpened = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short = parameters.get("short_factor")
    head_size = reader.optional("head_dim", reader.need("hidden_size") // reader.need("num_attention_heads"))
    size = rotary_size(reader, head_size)
    if not isinstance(short, list) or 2 * len(short) != size:
        raise reader.fail(f"short_factor must be a list of {size // 2} numbers, one of each pair of a head")
    return RopeSpec(
        "longrope",
        reader.positive("rope_theta", reader.positive("rope_theta", 10_000.0), parameters),
        factor,
        original,
        attention_factor=reader.positive("attention_factor", sharpened, parameters),
        factors=tuple(reader.positive("short_factor", of={"short_factor": value}) for value in short),
    )


class Phi3Model(RopeDecoder):
    weights_of = staticmethod(lambda spec: replace(WEIGHTS, fused=FUSED_QKV | FUSED_GATE_UP))
