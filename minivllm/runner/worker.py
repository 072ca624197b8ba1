"""Worker: one device's model, KV cache and runner, built from the configuration.

It chooses what was left open ("auto") and reports each choice with its reason. Registries come as arguments: only the
composition root knows them by name.
"""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm.attention.base import AttentionBackend, AttentionSpec, KVSpec
from minivllm.attention.select import choose as choose_attention
from minivllm.config import Decision, EngineConfig
from minivllm.errors import ConfigError
from minivllm.loading import LoadedModel, load_model
from minivllm.loading.cache import default_cache_dir
from minivllm.plan import StepOutput, StepPlan
from minivllm.registry import Registry
from minivllm.runner.batch import InputBatch
from minivllm.runner.block_moves import BlockMoves
from minivllm.runner.dummies import DummyBatches
from minivllm.runner.forward import ForwardOptions
from minivllm.runner.inputs import BatchKey, InputSizes, Rows
from minivllm.runner.memory import choose_max_model_len, parse_size, size_pool, zeros
from minivllm.runner.prompt_logprobs import PromptLogprobs
from minivllm.runner.runner import ModelRunner
from minivllm.sampling.sampler import Sampler

MEASURED_TOKENS = 128  # of the prefill that is timed


@dataclass(frozen=True, slots=True)
class Sizes:
    num_blocks: int
    num_host_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the control plane and the front end need to know of a worker."""

    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    model_name: str
    tokenizer_dir: Path
    decisions: list[Decision]
    info: dict[str, Any]


class Worker:
    def __init__(self, config: EngineConfig, attention: Registry, forwards: Registry, inputs: Registry):
        begin = time.perf_counter()
        self.config = config
        self.decisions: list[Decision] = []
        self.device = self._decide("model.device", *choose_device(config.model.device))
        if self.device.type == "cpu":
            torch.set_num_threads(self._decide("executor.num_threads", *choose_threads(config.executor.num_threads)))
        self.dtype = self._decide("model.dtype", *choose_dtype(config.model.dtype, self.device))
        loaded = self._load()
        name, backend_class = self._choose_attention(loaded.model.attention_layers, attention)
        kv_spec = self._kv_spec(loaded.model.attention_layers)
        sizes = self._size(kv_spec, loaded.spec.max_position)
        backend = backend_class(loaded.model.attention_layers, kv_spec, sizes.num_blocks + 1, self.device)
        self.runner = self._build_runner(loaded, backend, sizes, forwards, inputs)
        self._dummies = DummyBatches(sizes.num_blocks, config.kv.block_size, sizes.max_model_len)
        self._warm_up()
        self._facts = self._collect(loaded, name, kv_spec, sizes, time.perf_counter() - begin)

    def _load(self) -> LoadedModel:
        asked = self.config.model
        loaded = load_model(asked.path, self.dtype, self.device, seed=asked.seed, tokenizer=asked.tokenizer)
        self._decide("model.linear", *loaded.linear)
        return loaded

    def _choose_attention(self, layers: list[AttentionSpec], registry: Registry) -> tuple[str, type[AttentionBackend]]:
        backend_class, choice = choose_attention(self.config.runner.attention, self.device, layers, registry)
        self._decide("runner.attention", choice.name, choice.reason)
        return choice.name, backend_class

    def _kv_spec(self, layers: list[AttentionSpec]) -> KVSpec:
        first = layers[0]
        return KVSpec(len(layers), first.num_kv_heads, first.head_size, self.config.kv.block_size, self.dtype)

    def _size(self, spec: KVSpec, model_limit: int) -> Sizes:
        """The pools and the longest request that they allow."""
        kv, longest = self.config.kv, self.config.model.max_model_len or model_limit
        num_blocks, decision = size_pool(self.config, spec, self.device, longest)
        self.decisions.append(decision)
        max_model_len, decision = choose_max_model_len(self.config, model_limit, num_blocks * kv.block_size)
        self.decisions.append(decision)
        # Nothing is swapped where preemption always recomputes.
        num_host_blocks = 0 if kv.preemption == "recompute" else parse_size(kv.swap_memory) // spec.bytes_per_block
        return Sizes(num_blocks, num_host_blocks, max_model_len)

    def _build_runner(
        self, loaded: LoadedModel, backend: AttentionBackend, sizes: Sizes, forwards: Registry, inputs: Registry
    ) -> ModelRunner:
        config, model, max_rows = self.config, loaded.model, self.config.scheduler.max_num_seqs
        layers = model.attention_layers
        # One spare block takes the K and V of padding tokens.
        device_caches = [zeros(backend.kv_shape(sizes.num_blocks + 1), self.dtype, self.device) for _ in layers]
        host_shape = backend.kv_shape(sizes.num_host_blocks)
        host_caches = [zeros(host_shape, self.dtype, torch.device("cpu")) for _ in layers]
        input_sizes = InputSizes(max_rows, sizes.max_model_len, config.kv.block_size, sizes.num_blocks)
        return ModelRunner(
            model=model,
            forward=forwards.get(config.runner.forward)(model, self.device, self._forward_options(sizes)),
            attention=backend,
            kv_caches=device_caches,
            inputs=inputs.get(config.runner.inputs)(input_sizes),
            rows=Rows(max_rows),
            sampler=Sampler(loaded.spec.vocab_size, max_rows, self.device),
            prompt_logprobs=PromptLogprobs(model.logits),
            block_moves=BlockMoves(device_caches, host_caches, backend.block_axis),
        )

    def _forward_options(self, sizes: Sizes) -> ForwardOptions:
        config = self.config
        return ForwardOptions(
            compile=config.runner.compile,
            check=config.debug.check,
            max_tokens=max(config.scheduler.max_num_batched_tokens, sizes.max_model_len, MEASURED_TOKENS),
            num_threads=torch.get_num_threads(),
            cache=default_cache_dir() / "compiled",
        )

    def _warm_up(self) -> None:
        run_dummy = weakref.WeakMethod(self._run_dummy)  # the forward runner must not keep its worker alive
        self.runner.forward.warmup(lambda key: run_dummy()(key))
        if self.config.runner.forward != "eager":
            self._decide("runner.forward", *self.runner.forward.decision)

    @torch.inference_mode()
    def _run_dummy(self, key: BatchKey) -> None:
        self.runner.run_model(self._dummies.make(key.num_tokens))

    def _collect(
        self, loaded: LoadedModel, attention: str, spec: KVSpec, sizes: Sizes, load_seconds: float
    ) -> WorkerFacts:
        max_num_batched_tokens = self._choose_budget(self.config, sizes.max_model_len)
        info = {
            "model": loaded.name,
            "device": str(self.device),
            "vocab_size": loaded.spec.vocab_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention": attention,
            "num_blocks": sizes.num_blocks,
            "num_host_blocks": sizes.num_host_blocks,
            "block_size": spec.block_size,
            "kv_tokens": sizes.num_blocks * spec.block_size,
            "max_model_len": sizes.max_model_len,
            "load_seconds": round(load_seconds, 3),
        }
        return WorkerFacts(
            num_blocks=sizes.num_blocks,
            num_host_blocks=sizes.num_host_blocks,
            max_model_len=sizes.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            model_name=loaded.name,
            tokenizer_dir=loaded.tokenizer_dir,
            decisions=self.decisions,
            info=info,
        )

    def measure_costs(self) -> dict[str, float]:
        """What a preemption costs here: seconds_per_token to recompute, seconds_per_block to move one way."""
        with torch.inference_mode():
            costs = {
                "seconds_per_token": measure_prefill(self.runner, self._dummies.make(MEASURED_TOKENS)),
                "seconds_per_block": self.runner.block_moves.measure(),
            }
        shown = f"a token recomputed in {1e3 * costs['seconds_per_token']:.3f} ms"
        reason = f"measured: {shown}, a block moved in {1e3 * costs['seconds_per_block']:.3f} ms"
        self._decide("kv.preemption", "auto", reason)
        return costs

    def facts(self) -> WorkerFacts:
        return self._facts

    def execute(self, plan: StepPlan) -> StepOutput:
        return self.runner.execute(plan)

    def _decide(self, field: str, value: Any, reason: str) -> Any:
        shown = str(value).removeprefix("torch.") if not isinstance(value, int) else value
        self.decisions.append(Decision(field, shown, reason))
        return value

    def _choose_budget(self, config: EngineConfig, max_model_len: int) -> int:
        budget = config.scheduler.max_num_batched_tokens
        if config.scheduler.chunked_prefill or budget >= max_model_len:
            return budget
        reason = "without chunked prefill one step must be able to take the longest request"
        return self._decide("scheduler.max_num_batched_tokens", max_model_len, reason)


def measure_prefill(runner: ModelRunner, dummy: InputBatch) -> float:
    """Seconds a token of a prefill, the faster of two tries."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        runner.run_model(dummy).sum().item()  # item() waits for the device
        seconds.append(time.perf_counter() - start)
    return min(seconds) / dummy.num_tokens


def choose_device(name: str) -> tuple[torch.device, str]:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("model.device=cuda, but torch sees no CUDA device. Use model.device=cpu or auto")
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu"), "a CUDA device is there" if has_cuda else "no CUDA device"
    return torch.device(name), "as configured"


def choose_threads(asked: int | None) -> tuple[int, str]:
    if asked is not None:
        return asked, "as configured"
    try:
        return len(os.sched_getaffinity(0)), "the cores that this process may use"
    except AttributeError:  # macOS has no affinity
        return os.cpu_count() or 1, "the cores of this machine"


def choose_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    if name != "auto":
        return getattr(torch, name), "as configured"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return torch.bfloat16, "the GPU computes in bfloat16"
        return torch.float16, "the GPU has no bfloat16"
    if _cpu_has_bf16():
        return torch.bfloat16, "the CPU multiplies in bfloat16: half the memory traffic of float32"
    return torch.float32, "the CPU has no bfloat16 instructions, so bfloat16 would be emulated"


def _cpu_has_bf16() -> bool:
    """AVX-512 BF16 or AMX. torch has only private probes for them, so each may be missing."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
