"""What configs of the Llama family say (llama.py has the network). No torch here: a simulated device reads it too."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from minivllm.models.spec import FULL, SLIDING, Config, ConfigReader, ExpertsSpec, ModelSpec, RopeSpec

DEFAULT_WINDOW = 4096  # what transformers takes when a config does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSpec(ModelSpec):
    rms_eps: float
    rope: RopeSpec
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: ExpertsSpec | None = None  # None: every layer is dense

    @property
    def num_mlp_parameters(self) -> int:
        dense, of = 3 * self.hidden_size * self.intermediate_size, self.experts
        if of is None:
            return self.num_layers * dense
        sparse = of.num_experts * self.hidden_size * (3 * of.intermediate_size + 1)  # and its row of the router
        return sum(sparse if is_sparse else dense for is_sparse in of.sparse)


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes; None leaves it to the config's `attention_bias`."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool = False  # whether the config may ask for one
    qk_norm: bool = False
    head_size: int | None = None  # when the config does not say; None: hidden_size / num_heads
    sliding: str = "never"  # never | always | use_sliding_window (a switch in the config)
    expert_size: str = ""  # the field with an expert's intermediate size; "": every layer is dense
    normalised: bool = False  # whether experts' weights always are; else the config says
    defaults: Config = field(default_factory=dict)  # what transformers takes when the config does not say, if unusual


MIXTRAL = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(qkv_bias=False, o_bias=False, sliding="always"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False, sliding="use_sliding_window"),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_size=128, sliding="use_sliding_window"),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, expert_size="moe_intermediate_size"),
    "MixtralForCausalLM": Family(
        qkv_bias=False,
        o_bias=False,
        sliding="always",
        expert_size="intermediate_size",
        normalised=True,
        defaults=MIXTRAL,
    ),
}


# Fields of other mixtures of experts, which compute something else.
OTHER_MIXTURES = {
    "shared experts": ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"),
    "groups of experts": ("n_group", "topk_group"),
    "scores that are no softmax": ("scoring_func", "routed_scaling_factor", "use_expert_bias"),
    "sliding windows beside experts": ("use_sliding_window",),
}


def read_config(reader: ConfigReader, architecture: str) -> LlamaSpec:
    family = FAMILIES[architecture]
    reader = replace(reader, config={**family.defaults, **reader.config})
    _refuse_unsupported(reader)
    heads, hidden = reader.need("num_attention_heads"), reader.need("hidden_size")
    attention_bias = bool(reader.config.get("attention_bias", False))
    rope = reader.rope()
    spec = LlamaSpec(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=reader.num_layers(),
        num_heads=heads,
        num_kv_heads=reader.optional("num_key_value_heads", heads),
        head_size=reader.optional("head_dim", family.head_size or hidden // heads),
        intermediate_size=reader.need("intermediate_size"),
        vocab_size=reader.need("vocab_size"),
        rms_eps=reader.positive("rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=bool(reader.config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.mlp_bias and bool(reader.config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        windows=_windows(reader, family),
        max_position=reader.max_position(rope),
        bos_token_id=reader.token_ids("bos_token_id")[0] if reader.token_ids("bos_token_id") else None,
        eos_token_ids=reader.token_ids("eos_token_id"),
        dtype=reader.dtype(),
        has_head=architecture in (reader.config.get("architectures") or [architecture]),
        experts=_experts(reader, family) if family.expert_size else None,
    )
    return reader.checked(spec)


def _refuse_unsupported(reader: ConfigReader) -> None:
    if (act := reader.config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise reader.fail(f'hidden_act "{act}" is not supported, only "silu"')


def _experts(reader: ConfigReader, family: Family) -> ExpertsSpec:
    _refuse_other_mixtures(reader)
    num_experts, per_token = _num_experts(reader), reader.need("num_experts_per_tok")
    if per_token > num_experts:
        raise reader.fail(f"num_experts_per_tok is {per_token}, and there are {num_experts} experts")
    step, dense = reader.optional("decoder_sparse_step", 1), set(reader.config.get("mlp_only_layers") or ())
    layers = range(reader.num_layers())
    if not dense <= set(layers):
        raise reader.fail(f"mlp_only_layers names layers that are not there: {sorted(dense - set(layers))}")
    return ExpertsSpec(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=reader.need(family.expert_size),
        normalised=family.normalised or bool(reader.config.get("norm_topk_prob", False)),
        sparse=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
    )


def _num_experts(reader: ConfigReader) -> int:
    """Both names are in use: transformers 5 writes Qwen3-MoE's as Mixtral's."""
    names = [name for name in ("num_experts", "num_local_experts") if reader.config.get(name) is not None]
    found = {reader.need(name) for name in names or ["num_experts"]}
    if len(found) > 1:
        raise reader.fail("num_experts and num_local_experts differ")
    return found.pop()


def _refuse_other_mixtures(reader: ConfigReader) -> None:
    for what, fields in OTHER_MIXTURES.items():
        if found := next((field for field in fields if reader.config.get(field)), None):
            raise reader.fail(f"{found}={reader.config[found]!r}: {what} are not supported")


def _windows(reader: ConfigReader, family: Family) -> tuple[int | None, ...]:
    on = family.sliding == "always" or (family.sliding != "never" and bool(reader.config.get(family.sliding, False)))
    window = reader.config.get("sliding_window", DEFAULT_WINDOW) if on else None
    first = 0 if family.sliding == "always" else reader.config.get("max_window_layers", 28)
    return reader.windows([SLIDING if i >= first else FULL for i in range(reader.num_layers())], window)
