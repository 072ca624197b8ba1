"""The configuration: a frozen tree, dotted overrides, presets, and the choices made for the user.

Every field can be set by `--set section.field=value`, by LLM(overrides={...}) and by a preset; nothing is read from the
environment, so that a benchmark's JSON holds all that made its number. After `EngineConfig.build` nothing changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from minivllm import features
from minivllm.errors import ConfigError
from minivllm.features import CONFLICTS, FEATURES, Conflict
from minivllm.registry import Registry, did_you_mean

T = TypeVar("T")

DEFAULT_MODEL = "smollm2-135m"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ModelConfig(Section, frozen=True):
    path: str = DEFAULT_MODEL  # alias, local folder, .gguf file, dummy:<shape> or Hub id
    tokenizer: str | None = None  # a folder or Hub id; None: the model's own
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    network: Literal["auto", "own", "transformers"] = "auto"  # whose code: auto: a file of ours if there is one
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"  # see features.py
    task: Literal["auto", "generate", "embed", "score", "classify"] = "auto"  # what for; see pooling/task.py
    pooling: Literal["auto", "mean", "last", "cls"] = "auto"  # which hidden states become a text's vector (task embed)
    dense_copy: bool = True  # beside packed weights, one in bf16 for steps of many tokens
    huge_pages: bool = True  # a CPU's packed weights move into pages of 2 MiB, where the system has some
    invariant: bool = False  # bits of a result depend on its request alone; see features.py
    max_model_len: int | None = None  # longest prompt + output, in tokens; None: what the model and the KV pool allow
    seed: int = 0  # of dummy weights and of requests that bring no seed


class QuantizationConfig(Section, frozen=True):
    """Of products with packed weights; which weights are packed says model.quantization."""

    activation_bits: Literal["auto", 8, 16] = "auto"  # of the integers that their inputs become on a CPU


class KVConfig(Section, frozen=True):
    block_size: int = 16  # tokens a block
    dtype: Literal["auto", "float16", "int8", "float8_e4m3fn"] = "auto"  # auto: the model's
    num_blocks: int | None = None  # size of the pool; None: from memory
    memory: str | None = None  # size of the pool in bytes, or with a unit: "2GiB"
    memory_fraction: float | None = None  # of what is free once the model is loaded; None: 0.9 of a GPU's, 0.5 else
    prefault: bool = False  # touch the whole pool at start-up, so that no step waits for the system to find pages
    allocation: str = "paged"
    prefix: str = "hash"
    hash: str = "sha256_cbor"
    fork: Literal["share", "lookup"] = "lookup"
    preemption: str = "recompute"
    swap_memory: str = "1GiB"  # of the host, for the KV of preempted requests; used only if kv.preemption can swap
    hash_seed: str | None = None  # fixes the key of the prefix hash; None: random, so that nobody can aim a collision


class SchedulerConfig(Section, frozen=True):
    kind: str = "unified"
    policy: str = "fcfs"
    admission: str = "all"
    max_num_seqs: int = 128  # requests in a step at most
    max_num_batched_tokens: int = 2048  # the token budget of a step
    chunked_prefill: bool = True
    encoder_budget: int | None = (
        None  # positions that an encoder makes in a step (1,500 of 30 s of sound); None: an item's
    )


class RunnerConfig(Section, frozen=True):
    inputs: str = "persistent"
    attention: str = "auto"
    kernels: Literal["auto", "torch", "triton"] = "auto"
    forward: str = "auto"
    compile: Literal["off", "background", "wait"] = "off"  # of the pieces of runner.forward=piecewise
    graphs: str = "none"


class SpecDecodeConfig(Section, frozen=True):
    method: str = "none"
    k: int = 8  # tokens guessed at a time, at most
    model: str | None = (
        None  # that guesses (draft): as model.path, with the same vocabulary; or a folder (eagle, medusa)
    )
    layers: int = 2  # of the model itself that guess (method self_draft)
    acceptance: str = "match"
    adaptive: bool = True
    ngram_min: int = 1  # shortest run of tokens that is looked up
    ngram_max: int = 4
    suffix_tokens: int = 32768  # of earlier outputs that the suffix method remembers; 0: none


class ExecutorConfig(Section, frozen=True):
    kind: str = "uni"
    num_threads: int | None = None  # of the CPU backend; None: the cores that this process may use
    device: str | None = None  # of kind=simulated: a name in simulate/devices.py or a profile.json; None: h100
    answer_tokens: int = 256  # of kind=simulated: the mean length of answers that no max_tokens ends before
    acceptance: float = 0.7  # of kind=simulated: the chance that a guessed token is right


class EngineSection(Section, frozen=True):
    core: Literal["inproc", "process"] = "inproc"
    replicas: int = 1  # engine cores side by side
    router: str = "prefix"  # which of them a request goes to
    overlap: int = 1  # steps in flight: 2 plans the next one while one runs; grammars and penalties delay sampling only
    restart: bool = True  # AsyncLLM and the server: start a process that has died again
    max_logprobs: int = 20  # of a position, as a request may ask for; -1: no limit
    step_timeout: float = 300.0  # seconds after which a step that still runs is told of; 0: never
    log_format: Literal["text", "json"] = "text"  # of an engine core in a process of its own


class StructuredConfig(Section, frozen=True):
    backend: str = "auto"  # of structured output; auto: the first that is installed and can hold the request's form


class LoRAConfig(Section, frozen=True):
    enabled: bool = False
    max_loras: int = 8  # slots: different adapters in a step at most
    max_rank: int = 64  # of an adapter
    max_cpu_loras: int = 32  # adapters in host memory
    adapters: dict[str, str] = {}  # name -> folder, loaded at start


class DebugConfig(Section, frozen=True):
    preempt_every: int = 0
    evict_all: bool = False
    check: bool = False  # assert every invariant after each step
    trace: str | None = None  # a file: record every step there, as minivllm.trace/1
    recent_steps: int = 0  # remember so many steps, without tokens, for the server's /debug/trace


class EngineConfig(Section, frozen=True):
    """Every option of an engine, in sections. Built once, by build(), and never changed."""

    preset: str = "v1"
    model: ModelConfig = ModelConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    kv: KVConfig = KVConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    runner: RunnerConfig = RunnerConfig()
    spec_decode: SpecDecodeConfig = SpecDecodeConfig()
    executor: ExecutorConfig = ExecutorConfig()
    engine: EngineSection = EngineSection()
    structured: StructuredConfig = StructuredConfig()
    lora: LoRAConfig = LoRAConfig()
    debug: DebugConfig = DebugConfig()

    @classmethod
    def build(cls, preset: str = "v1", overrides: Mapping[str, Any] | None = None) -> EngineConfig:
        """A preset with overrides on top. Raises ConfigError for an unknown preset, field or option, or a wrong
        type."""
        config = cls(preset=preset).override(preset_overrides(preset)).override(overrides or {})
        check_options(config)
        return config

    def override(self, overrides: Mapping[str, Any]) -> EngineConfig:
        """The same tree with dotted fields replaced. Strings (from a command line) are converted to the field's
        type."""
        tree = msgspec.to_builtins(self)
        for dotted, value in overrides.items():
            section, _, name = dotted.partition(".")
            if section not in tree or not isinstance(tree[section], dict) or name not in tree[section]:
                hint = did_you_mean(dotted, fields())
                raise ConfigError(f'no option "{dotted}".{hint} `python -m minivllm features` lists them.')
            tree[section][name] = None if value == "none" and dotted in _optional_fields() else value
        try:
            return msgspec.convert(tree, type(self), strict=False)
        except msgspec.ValidationError as e:
            raise ConfigError(_in_words(str(e), tree)) from None

    def get(self, dotted: str) -> Any:
        """The value of "section.field". Raises AttributeError for what does not exist."""
        section, _, name = dotted.partition(".")
        return getattr(getattr(self, section), name)

    def flat(self) -> dict[str, Any]:
        """{dotted field: value}, in the order of the tree."""
        return {dotted: self.get(dotted) for dotted in fields()}


class Preset(NamedTuple):
    overrides: dict[str, Any]
    what: str


_BEFORE_ORCA = {
    "scheduler.chunked_prefill": False,
    "kv.prefix": "none",
    "runner.inputs": "rebuild",
}

_WHOLE_PROMPTS = {"scheduler.kind": "phased", "scheduler.chunked_prefill": False}

PRESETS: dict[str, Preset] = {
    "naive": Preset(
        {**_BEFORE_ORCA, "scheduler.kind": "static", "scheduler.max_num_seqs": 1, "executor.kind": "naive"},
        "transformers' model with its DynamicCache, one request at a time. Not the original: the loop and the sampler "
        "are ours and not generate()'s, requests queue here, and the block pool is a ledger with no memory behind it",
    ),
    "static": Preset(
        {**_BEFORE_ORCA, "scheduler.kind": "static", "kv.allocation": "max"},
        "request-level batching (FasterTransformer): a batch runs until its last request has ended, each with room for "
        "the longest. Not the original: ended rows and padding burn no compute, and results are delivered at once",
    ),
    "orca-max": Preset(
        {**_BEFORE_ORCA, "scheduler.kind": "phased", "kv.allocation": "max"},
        "Orca (Max): iteration-level batching, a contiguous run for the longest request. Not the original, here and "
        "below: Orca is closed, so the scheduler is V0's and the allocator the vLLM paper's assumption, a buddy system",
    ),
    "orca-pow2": Preset(
        {**_BEFORE_ORCA, "scheduler.kind": "phased", "kv.allocation": "pow2"},
        "Orca (Pow2): the output's length, known beforehand (max_tokens), rounded up to a power of two",
    ),
    "orca-oracle": Preset(
        {**_BEFORE_ORCA, "scheduler.kind": "phased", "kv.allocation": "oracle"},
        "Orca (Oracle): exactly the output's length, known beforehand (max_tokens)",
    ),
    "v0": Preset(
        {
            "scheduler.kind": "phased",
            "scheduler.admission": "watermark",
            "scheduler.chunked_prefill": False,
            "kv.preemption": "auto",
            "kv.prefix": "none",
            "kv.fork": "share",
            "runner.inputs": "rebuild",
        },
        "vLLM V0 (June 2023): phased scheduler, sequence groups, swapping, inputs made from scratch in each step. "
        "Not the original: one process, and a sequence of n > 1 gets its first token a step after its group's first",
    ),
    "v1": Preset({}, "vLLM V1 (January 2025): unified scheduler, chunked prefill, prefix caching, persistent batch"),
    "v1-gpu": Preset(
        {"runner.inputs": "gather", "runner.graphs": "full+piecewise", "engine.overlap": 2},
        "vLLM V1 with its second model runner (2026), for a GPU: inputs gathered there from one permanent row a "
        "request, captured forwards, the next step started before this one's tokens are seen. Not the original: with "
        "speculative decoding a step starts when the host has seen the tokens of the one before",
    ),
    "tgi": Preset(
        {
            **_WHOLE_PROMPTS,
            "scheduler.policy": "served_ratio",
            "scheduler.admission": "reserve_all",
            "scheduler.max_num_batched_tokens": 4096,
            "kv.prefix": "none",
        },
        "TGI 2.x (Hugging Face): a prefill once enough wait, with room for prompt and max_tokens of everybody. Not the "
        "original: it also asks that enough of them fit at once; its prefix cache and chunks (since 3.0) are left out",
    ),
    "sglang": Preset(
        {
            **_WHOLE_PROMPTS,
            "scheduler.policy": "longest_prefix",
            "scheduler.admission": "reserve_share",
            "scheduler.max_num_batched_tokens": 8192,
            "kv.prefix": "radix",
        },
        "SGLang (2026): a radix tree, the longest cached beginning first, room for a share of outputs that adapts. Not "
        "the original: blocks of 16 tokens for its 1, prompts above 8,192 tokens are not cut, the last to be served is "
        "preempted and not the shortest output",
    ),
    "lightllm": Preset(
        {**_WHOLE_PROMPTS, "scheduler.admission": "peak", "kv.block_size": 1, "kv.prefix": "radix"},
        "LightLLM (2024): KV by single tokens, admission by the predicted peak. Not the original: it looks at the "
        "queue after six decodes only (router_max_wait_tokens), and guesses outputs if asked to (router_token_ratio)",
    ),
    "lmdeploy": Preset(
        {
            **_WHOLE_PROMPTS,
            "scheduler.policy": "half_full",
            "scheduler.max_num_seqs": 384,
            "scheduler.max_num_batched_tokens": 4096,
            "kv.block_size": 64,
            "kv.prefix": "none",
        },
        "LMDeploy 0.9, its PyTorch engine on an A100: a prefill when four wait or half of the places are free. Not the "
        "original: it cuts prompts that are longer than the budget, and nothing here is of TurboMind, its C++ engine",
    ),
    "sarathi": Preset(
        {
            "scheduler.policy": "decodes_first",
            "scheduler.admission": "reserve_prompt",
            "scheduler.max_num_batched_tokens": 512,
            "kv.prefix": "none",
        },
        "Sarathi-Serve (OSDI 2024): a small budget that decodes take first, the rest goes to prompts in chunks, with "
        "blocks for all of a prompt. Not the original: these are set aside, not taken, and micro-batches of a pipeline "
        "are not here",
    ),
    "distserve": Preset(
        {
            "scheduler.chunked_prefill": False,
            "scheduler.max_num_batched_tokens": 2048,
            "kv.prefix": "none",
        },
        "DistServe (OSDI 2024), of each of its two kinds of engine: whole prompts by arrival, decodes in one batch, no "
        "prefix cache. Not the original: what makes it DistServe, replicas for prompts and others for decodes, is "
        "`simulate --prefill-replicas`; here are neither its search for a placement nor its length of a prefill batch",
    ),
}


# The system that the book has come to by a chapter. Behind V0, each chapter turns its own switches.
MILESTONES = {0: "naive", 5: "orca-max", 6: "v0", 12: "v1"}
FIRST_TURN, LAST_CHAPTER = 9, 18


def preset_overrides(name: str) -> dict[str, Any]:
    """What a preset sets. ch00, ch01 ... are the engine as of a chapter of the book: the last milestone's preset,
    without what the chapters since have turned. Raises ConfigError for an unknown name.
    """
    if matched := re.fullmatch(r"ch(\d\d)", name):
        if (chapter := int(matched[1])) > LAST_CHAPTER:
            raise ConfigError(f'no preset "{name}": the book\'s chapters are ch00 to ch{LAST_CHAPTER}')
        system = PRESETS[MILESTONES[max(first for first in MILESTONES if first <= chapter)]].overrides
        turned = {f.field for f in FEATURES if f.chapter and FIRST_TURN <= int(f.chapter) <= chapter}
        return {field: value for field, value in system.items() if field not in turned}
    if name not in PRESETS:
        hint = did_you_mean(name, list(PRESETS))
        raise ConfigError(f'no preset "{name}".{hint} Presets: {", ".join(PRESETS)}; or ch06: as of chapter 6')
    return PRESETS[name].overrides


class Decision(NamedTuple):
    """A choice made for the user, printed once at start."""

    field: str
    value: Any
    reason: str


class Decisions(list[Decision]):
    def note(self, field: str, value: T, reason: str) -> T:
        """value, once it is written down."""
        self.append(Decision(field, value if isinstance(value, int) else str(value).removeprefix("torch."), reason))
        return value


def fields() -> list[str]:
    """Every dotted field."""
    return [
        f"{section}.{name}"
        for section, value in msgspec.to_builtins(EngineConfig()).items()
        if isinstance(value, dict)
        for name in value
    ]


def _optional_fields() -> set[str]:
    return {
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(EngineConfig)
        if isinstance(section.type, type) and issubclass(section.type, Section)
        for field in msgspec.structs.fields(section.type)
        if field.default is None
    }


def _in_words(message: str, tree: Mapping[str, Any]) -> str:
    """A validation message ("Expected `int`, got `str` - at `$.kv.block_size`") with the option's name, what it may be
    and what it was given."""
    what, _, where = message.partition(" - at `$.")
    section, _, name = where.rstrip("`").partition(".")
    types = {f.name: f.type for f in msgspec.structs.fields(EngineConfig)}
    kinds = {f.name: f.type for f in msgspec.structs.fields(types[section])} if section in types else {}
    if name not in kinds:  # inside of a value that is a table or a list
        return message
    kind = what.replace("`", "").removeprefix("Expected ").partition(", got")[0]
    allowed = "one of " + ", ".join(map(str, get_args(kinds[name]))) if get_origin(kinds[name]) is Literal else kind
    return f'{section}.{name} must be {allowed}, got "{tree[section][name]}"'


def parse_set(pairs: Iterable[str]) -> dict[str, str]:
    """["kv.prefix=none", ...] -> {"kv.prefix": "none"}. Raises ConfigError for a pair without '='."""
    overrides = {}
    for pair in pairs:
        dotted, eq, value = pair.partition("=")
        if not eq:
            raise ConfigError(f'--set takes section.field=value, got "{pair}"')
        overrides[dotted.strip()] = value.strip()
    return overrides


def check_options(config: EngineConfig) -> None:
    """Raise ConfigError for a value that its axis does not have, a bound that cannot hold, or a declared conflict."""
    registries = _registries()
    for feature in FEATURES:
        value = config.get(feature.field)
        registry = registries.get(feature.field)
        if registry is None:
            continue
        names = ("auto", *registry.names()) if feature.default == "auto" else registry.names()
        for part in registry.parts(value):
            if part not in names:
                hint = did_you_mean(part, names)
                raise ConfigError(f'{feature.field}: no option "{part}".{hint} Options: {", ".join(names)}')
    for field_, low, high in (
        ("kv.block_size", 1, 8192),
        ("kv.num_blocks", 1, None),
        ("kv.memory_fraction", 1e-6, 1.0),
        ("scheduler.max_num_seqs", 1, None),
        ("scheduler.max_num_batched_tokens", 1, None),
        ("scheduler.encoder_budget", 1, None),
        ("model.max_model_len", 2, None),
        ("executor.num_threads", 1, None),
        ("executor.answer_tokens", 1, None),
        ("executor.acceptance", 0, 1),
        ("engine.overlap", 1, 2),  # a third would only wait behind the second
        ("engine.replicas", 1, 64),
        ("spec_decode.k", 1, 64),
        ("spec_decode.ngram_min", 1, config.spec_decode.ngram_max),
        ("spec_decode.suffix_tokens", 0, None),
        ("lora.max_loras", 1, None),
        ("lora.max_rank", 1, 256),
        ("lora.max_cpu_loras", 1, None),
        ("spec_decode.layers", 1, None),
        ("debug.preempt_every", 0, None),
        ("debug.recent_steps", 0, None),
        ("engine.step_timeout", 0, None),
        ("engine.max_logprobs", -1, None),
    ):
        value = config.get(field_)
        if value is not None and (value < low or (high is not None and value > high)):
            raise ConfigError(
                f"{field_} must be at least {low:g}{f' and at most {high:g}' if high else ''}, got {value}"
            )
    if config.executor.device is not None and config.executor.kind != "simulated":
        raise ConfigError(f"executor.device={config.executor.device} needs executor.kind=simulated: see model.device")
    lora = config.lora
    if lora.max_cpu_loras < len(lora.adapters):
        raise ConfigError(f"lora.adapters names {len(lora.adapters)}, lora.max_cpu_loras admits {lora.max_cpu_loras}")
    if lora.adapters and not lora.enabled:
        raise ConfigError("lora.adapters needs lora.enabled=true")
    if config.engine.replicas > 1 and config.engine.core == "inproc":
        raise ConfigError(
            f"engine.replicas={config.engine.replicas} needs engine.core=process: each replica is a process of its own"
        )
    if (conflict := declared_conflict(config)) is not None:
        (a, x), (b, y) = conflict.first, conflict.second
        raise ConfigError(f"{a}={x} cannot be combined with {b}={y}: {conflict.reason}")


def _registries() -> dict[str, Registry]:
    """By axis."""
    return {r.axis: r for r in vars(features).values() if isinstance(r, Registry)}


def declared_conflict(config: EngineConfig) -> Conflict | None:
    """The first of the feature table that this configuration has."""
    registries = _registries()
    chosen = {}
    for feature in FEATURES:
        value = config.get(feature.field)
        parts = registries[feature.field].parts(value) if feature.field in registries else ()
        chosen[feature.name] = (value, *parts)
    found = (c for c in CONFLICTS if c.first[1] in chosen[c.first[0]] and c.second[1] in chosen[c.second[0]])
    return next(found, None)


# vLLM's keyword -> our field. What LLM(...) and the server's flags accept beside `overrides`.
VLLM_NAMES: dict[str, str] = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "task": "model.task",
    "pooling": "model.pooling",
    "dtype": "model.dtype",
    "quantization": "model.quantization",
    "device": "model.device",
    "seed": "model.seed",
    "max_model_len": "model.max_model_len",
    "block_size": "kv.block_size",
    "kv_cache_dtype": "kv.dtype",
    "num_gpu_blocks_override": "kv.num_blocks",
    "gpu_memory_utilization": "kv.memory_fraction",
    "kv_cache_memory_bytes": "kv.memory",
    "enable_prefix_caching": "kv.prefix",
    "prefix_caching_hash_algo": "kv.hash",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "enable_chunked_prefill": "scheduler.chunked_prefill",
    "scheduling_policy": "scheduler.policy",
    "attention_backend": "runner.attention",
    "guided_decoding_backend": "structured.backend",
    "speculative_config": "spec_decode.method",
    "enable_lora": "lora.enabled",
    "max_loras": "lora.max_loras",
    "max_lora_rank": "lora.max_rank",
    "max_cpu_loras": "lora.max_cpu_loras",
    "max_logprobs": "engine.max_logprobs",
    "executor": "executor.kind",  # this and the next are ours
    "gpu": "executor.device",
    "compile": "runner.compile",
    "data_parallel_size": "engine.replicas",
}

# Keys of vLLM's speculative_config -> our field.
VLLM_SPECULATIVE: dict[str, str] = {
    "method": "spec_decode.method",
    "num_speculative_tokens": "spec_decode.k",
    "model": "spec_decode.model",
    "prompt_lookup_min": "spec_decode.ngram_min",
    "prompt_lookup_max": "spec_decode.ngram_max",
}


def _from_speculative_config(given: Any) -> dict[str, Any]:
    """Overrides from vLLM's dictionary, or from its JSON text (a flag's value)."""
    try:
        found = msgspec.json.decode(given) if isinstance(given, str) else given
    except msgspec.DecodeError as e:
        raise ConfigError(f"speculative_config is no JSON ({e}): {given}") from None
    if not isinstance(found, Mapping):
        raise ConfigError(f'speculative_config must be an object such as {{"method": "ngram"}}, got {given!r}')
    for name in found:
        if name not in VLLM_SPECULATIVE:
            hint = did_you_mean(name, list(VLLM_SPECULATIVE))
            raise ConfigError(f'speculative_config: no key "{name}".{hint} Keys: {", ".join(VLLM_SPECULATIVE)}')
    overrides = {VLLM_SPECULATIVE[name]: value for name, value in found.items()}
    if overrides.get("spec_decode.method") == "draft_model":  # vLLM's name
        overrides["spec_decode.method"] = "draft"
    return overrides


def from_vllm_names(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides from vLLM's keyword names. Raises ConfigError for a name that is not known here."""
    overrides = {}
    for name, value in kwargs.items():
        if name not in VLLM_NAMES:
            hint = did_you_mean(name, list(VLLM_NAMES))
            raise ConfigError(
                f'no keyword "{name}".{hint} Every option can be set by overrides={{"section.field": value}}'
            )
        if name == "speculative_config":
            overrides |= _from_speculative_config(value)
            continue
        if name == "enable_prefix_caching":
            value = "hash" if value else "none"
        if name == "kv_cache_dtype":
            value = "float8_e4m3fn" if value in ("fp8", "fp8_e4m3") else value
        if name == "kv_cache_memory_bytes":
            value = str(value)
        if name == "guided_decoding_backend":
            value = "llguidance" if value == "guidance" else value  # vLLM's name
        if name == "data_parallel_size" and str(value) != "1":
            overrides["engine.core"] = "process"
        if name == "compile":
            overrides["runner.forward"] = "auto" if value == "off" else "piecewise"
        overrides[VLLM_NAMES[name]] = value
    return overrides


def budget_of(config: EngineConfig, max_model_len: int) -> int:
    """The most tokens that a step has."""
    budget = config.scheduler.max_num_batched_tokens
    return budget if config.scheduler.chunked_prefill else max(budget, max_model_len)
