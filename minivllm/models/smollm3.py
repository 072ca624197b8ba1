"""SmolLM3 (Hugging Face 2025): Llama's network, of which every fourth layer has no positions (NoPE, Kazemnejad et al.
2023)."""

from __future__ import annotations

from typing import Any

from minivllm.models.decoder_config import DecoderSpec, only_silu, read_decoder
from minivllm.models.gguf import GGUF_ENDS, GGUF_LAYER, GGUFNames, Metadata, decoder_config, heads_of_llama
from minivllm.models.rope_decoder import RopeDecoder
from minivllm.models.spec import FULL, SLIDING, ConfigReader

DEFAULTS = {  # SmolLM3Config's
    "num_key_value_heads": 4,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}


def read_config(reader: ConfigReader, architecture: str) -> DecoderSpec:
    only_silu(reader)
    rotated = _rotated(reader)
    is_sliding = bool(reader.config.get("use_sliding_window")) and reader.config.get("sliding_window") is not None
    return read_decoder(
        reader,
        architecture,
        DEFAULTS,
        types=[SLIDING if is_sliding and not own else FULL for own in rotated],
        window=reader.need("sliding_window") if is_sliding else None,
        rotated=rotated,
    )


def _rotated(reader: ConfigReader) -> tuple[bool, ...]:
    """`no_rope_layers` says the opposite of its name: 1 for a layer that has positions."""
    stated, count = reader.config.get("no_rope_layers"), reader.num_layers()
    if stated is None:
        every = reader.optional("no_rope_layer_interval", 4)
        return tuple((i + 1) % every != 0 for i in range(count))
    if not isinstance(stated, list) or len(stated) != count or set(stated) - {0, 1}:
        raise reader.fail(f"no_rope_layers must be a list of {count} times 0 or 1")
    return tuple(map(bool, stated))


def gguf_config(about: Metadata) -> dict[str, Any]:
    """Which layers have no positions is in no file: every fourth, as llama.cpp takes it."""
    return decoder_config(about) | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "rope_parameters": about.rope_parameters(),
        "hidden_act": "silu",
    }


GGUF = GGUFNames(
    gguf_config, top=GGUF_ENDS, layer=GGUF_LAYER | {"ffn_norm": "post_attention_layernorm"}, heads=heads_of_llama
)


class SmolLM3Model(RopeDecoder):
    """Its layers are Llama's."""
