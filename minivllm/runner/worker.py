"""Worker: one device's model, KV cache and runner, built from the configuration.

It chooses what was left open ("auto") and reports each choice with its reason. Registries come as arguments: only the
composition root knows them by name.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from minivllm.attention.base import AttentionBackend, AttentionSpec, KVSpec
from minivllm.attention.select import choose as choose_attention
from minivllm.config import Decision, EngineConfig
from minivllm.errors import ConfigError
from minivllm.kernels.dispatch import Dispatch
from minivllm.loading import LoadedModel, load_model
from minivllm.loading.cache import default_cache_dir
from minivllm.lora.slots import AdapterSlots, NoAdapters
from minivllm.machine import cpu_quota, num_cores
from minivllm.plan import Landing, StepOutput, StepPlan
from minivllm.quantization.crossover import TOKENS, run_layer, settle
from minivllm.registry import Registry
from minivllm.runner.attention_proof import gives_the_references_answer
from minivllm.runner.batch import InputBatch
from minivllm.runner.block_copy import TorchMove, choose_move
from minivllm.runner.block_moves import BlockMoves
from minivllm.runner.compile_job import gpu_bytes_beside
from minivllm.runner.dummies import DummyBatches
from minivllm.runner.forward import ForwardOptions
from minivllm.runner.forward_graphs import Graphed, Setting
from minivllm.runner.inputs import BatchKey, InputBuilder, InputSizes, Rows
from minivllm.runner.inputs_place import place_inputs
from minivllm.runner.late import make_send, stay_on_device
from minivllm.runner.memory import choose_max_model_len, parse_size, size_pool, zeros
from minivllm.runner.prompt_logprobs import PromptLogprobs
from minivllm.runner.rehearsal import peak_of, rehearse
from minivllm.runner.runner import ModelRunner
from minivllm.sampling.draws import choose_draws
from minivllm.sampling.grammar_mask import make_grammar_mask
from minivllm.sampling.processors import DEFAULT_PROCESSORS
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.verify import Verifier
from minivllm.spec_decode.base import Recipe, Target
from minivllm.spec_decode.make import MakeAcceptance, MakeProposer
from minivllm.spec_decode.throttle import Throttle
from minivllm.structured.compiler import GrammarCompiler

STEP_SIZES = (1, 2, 3, 5, 9, 17, 33, 65)  # tokens in a step that are timed if drafts are to be weighed

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
    lookahead: int = 0  # KV slots that proposing drafts takes behind a request's tokens


@dataclass(frozen=True, slots=True)
class Parts:
    """What a worker is built from: registries to choose from, and choices that are made."""

    attention: Registry
    forwards: Registry
    graphs: Registry
    inputs: Registry
    device_inputs: Registry  # the forms of some of them whose tables are on the device
    make_grammars: Callable[[Path, int], GrammarCompiler]  # from the tokenizer's folder and the vocabulary's size
    make_proposer: MakeProposer
    make_acceptance: MakeAcceptance


class Worker:
    def __init__(self, config: EngineConfig, parts: Parts):
        begin = time.perf_counter()
        self.config = config
        self.parts = parts
        self.decisions: list[Decision] = []
        self.device = self._decide("model.device", *choose_device(config.model.device))
        if self.device.type == "cpu":
            torch.set_num_threads(self._decide("executor.num_threads", *choose_threads(config.executor.num_threads)))
        self.dtype = self._decide("model.dtype", *choose_dtype(config.model.dtype, self.device))
        self.kernels = Dispatch(config.runner.kernels, self.device)
        loaded = self._load()
        recipe = parts.make_proposer(config, loaded, self.dtype, self.device)
        name, backend_class = self._choose_attention(loaded.model.attention_layers, recipe)
        self._make_inputs = self._place_inputs(backend_class)
        kv_spec = replace(self._kv_spec(loaded.model.attention_layers), beside=recipe.bytes_per_block)
        self._rotate_in_kernel(loaded.model, backend_class)
        forwards = peak_of(lambda: self._rehearse(loaded, backend_class, kv_spec), self.device)
        forwards += gpu_bytes_beside(config.runner.compile, self.device)
        sizes = self._size(kv_spec, loaded.spec.max_position, forwards)
        backend = backend_class(loaded.model.attention_layers, kv_spec, sizes.num_blocks + 1, self.device)
        self.throttle = Throttle(config.scheduler.max_num_seqs)
        self.runner = self._build_runner(loaded, backend, sizes, recipe)
        self._dummies = DummyBatches(sizes.num_blocks, config.kv.block_size, sizes.max_model_len)
        self._warm_up()
        if self.device.type != "cpu" or config.runner.kernels != "auto":  # else there was nothing to choose
            self._decide("runner.kernels", *self.kernels.decision)
        self._decide("model.linear", *self._settle_linear(loaded))
        if config.spec_decode.method != "none" and config.spec_decode.adaptive:
            self._calibrate()
        self._facts = self._collect(loaded, name, kv_spec, sizes, time.perf_counter() - begin)

    def _load(self) -> LoadedModel:
        asked = self.config.model
        loaded = load_model(
            asked.path,
            self.dtype,
            self.device,
            seed=asked.seed,
            tokenizer=asked.tokenizer,
            quantization=asked.quantization,
            dense_copy=asked.dense_copy,
            kernels=self.kernels,
        )
        self._decide("model.quantization", *loaded.quantization)
        return loaded

    def _choose_attention(self, layers: list[AttentionSpec], recipe: Recipe) -> tuple[str, type[AttentionBackend]]:
        subjects = [(layers, self._kv_spec(layers)), *([] if recipe.own is None else [recipe.own])]
        writes = {"cache write in 8 bits" if spec.dtype.itemsize == 1 else "cache write" for _, spec in subjects}
        names = "decode attention", "prefill attention", *sorted(writes)

        def proves(kind: type[AttentionBackend]) -> tuple[bool, str]:
            def proof(device: torch.device) -> bool:
                return all(gives_the_references_answer(kind, *subject, self.dtype, device) for subject in subjects)

            return self.kernels.verdict(names, proof, "the reference")

        backend_class, choice = choose_attention(
            self.config.runner.attention, self.device, layers, self.parts.attention, self._kv_dtype(), proves
        )
        self._decide("runner.attention", choice.name, choice.reason)
        return choice.name, backend_class

    def _place_inputs(self, backend_class: type[AttentionBackend]) -> Callable[[InputSizes], InputBuilder]:
        name, parts = self.config.runner.inputs, self.parts
        placed = place_inputs(name, parts.inputs, parts.device_inputs, self.device, backend_class, self.kernels)
        if placed.reason is not None:
            self._decide("runner.inputs", name, placed.reason)
        return placed.make

    def _rotate_in_kernel(self, model: torch.nn.Module, backend_class: type[AttentionBackend]) -> None:
        """Where the model and its attention backend can, and the kernel is used. Before any forward is made."""
        if not (hasattr(model, "rotate_in_kernel") and hasattr(backend_class, "turn_and_attend")):
            return
        kv_dtype = self._kv_dtype()

        def proof(device: torch.device) -> bool:
            from minivllm.kernels.triton import proofs

            return proofs.rope_write(device, self.dtype, kv_dtype)

        name = "rope + norm + write in 8 bits" if kv_dtype.itemsize == 1 else "rope + norm + cache write"
        if self.kernels.uses(name, proof):
            model.rotate_in_kernel()

    def _kv_spec(self, layers: list[AttentionSpec]) -> KVSpec:
        first = layers[0]
        return KVSpec(len(layers), first.num_kv_heads, first.head_size, self.config.kv.block_size, self._kv_dtype())

    def _kv_dtype(self) -> torch.dtype:
        return self.dtype if self.config.kv.dtype == "auto" else getattr(torch, self.config.kv.dtype)

    def _rehearse(self, loaded: LoadedModel, backend_class: type[AttentionBackend], spec: KVSpec) -> None:
        layers, longest = loaded.model.attention_layers, self.config.model.max_model_len or loaded.spec.max_position
        attention = backend_class(layers, spec, 1, self.device)
        sizes = self._input_sizes(Sizes(num_blocks=0, num_host_blocks=0, max_model_len=longest))  # the spare one alone
        graphed, most = self._forward(loaded.model, attention, sizes), budget_of(self.config, longest)
        with nullcontext(self._make_inputs(sizes)):  # its tables may take the device's memory, beside the forwards
            rehearse(loaded.model, graphed, attention.kv_shape(1), spec.dtype, sizes, most)

    def _size(self, spec: KVSpec, model_limit: int, forwards: int) -> Sizes:
        """The pools and the longest request that they allow. forwards: bytes that they take."""
        kv, longest = self.config.kv, self.config.model.max_model_len or model_limit
        num_blocks, decision = size_pool(self.config, spec, self.device, longest, forwards)
        self.decisions.append(decision)
        max_model_len, decision = choose_max_model_len(self.config, model_limit, num_blocks * kv.block_size)
        self.decisions.append(decision)
        # Nothing is swapped where preemption always recomputes.
        num_host_blocks = 0 if kv.preemption == "recompute" else parse_size(kv.swap_memory) // spec.bytes_per_block
        return Sizes(num_blocks, num_host_blocks, max_model_len)

    def _build_runner(
        self, loaded: LoadedModel, backend: AttentionBackend, sizes: Sizes, recipe: Recipe
    ) -> ModelRunner:
        config, model, parts, kv_dtype = self.config, loaded.model, self.parts, self._kv_dtype()
        # One spare block takes the K and V of padding tokens.
        shape = backend.kv_shape(sizes.num_blocks + 1)
        device_caches = [zeros(shape, kv_dtype, self.device, config.kv.prefault) for _ in model.attention_layers]
        adapters = self._adapters(model)  # first: a forward that is traced must see them
        inputs = self._make_inputs(self._input_sizes(sizes))
        sampler = self._sampler(loaded)
        proposer = recipe.make(
            Target(
                config=config,
                model=model,
                inputs=inputs,
                make_key=BatchKey,
                sampler=sampler,
                kv_caches=device_caches,
                attention=backend,
                throttle=self.throttle,
                adapters=adapters,
                num_blocks=sizes.num_blocks,
                max_model_len=sizes.max_model_len,
                make_cache=lambda shape, dtype: zeros(shape, dtype, self.device),
            )
        )
        graphed = self._forward(model, backend, self._input_sizes(sizes))
        if config.runner.graphs != "none":
            self._decide("runner.graphs", *graphed.decision)
        verifier = Verifier(sampler, parts.make_acceptance(proposer, sampler.draws))
        max_rows = config.scheduler.max_num_seqs
        verifier, inputs = stay_on_device(verifier, inputs, config.engine.overlap, max_rows, self.device)
        moved = [*device_caches, *proposer.kv_caches]
        host_caches = [host_cache(cache, backend.block_axis, sizes.num_host_blocks) for cache in moved]
        places = moved, host_caches, backend.block_axis
        moves_blocks = config.kv.fork == "share" or config.kv.preemption != "recompute"  # else no kernel is compiled
        move = choose_move(self.kernels, *places) if moves_blocks else TorchMove(backend.block_axis)
        return ModelRunner(
            model=model,
            forward=graphed.forward,
            attention=graphed.attention,
            kv_caches=device_caches,
            inputs=inputs,
            rows=Rows(max_rows),
            sampler=sampler,
            verifier=verifier,
            proposer=proposer,
            prompt_logprobs=PromptLogprobs(model.logits, make_send(config.engine.overlap, self.device)),
            block_moves=BlockMoves(*places, move),
            adapters=adapters,
        )

    def _input_sizes(self, sizes: Sizes) -> InputSizes:
        max_rows, block_size = self.config.scheduler.max_num_seqs, self.config.kv.block_size
        return InputSizes(max_rows, sizes.max_model_len, block_size, sizes.num_blocks)

    def _sampler(self, loaded: LoadedModel) -> Sampler:
        grammars = self.parts.make_grammars(loaded.tokenizer_dir, loaded.spec.vocab_size)
        processors = (make_grammar_mask(grammars, self.device), *DEFAULT_PROCESSORS)
        max_rows, draws = self.config.scheduler.max_num_seqs, choose_draws(self.kernels)
        return Sampler(loaded.spec.vocab_size, max_rows, self.device, processors, draws)

    def _adapters(self, model: torch.nn.Module) -> AdapterSlots | NoAdapters:
        lora = self.config.lora
        if not lora.enabled:
            return NoAdapters()
        sizes = lora.max_loras, lora.max_rank, self.config.scheduler.max_num_seqs
        slots = AdapterSlots(model, *sizes, self.dtype, self.kernels)
        self._decide("lora.enabled", lora.max_loras, slots.reason)
        return slots

    def _forward(self, model: torch.nn.Module, backend: AttentionBackend, sizes: InputSizes) -> Graphed:
        asked, graphs = self.config.runner.forward, self.config.runner.graphs
        if asked == "auto":  # fused says why where it stays eager
            asked = "fused" if graphs == "none" else "eager"
        make, options = self.parts.forwards.get(asked), self._forward_options(sizes.max_model_len)
        spec_decode = self.config.spec_decode
        num_drafts = 0 if spec_decode.method == "none" else spec_decode.k
        return self.parts.graphs.get(graphs)(Setting(make, model, self.device, options, backend, sizes, num_drafts))

    def _forward_options(self, max_model_len: int) -> ForwardOptions:
        config = self.config
        return ForwardOptions(
            compile=config.runner.compile,
            max_tokens=max(config.scheduler.max_num_batched_tokens, max_model_len, MEASURED_TOKENS),
            num_threads=torch.get_num_threads(),
            cache=default_cache_dir() / "compiled",
        )

    def _warm_up(self) -> None:
        run_dummy = weakref.WeakMethod(self._run_dummy)  # the forward runner must not keep its worker alive
        self.runner.forward.warmup(lambda key: run_dummy()(key))
        if self.config.runner.forward != "eager":
            self._decide("runner.forward", *self.runner.forward.decision)

    @torch.inference_mode()
    def _settle_linear(self, loaded: LoadedModel) -> tuple[str, str]:
        """How linear layers keep their weights; where they do in two forms, from how many tokens on each is used."""
        (how, reason), quantised = loaded.linear, loaded.quantised
        if quantised is None or not quantised.is_dual:
            return how, reason
        key_for, lm_head = self.runner.forward.key_for, loaded.model.lm_head
        stack = settle(quantised.stack, lambda n: self._run_dummy(key_for(1, n, n)))
        reason = f"{reason}; a copy in bf16 {stack}"
        if any(layer is lm_head for layer in quantised.layers):
            hidden = torch.randn(max(TOKENS), loaded.spec.hidden_size, dtype=self.dtype)
            reason += f", the LM head's {settle(quantised.head, run_layer(lm_head, hidden))}"
        return how, reason

    @torch.inference_mode()
    def _run_dummy(self, key: BatchKey) -> None:
        self.runner.run_model(self._dummies.make(*key))

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
            lookahead=self.runner.proposer.lookahead,
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

    def _calibrate(self) -> None:
        """Time forwards of several sizes, so that drafts are only computed where they save time."""
        most, logits = self.config.scheduler.max_num_batched_tokens, self.runner.model.logits
        key_for = self.runner.forward.key_for
        dummies = {n: self._dummies.make(*key_for(1, n, n)) for n in STEP_SIZES if n <= most}
        with torch.inference_mode():
            tries = [  # in turns, so that a busy moment of the machine does not meet one size alone
                {n: dummy.num_tokens * measure_prefill(self.runner, dummy, 1, logits) for n, dummy in dummies.items()}
                for _ in range(4)
            ]
            seconds = {n: min(found[n] for found in tries) for n in tries[0]}
            own, per_pass = self.runner.proposer, 0.0
            if hasattr(own, "run_model"):  # it computes its guesses
                per_pass = measure_prefill(own, self._dummies.make(1), 4, own.logits)
        self.throttle.calibrate(seconds, per_pass)
        k = self.config.spec_decode.k
        grown = float(self.throttle.seconds(np.array(1 + k)) / self.throttle.seconds(np.array(1)))
        self._decide("spec_decode.k", k, f"at most; measured: a step of {1 + k} tokens takes {grown:.2f} times as long")

    def facts(self) -> WorkerFacts:
        return self._facts

    def execute(self, plan: StepPlan) -> StepOutput | Landing:
        return self.runner.execute(plan)

    def load_adapter(self, key: str, path: str) -> int:
        """The adapter's rank. Raises AdapterError."""
        return self.runner.adapters.load(key, path)

    def drop_adapter(self, key: str) -> None:
        self.runner.adapters.drop(key)

    def _decide(self, field: str, value: Any, reason: str) -> Any:
        shown = str(value).removeprefix("torch.") if not isinstance(value, int) else value
        self.decisions.append(Decision(field, shown, reason))
        return value

    def _choose_budget(self, config: EngineConfig, max_model_len: int) -> int:
        budget = budget_of(config, max_model_len)
        if budget == config.scheduler.max_num_batched_tokens:
            return budget
        reason = "without chunked prefill one step must be able to take the longest request"
        return self._decide("scheduler.max_num_batched_tokens", budget, reason)


def budget_of(config: EngineConfig, max_model_len: int) -> int:
    """The most tokens that a step has."""
    budget = config.scheduler.max_num_batched_tokens
    return budget if config.scheduler.chunked_prefill else max(budget, max_model_len)


class RunsModel(Protocol):
    def run_model(self, batch: InputBatch) -> torch.Tensor: ...


def host_cache(cache: torch.Tensor, block_axis: int, num_blocks: int) -> torch.Tensor:
    """Room on the host for so many blocks of a device's KV tensor; a GPU's can be read and written by kernels there."""
    shape = list(cache.shape)
    shape[block_axis] = num_blocks
    if cache.device.type == "cuda" and num_blocks:
        return torch.zeros(shape, dtype=cache.dtype, pin_memory=True)
    return zeros(tuple(shape), cache.dtype, torch.device("cpu"))


def measure_prefill(
    runner: RunsModel,
    dummy: InputBatch,
    num_tries: int = 2,
    logits: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
) -> float:
    """Seconds a token of a prefill, the fastest of some tries; logits: what else to time, on all hidden states."""
    seconds = []
    for _ in range(num_tries):
        start = time.perf_counter()
        hidden = runner.run_model(dummy)
        logits(hidden)[-1].sum().item()  # item() waits for the device
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
    cores, quota = num_cores(), cpu_quota()
    if quota is not None and quota < cores:
        # A step that uses up the limit with one thread more stands still until the next period.
        return max(1, int(quota)), f"of {cores} cores: the control group's limit is the time of {quota:g}"
    return cores, "the cores that this process may use"


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
