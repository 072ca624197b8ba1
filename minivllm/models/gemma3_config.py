"""What configs of Gemma 3's text decoder say (gemma3.py has the network). No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minivllm.models.spec import FULL, SLIDING, Config, ConfigReader, ModelSpec, RopeSpec

# What transformers takes when a config does not say (Gemma3TextConfig).
DEFAULTS: Config = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
THETAS = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}  # fields of older configs


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Spec(ModelSpec):
    rms_eps: float
    rope: RopeSpec  # of layers that see everything
    local_rope: RopeSpec  # of layers that see a window
    scale: float  # of scores; not of the head size in every model
    bias: bool  # of q, k, v and o
    score_cap: float | None
    logit_cap: float | None


def read_config(reader: ConfigReader, architecture: str) -> Gemma3Spec:
    reader = replace(reader, config={**DEFAULTS, **reader.config})
    _refuse_unsupported(reader)
    rope, ends = _rope(reader, FULL), reader.token_ids("bos_token_id")
    return reader.checked(
        Gemma3Spec(
            architecture=architecture,
            hidden_size=reader.need("hidden_size"),
            num_layers=reader.num_layers(),
            num_heads=reader.need("num_attention_heads"),
            num_kv_heads=reader.need("num_key_value_heads"),
            head_size=reader.need("head_dim"),
            intermediate_size=reader.need("intermediate_size"),
            vocab_size=reader.need("vocab_size"),
            rms_eps=reader.positive("rms_norm_eps", 1e-6),
            rope=rope,
            local_rope=_rope(reader, SLIDING),
            scale=reader.positive("query_pre_attn_scalar") ** -0.5,
            bias=bool(reader.config.get("attention_bias", False)),
            score_cap=_cap(reader, "attn_logit_softcapping"),
            logit_cap=_cap(reader, "final_logit_softcapping"),
            tie_embeddings=bool(reader.config["tie_word_embeddings"]),
            windows=_windows(reader),
            max_position=reader.max_position(rope),
            bos_token_id=ends[0] if ends else None,
            eos_token_ids=reader.token_ids("eos_token_id"),
            dtype=reader.dtype(),
        )
    )


def _refuse_unsupported(reader: ConfigReader) -> None:
    if (act := reader.config["hidden_activation"]) != "gelu_pytorch_tanh":
        raise reader.fail(f'hidden_activation "{act}" is not supported, only "gelu_pytorch_tanh"')
    if reader.config.get("use_bidirectional_attention"):
        raise reader.fail("use_bidirectional_attention is not supported: a token sees those before it")


def _windows(reader: ConfigReader) -> tuple[int | None, ...]:
    every = reader.need("sliding_window_pattern")
    types = [SLIDING if (i + 1) % every else FULL for i in range(reader.num_layers())]
    return reader.windows(types, reader.need("sliding_window"))


def _rope(reader: ConfigReader, kind: str) -> RopeSpec:
    """`rope_parameters` by kind of layer (transformers 5), or a base for each kind and `rope_scaling`, which is of
    layers that see everything (before)."""
    by_kind, (field, theta) = reader.config.get("rope_parameters"), THETAS[kind]
    if by_kind is not None and set(by_kind) - {FULL, SLIDING}:
        raise reader.fail(f"rope_parameters must be by kind of layer, {FULL} and {SLIDING}")
    older = reader.config.get("rope_scaling") if kind == FULL else None
    own = {"rope_theta": reader.config.get(field, theta), **((by_kind or {}).get(kind) or older or {})}
    return replace(reader, config={**reader.config, "rope_parameters": own}).rope()


def _cap(reader: ConfigReader, field: str) -> float | None:
    return None if reader.config.get(field) is None else reader.positive(field)
