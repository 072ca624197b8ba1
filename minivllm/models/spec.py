"""ModelSpec: all that the engine knows of a model besides its weights, read from a Hugging Face config.json.

Other sources (GGUF metadata, dummy shapes) are first written as such a config, so there is one reader. What differs
between the families of one architecture is data: a row of FAMILIES. A setting that would change the result and is not
supported is a ModelError; nothing is ignored in silence. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from minivllm.errors import ModelError

Config = Mapping[str, Any]

# What transformers takes when a config does not say.
DEFAULT_THETA = 10_000.0
DEFAULT_WINDOW = 4096
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. Which fields count depends on `kind` (minivllm/layers/rotary.py)."""

    kind: str = "default"  # default | linear | dynamic | llama3 | yarn
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Of a mixture of experts: the layers in which a router gives each token to a few of many small MLPs."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalised: bool  # whether the weights of a token's experts are divided by their sum
    sparse: tuple[bool, ...]  # of each layer: whether it has experts, or one MLP as in a dense model


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: str  # name in the registry MODELS, as Hugging Face calls it
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int  # need not be hidden_size / num_heads
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # sliding window of each layer; None sees everything
    max_position: int  # longest sequence that the rotary embedding is made for
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # generation ends at any of them
    dtype: str  # of the checkpoint: one of DTYPES
    has_head: bool = True  # False: no LM head, so it embeds and cannot generate
    experts: ExpertsSpec | None = None  # None: every layer is dense

    @property
    def num_parameters(self) -> int:
        """Norms and biases, below a thousandth, are left out."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        ends = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * attention + self._num_mlp_parameters() + ends

    def _num_mlp_parameters(self) -> int:
        dense, of = 3 * self.hidden_size * self.intermediate_size, self.experts
        if of is None:
            return self.num_layers * dense
        sparse = of.num_experts * self.hidden_size * (3 * of.intermediate_size + 1)  # and its row of the router
        return sum(sparse if is_sparse else dense for is_sparse in of.sparse)

    @classmethod
    def from_hf(cls, config: Config, generation: Config | None = None, where: str = "config.json") -> ModelSpec:
        """From the contents of config.json and generation_config.json. `where` names the former in errors."""
        reader = ConfigReader(config, generation or {}, where)
        try:
            return reader.spec()
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
            raise reader.fail(f"a field has a value of the wrong kind ({e})") from e


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes; None leaves it to the config's `attention_bias`."""

    model_type: str
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
    "LlamaForCausalLM": Family("llama", mlp_bias=True),
    "MistralForCausalLM": Family("mistral", qkv_bias=False, o_bias=False, sliding="always"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, o_bias=False, sliding="use_sliding_window"),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_size=128, sliding="use_sliding_window"),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qk_norm=True, expert_size="moe_intermediate_size"),
    "MixtralForCausalLM": Family(
        "mixtral",
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


def headless_named(config: Config) -> str | None:
    """The family of a decoder that was saved without its LM head: LlamaForCausalLM of a LlamaModel."""
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    family = f"{name.removesuffix('Model')}ForCausalLM"
    return family if name.endswith("Model") and family in FAMILIES else None


@dataclass(frozen=True, slots=True)
class ConfigReader:
    config: Config
    generation: Config
    where: str

    def fail(self, message: str) -> ModelError:
        return ModelError(f"{self.where}: {message}")

    def need(self, field: str, kind: type = int) -> Any:
        value = self.config.get(field)
        if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
            raise self.fail(f'field "{field}" must be a positive {kind.__name__}, got {value!r}')
        return value

    def optional(self, field: str, default: int) -> int:
        return default if self.config.get(field) is None else self.need(field)

    def spec(self) -> ModelSpec:
        architecture = self.architecture()
        family = FAMILIES[architecture]
        return replace(self, config={**family.defaults, **self.config}).spec_of(architecture, family)

    def spec_of(self, architecture: str, family: Family) -> ModelSpec:
        self.refuse_unsupported()
        heads, hidden = self.need("num_attention_heads"), self.need("hidden_size")
        attention_bias = bool(self.config.get("attention_bias", False))
        rope = self.rope()
        spec = ModelSpec(
            architecture=architecture,
            hidden_size=hidden,
            num_layers=self.need("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=self.optional("num_key_value_heads", heads),
            head_size=self.optional("head_dim", family.head_size or hidden // heads),
            intermediate_size=self.need("intermediate_size"),
            vocab_size=self.need("vocab_size"),
            rms_eps=float(self.config.get("rms_norm_eps", 1e-6)),
            rope=rope,
            tie_embeddings=bool(self.config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=family.mlp_bias and bool(self.config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            windows=self.windows(family),
            max_position=self.max_position(rope),
            bos_token_id=self.token_ids("bos_token_id")[0] if self.token_ids("bos_token_id") else None,
            eos_token_ids=self.token_ids("eos_token_id"),
            dtype=self.dtype(),
            has_head=not headless_named(self.config),
            experts=self.experts(family) if family.expert_size else None,
        )
        if spec.num_heads % spec.num_kv_heads:
            raise self.fail(f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly")
        if spec.head_size % 2:
            raise self.fail(f"head size {spec.head_size} is odd, rotary embedding needs pairs")
        return spec

    def architecture(self) -> str:
        named = self.config.get("architectures") or [
            name for name, family in FAMILIES.items() if family.model_type == self.config.get("model_type")
        ]
        if headless := headless_named(self.config):
            return headless
        if not named or named[0] not in FAMILIES:
            what = f'architecture "{named[0]}"' if named else f"model_type {self.config.get('model_type')!r}"
            raise self.fail(f"{what} is not supported. Supported: {', '.join(FAMILIES)}")
        return named[0]

    def refuse_unsupported(self) -> None:
        if quantization := self.config.get("quantization_config"):
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
            raise self.fail(
                f'the checkpoint is quantised ("{method}"), which is not supported; take the plain model or a .gguf'
            )
        if (act := self.config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise self.fail(f'hidden_act "{act}" is not supported, only "silu"')

    def experts(self, family: Family) -> ExpertsSpec:
        self.refuse_other_mixtures()
        num_experts, per_token = self.num_experts(), self.need("num_experts_per_tok")
        if per_token > num_experts:
            raise self.fail(f"num_experts_per_tok is {per_token}, and there are {num_experts} experts")
        step, dense = self.optional("decoder_sparse_step", 1), set(self.config.get("mlp_only_layers") or ())
        layers = range(self.need("num_hidden_layers"))
        if not dense <= set(layers):
            raise self.fail(f"mlp_only_layers names layers that are not there: {sorted(dense - set(layers))}")
        return ExpertsSpec(
            num_experts=num_experts,
            experts_per_token=per_token,
            intermediate_size=self.need(family.expert_size),
            normalised=family.normalised or bool(self.config.get("norm_topk_prob", False)),
            sparse=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
        )

    def num_experts(self) -> int:
        """Both names are in use: transformers 5 writes Qwen3-MoE's as Mixtral's."""
        names = [name for name in ("num_experts", "num_local_experts") if self.config.get(name) is not None]
        found = {self.need(name) for name in names or ["num_experts"]}
        if len(found) > 1:
            raise self.fail("num_experts and num_local_experts differ")
        return found.pop()

    def refuse_other_mixtures(self) -> None:
        for what, fields in OTHER_MIXTURES.items():
            if found := next((field for field in fields if self.config.get(field)), None):
                raise self.fail(f"{found}={self.config[found]!r}: {what} are not supported")

    def max_position(self, rope: RopeSpec) -> int:
        stated = self.need("max_position_embeddings")
        # Qwen's configs state the length before yarn stretches it; others the length after.
        return max(stated, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else stated

    def windows(self, family: Family) -> tuple[int | None, ...]:
        num_layers = self.need("num_hidden_layers")
        on = family.sliding == "always" or (family.sliding != "never" and bool(self.config.get(family.sliding, False)))
        window = self.config.get("sliding_window", DEFAULT_WINDOW) if on else None
        first = 0 if family.sliding == "always" else self.config.get("max_window_layers", 28)
        default = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
        types = self.config.get("layer_types") or default
        if len(types) != num_layers or set(types) - {"sliding_attention", "full_attention"}:
            raise self.fail(f"layer_types must name sliding_attention or full_attention for {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in types)

    def rope(self) -> RopeSpec:
        """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before)."""
        r = dict(self.config.get("rope_parameters") or self.config.get("rope_scaling") or {})
        kind = r.get("rope_type") or r.get("type") or "default"
        theta = float(r.get("rope_theta") or self.config.get("rope_theta") or DEFAULT_THETA)
        if (r.get("partial_rotary_factor") or self.config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise self.fail("partial_rotary_factor is not supported")
        if kind in ("default", "dynamic"):
            return RopeSpec(kind, theta)
        original = r.get("original_max_position_embeddings") or self.need("max_position_embeddings")
        try:
            if kind == "linear":
                return RopeSpec(kind, theta, float(r["factor"]))
            if kind == "llama3":
                low, high = float(r["low_freq_factor"]), float(r["high_freq_factor"])
                return RopeSpec(kind, theta, float(r["factor"]), original, low, high)
            if kind == "yarn":
                return self.yarn(r, theta, original)
        except KeyError as e:
            raise self.fail(f'rope type "{kind}" needs the field {e}') from None
        raise self.fail(f'rope type "{kind}" is not supported. Supported: default, linear, dynamic, llama3, yarn')

    def yarn(self, r: dict[str, Any], theta: float, original: int) -> RopeSpec:
        factor = float(r.get("factor") or self.need("max_position_embeddings") / original)

        def sharpen(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        attention = r.get("attention_factor")
        if attention is None and r.get("mscale") and r.get("mscale_all_dim"):
            attention = sharpen(r["mscale"]) / sharpen(r["mscale_all_dim"])
        return RopeSpec(
            "yarn",
            theta,
            factor,
            original,
            beta_fast=float(r.get("beta_fast") or 32),
            beta_slow=float(r.get("beta_slow") or 1),
            attention_factor=float(sharpen(1.0) if attention is None else attention),
            truncate=bool(r.get("truncate", True)),
        )

    def token_ids(self, field: str) -> tuple[int, ...]:
        """The union of what both files say, each an id, a list or nothing: chat models often name their end of turn
        only in generation_config.json."""
        found: dict[int, None] = {}
        for source in (self.generation, self.config):
            value = source.get(field)
            found |= dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value])
        return tuple(found)

    def dtype(self) -> str:
        name = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32").removeprefix("torch.")
        if name not in DTYPES:
            raise self.fail(f'dtype "{name}" is not supported. Supported: {", ".join(DTYPES)}')
        return name
