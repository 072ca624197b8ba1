"""What the engine knows of a model whose network is transformers' own code (transformers_any.py), from its config.

Shapes of attention are not taken from here: they are measured, when the network has been made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minivllm.models.spec import FULL, SLIDING, Config, ConfigReader, ModelSpec

NETWORK = "transformers"  # in the registry MODELS
UNSTATED = 4096  # tokens of a request, where a config states no limit (ALiBi and the like)
ENDINGS = ("ForCausalLM", "LMHeadModel")
BY_LENGTH = ("dynamic", "longrope")  # kinds of rope that turn otherwise once a step has a long request


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec(ModelSpec):
    config: Config = field(repr=False, hash=False)  # all of config.json

    @property
    def network(self) -> str:
        return NETWORK


def knows(architecture: str) -> bool:
    """Whether the installed transformers has such a decoder. Imports it."""
    if not architecture.endswith(ENDINGS):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return architecture in {name for of in names.values() for name in ([of] if isinstance(of, str) else of)}


def transformers_config(config: Config, architecture: str) -> Any:
    """As transformers reads it. Raises what it raises."""
    import transformers

    return getattr(transformers, architecture).config_class.from_dict(dict(config))


def read_config(reader: ConfigReader, architecture: str) -> TransformersSpec:
    if reader.config.get("is_encoder_decoder"):
        raise reader.fail("is_encoder_decoder=true: transformers' own code is run for decoders alone")
    _refuse_state(reader, architecture)
    found = _read_by_transformers(reader, architecture)
    _refuse_kinds_of_layers(reader, found)
    heads, hidden = _number(reader, found, "num_attention_heads"), _number(reader, found, "hidden_size")
    both_halves = _first(_get(found, "decoder_layers"))  # of what may be one half of an encoder-decoder
    layers = both_halves or _number(reader, found, "num_hidden_layers")
    window = _get(found, "sliding_window")
    kinds = _get(found, "layer_types") or [FULL] * layers
    ends = reader.token_ids("bos_token_id")
    return TransformersSpec(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_first(_get(found, "num_key_value_heads")) or heads,
        head_size=_first(_get(found, "head_dim")) or hidden // heads,
        intermediate_size=_first(_get(found, "intermediate_size")) or 4 * hidden,
        vocab_size=_number(reader, found, "vocab_size"),
        tie_embeddings=bool(_get(found, "tie_word_embeddings")),
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        max_position=_max_position(reader, found),
        bos_token_id=ends[0] if ends else None,
        eos_token_ids=reader.token_ids("eos_token_id"),
        dtype=reader.dtype(),
        config=reader.config,
    )


def _refuse_state(reader: ConfigReader, architecture: str) -> None:
    import transformers

    if getattr(transformers, architecture)._is_stateful:
        raise reader.fail(
            f"{architecture} cannot run by transformers' own code: its layers keep a state, which the engine has no "
            "place for"
        )


def _read_by_transformers(reader: ConfigReader, architecture: str) -> Any:
    try:
        return transformers_config(reader.config, architecture).get_text_config(decoder=True)
    except Exception as e:  # its checks raise errors of many kinds
        raise reader.fail(f"transformers does not read it: {_line(e)}") from e


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _refuse_kinds_of_layers(reader: ConfigReader, found: Any) -> None:
    kinds = {str(kind) for kind in _get(found, "layer_types") or ()}
    if others := sorted(kinds - {FULL, SLIDING}):
        what = f"layers of the kind {', '.join(others)} keep more of a request than K and V, or see other tokens"
        raise reader.fail(f"{what}: transformers' own code runs with {FULL} and {SLIDING} alone")


def _max_position(reader: ConfigReader, found: Any) -> int:
    is_stated = _get(found, "max_position_embeddings") is not None
    stated = _number(reader, found, "max_position_embeddings") if is_stated else UNSTATED
    rope = _get(found, "rope_parameters") or {}
    by_kind = [of for of in rope.values() if isinstance(of, dict)] or [rope]
    kinds = [of for of in by_kind if of.get("rope_type") in BY_LENGTH]
    return min([stated, *(of.get("original_max_position_embeddings") or stated for of in kinds)])


def _number(reader: ConfigReader, found: Any, name: str) -> int:
    value = _first(_get(found, name))
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise reader.fail(f'field "{name}" must be a positive int, got {value!r}')
    return value


def _get(found: Any, name: str) -> Any:
    """None for what it lacks, and for what it says of each layer alone."""
    try:
        return getattr(found, name, None)
    except Exception:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None


def _first(value: Any) -> Any:
    """Of a list by layers: sizes are told once here."""
    return value[0] if isinstance(value, list | tuple) and value else value
