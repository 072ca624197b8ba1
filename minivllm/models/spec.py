"""What configs have in common: what the engine knows of a model besides its weights, and a reader with checks.

Other sources than config.json (GGUF metadata, dummy shapes) are first written as such a config, so there is one reader
a model, in its file (minivllm/models/__init__.py has the rows). A setting that would change the result and is not
supported is a ModelError; nothing is ignored in silence. No torch here.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from minivllm.errors import ModelError
from minivllm.kv_groups import Latent

Config = Mapping[str, Any]

# What transformers takes when a config does not say.
DEFAULT_THETA = 10_000.0
MAX_LAYERS = 10_000  # what is kept for each layer must fit; the deepest models have some hundreds
MAX_POSITION = 1 << 25  # a table has a row for each; the longest contexts are of some ten million tokens
MAX_INT = 1 << 40  # of any size
SMALLEST, MAX_NUMBER = 1e-30, 1e30  # of any factor: what it is multiplied with stays finite in fp32
DTYPES = ("float32", "bfloat16", "float16")
FULL, SLIDING = "full_attention", "sliding_attention"  # what `layer_types` calls a layer


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. Which fields count depends on `kind` (minivllm/layers/rotary.py)."""

    kind: str = "default"  # default | linear | dynamic | llama3 | yarn | longrope
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()  # of each pair


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Of a mixture of experts: the layers in which a router gives each token to a few of many small MLPs."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalised: bool  # whether the weights of a token's experts are divided by their sum
    sparse: tuple[bool, ...]  # of each layer: whether it has experts, or one MLP as in a dense model


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """A head that tells classes apart."""

    labels: tuple[str, ...]  # by their numbers
    activation: str  # of its logits: softmax | sigmoid | identity


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the engine asks of any decoder. A model file's own spec adds what its network needs."""

    architecture: str  # name in the registry MODELS, as Hugging Face calls it
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int  # need not be hidden_size / num_heads
    intermediate_size: int
    vocab_size: int
    tie_embeddings: bool
    windows: tuple[int | None, ...]  # sliding window of each layer; None sees everything
    max_position: int  # longest sequence that the rotary embedding is made for
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # generation ends at any of them
    dtype: str  # of the checkpoint: one of DTYPES
    has_head: bool = True  # False: no LM head, so it embeds and cannot generate
    classifier: ClassifierSpec | None = None  # in place of the LM head
    latent: Latent | None = None  # what attention keeps of a token, if it is not K and V of each head
    num_source: int = 0  # positions of an encoder's output that its layers read; 0: it has no encoder

    @property
    def network(self) -> str:
        """Its name in the registry MODELS."""
        return self.architecture

    @property
    def num_parameters(self) -> int:
        """Norms and biases, below a thousandth, are left out."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        ends = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * attention + self.num_mlp_parameters + ends

    @property
    def num_mlp_parameters(self) -> int:
        """Of all layers, each with one gated MLP."""
        return self.num_layers * 3 * self.hidden_size * self.intermediate_size


S = TypeVar("S", bound=ModelSpec)


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """What the engine asks of any encoder."""

    architecture: str  # name in the registry MODELS
    hidden_size: int
    num_layers: int
    num_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    num_token_types: int
    norm_eps: float
    activation: str
    dtype: str  # of the checkpoint
    classifier: ClassifierSpec | None = None

    @property
    def network(self) -> str:
        return self.architecture

    @property
    def num_parameters(self) -> int:
        layer = 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size
        tables = self.vocab_size + self.max_position + self.num_token_types
        return self.num_layers * layer + tables * self.hidden_size  # norms and biases are below a thousandth


class _Noted(dict):
    """A config that notes which keys are asked for. A copy of it, or with more keys, asks for none."""

    def __init__(self, config: Config, read: set[str]):
        super().__init__(config)
        self._read = read

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Fields that many models' configs have, checked as they are read. Each model file's `read_config` asks it."""

    config: Config
    generation: Config
    where: str
    read: set[str] = field(default_factory=set)  # keys that were asked for, of this reader and those made of it

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", _Noted(self.config, self.read))

    def fail(self, message: str) -> ModelError:
        return ModelError(f"{self.where}: {message}")

    def need(self, field: str, kind: type = int) -> Any:
        value = self.config.get(field)
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= MAX_INT:
            raise self.fail(f'field "{field}" must be a positive {kind.__name__}, got {shown(value)}')
        return value

    def number(
        self, field: str, default: float | None = None, of: Config | None = None, low: float = -MAX_NUMBER
    ) -> float:
        """of: an object inside of the config; None: the config itself. default: where it has no such field, or null."""
        value = (self.config if of is None else of).get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= MAX_NUMBER:
            what = "positive number" if low > 0 else "finite number"
            raise self.fail(f'field "{field}" must be a {what}, and has a value of the wrong kind: {shown(value)}')
        return float(value)

    def num_layers(self) -> int:
        if (count := self.need("num_hidden_layers")) > MAX_LAYERS:
            raise self.fail(f"num_hidden_layers is {count:,}, and at most {MAX_LAYERS:,} can be")
        return count

    def positive(self, field: str, default: float | None = None, of: Config | None = None) -> float:
        """As number."""
        return self.number(field, default, of, low=SMALLEST)

    def optional(self, field: str, default: int) -> int:
        return default if self.config.get(field) is None else self.need(field)

    def max_position(self, rope: RopeSpec) -> int:
        stated = self.need("max_position_embeddings")
        if stated > MAX_POSITION:
            raise self.fail(f"max_position_embeddings is {stated:,}, and at most {MAX_POSITION:,} can be")
        if rope.kind != "yarn":
            return stated
        # Qwen's configs state the length before yarn stretches it; others the length after.
        if (stretched := rope.original_max_position * rope.factor) > MAX_POSITION:
            what = f"factor {rope.factor:g} of rope_parameters makes {stretched:g} positions"
            raise self.fail(f"{what}, and at most {MAX_POSITION:,} can be")
        return max(stated, int(stretched))

    def windows(self, types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
        """Of each layer; types: what it is where the config does not say."""
        types, num_layers = self.config.get("layer_types") or types, self.num_layers()
        if len(types) != num_layers or set(types) - {SLIDING, FULL}:
            raise self.fail(f"layer_types must name {SLIDING} or {FULL} for {num_layers} layers")
        return tuple(window if kind == SLIDING else None for kind in types)

    def checked(self, spec: S) -> S:
        """What the heads of every decoder must be."""
        if spec.num_heads % spec.num_kv_heads:
            raise self.fail(f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly")
        if spec.head_size % 2:
            raise self.fail(f"head size {spec.head_size} is odd, rotary embedding needs pairs")
        return spec

    def rope(self) -> RopeSpec:
        """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before)."""
        r = self.rope_parameters()
        kind = r.get("rope_type") or r.get("type") or "default"
        theta = self.positive("rope_theta", self.positive("rope_theta", DEFAULT_THETA), r)
        if (r.get("partial_rotary_factor") or self.config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise self.fail("partial_rotary_factor is not supported")
        if kind in ("default", "dynamic"):
            return RopeSpec(kind, theta)
        original = self.original_position(r) or self.need("max_position_embeddings")
        needed = {"linear": ("factor",), "llama3": ("low_freq_factor", "high_freq_factor", "factor")}.get(kind, ())
        if missing := next((field for field in needed if field not in r), None):
            raise self.fail(f"rope type \"{kind}\" needs the field '{missing}'")
        if kind == "linear":
            return RopeSpec(kind, theta, self.positive("factor", of=r))
        if kind == "llama3":
            low, high, factor = (self.positive(field, of=r) for field in needed)
            return RopeSpec(kind, theta, factor, original, low, high)
        if kind == "yarn":
            return self.yarn(r, theta, original)
        raise self.fail(f'rope type "{kind}" is not supported. Supported: default, linear, dynamic, llama3, yarn')

    def original_position(self, r: Config) -> int:
        """original_max_position_embeddings of rope_parameters; 0: it has none."""
        field = "original_max_position_embeddings"
        return 0 if r.get(field) is None else int(self.positive(field, of=r))

    def rope_parameters(self) -> dict[str, Any]:
        found = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if not isinstance(found, dict):
            raise self.fail(f"rope_parameters has a value of the wrong kind, not an object: {shown(found)}")
        return dict(found)

    def yarn(self, r: dict[str, Any], theta: float, original: int) -> RopeSpec:
        factor = self.positive("factor", self.need("max_position_embeddings") / original, r)

        def sharpen(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        attention = None if r.get("attention_factor") is None else self.positive("attention_factor", of=r)
        if attention is None and r.get("mscale") and r.get("mscale_all_dim"):
            attention = sharpen(self.positive("mscale", of=r)) / sharpen(self.positive("mscale_all_dim", of=r))
        return RopeSpec(
            "yarn",
            theta,
            factor,
            original,
            beta_fast=self.positive("beta_fast", 32.0, r),
            beta_slow=self.positive("beta_slow", 1.0, r),
            attention_factor=sharpen(1.0) if attention is None else attention,
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


def shown(value: Any) -> str:
    """For a message: whatever it is, in some words."""
    return reprlib.repr(value)
