"""The data plane of one device, from the configuration: what was left open ("auto") is chosen here, with its reason."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from minivllm import features
from minivllm.attention.base import AttentionBackend, AttentionSpec, CrossBackend, KVSpec, StateBackend, kv_spec
from minivllm.attention.cross import FIRST_SLOT, slot_shape
from minivllm.attention.groups import in_groups, make_backend
from minivllm.attention.select import backend_beside, check_alike, is_latent
from minivllm.attention.select import choose as choose_attention
from minivllm.batch import BatchKey, InputSizes
from minivllm.config import Decision, Decisions, EngineConfig, budget_of, declared_conflict
from minivllm.engine.build.facts import About, facts_with_kv
from minivllm.engine.build.grammars import build_grammars
from minivllm.engine.build.kv import choose_groups
from minivllm.errors import ConfigError
from minivllm.facts import WorkerFacts
from minivllm.kernels.dispatch import Dispatch
from minivllm.kv_groups import CROSS, STATE, KVGroups, block_size_for
from minivllm.loading import LoadedModel, load_model
from minivllm.loading.cache import default_cache_dir
from minivllm.lora.slots import AdapterSlots, NoAdapters
from minivllm.quantization import rowwise
from minivllm.runner.async_sampling import send_for, stay_on_device
from minivllm.runner.attention_proof import gives_the_references_answer
from minivllm.runner.block_copy import TorchMove, choose_move
from minivllm.runner.block_moves import BlockMoves
from minivllm.runner.calibrate import MEASURED_TOKENS, calibrate_throttle, settle_linear
from minivllm.runner.compile_job import gpu_bytes_beside
from minivllm.runner.dummies import DummyBatches
from minivllm.runner.forward import ForwardOptions
from minivllm.runner.forward_graphs import Graphed, Setting
from minivllm.runner.head_sampling import SamplingHead
from minivllm.runner.inputs import InputBuilder, Rows
from minivllm.runner.inputs_place import place_inputs
from minivllm.runner.memory import Sizes, Slots, format_size, host_cache, size_memory, size_slots, zeros
from minivllm.runner.model_state import make_state
from minivllm.runner.platform import choose_device, choose_dtype, choose_threads
from minivllm.runner.profile_run import peak_of, profile_run
from minivllm.runner.prompt_logprobs import PromptLogprobs
from minivllm.runner.runner import ModelRunner
from minivllm.runner.worker import Worker
from minivllm.sampling.draws import choose_draws
from minivllm.sampling.grammar_mask import make_grammar_mask
from minivllm.sampling.processors import DEFAULT_PROCESSORS
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.verify import Verifier
from minivllm.spec_decode.ahead import DraftsAhead
from minivllm.spec_decode.base import Recipe, Target
from minivllm.spec_decode.throttle import Throttle


class WorkerBuilder:
    """settled: what was decided before torch was there. `build` makes the parts, in the order in which one needs the
    other; a subclass makes some of them otherwise."""

    kind: ClassVar[type[Worker]] = Worker

    def __init__(self, config: EngineConfig, settled: Decision):
        self.config = config
        self.decisions = Decisions()
        self.device = self.decisions.note("model.device", *choose_device(config.model.device))
        if self.device.type == "cpu":
            threads = choose_threads(config.executor.num_threads)
            torch.set_num_threads(self.decisions.note("executor.num_threads", *threads))
            self.decisions.append(settled)
        self.dtype = self.decisions.note("model.dtype", *choose_dtype(config.model.dtype, self.device))
        self.kernels = Dispatch(config.runner.kernels, self.device)
        self.of_states: type[StateBackend] | None = None
        self.of_cross: type[CrossBackend] | None = None
        self.throttle = Throttle(config.scheduler.max_num_seqs)

    def build(self) -> Worker:
        begin, loaded = time.perf_counter(), self.load()
        layers = loaded.model.attention_layers
        config = self.config = self._with_room_for_states(layers)
        recipe = features.PROPOSERS.get(config.spec_decode.method)(config, loaded, self.dtype, self.device)
        name, backend_class = self.choose_attention(layers, recipe)
        self.make_inputs = self._place_inputs(backend_class)
        self.groups = groups = self.make_groups(layers, recipe)
        layers = loaded.model.attention_layers = in_groups(layers, groups)
        kv_spec = replace(self._kv_spec(layers), num_layers=groups.num_tensors, beside=recipe.bytes_per_block)
        self._rotate_in_kernel(loaded.model, backend_class)
        forwards = peak_of(lambda: self.profile_run(loaded, backend_class, kv_spec), self.device)
        forwards += gpu_bytes_beside(config.runner.compile, self.device)
        slots = self._encoder_slots(layers, kv_spec, loaded, forwards)
        forwards += slots.num_bytes
        sizes, decisions = size_memory(config, kv_spec, groups, self.device, loaded.spec.max_position, forwards)
        self.decisions += decisions
        backend = self._make_backend(backend_class, layers, kv_spec, sizes.num_blocks + 1)
        runner = self.make_runner(loaded, backend, sizes, recipe)
        num_groups = len(groups.groups)
        dummies = DummyBatches(sizes.num_blocks, config.kv.block_size, sizes.max_model_len, num_groups)
        worker = self.kind(runner, dummies, self.decisions, *([DraftsAhead] if self.speculates_ahead else []))
        self._warm_up(worker)
        self._measure(worker, loaded, backend)
        facts = self._facts(loaded, name, sizes, runner, time.perf_counter() - begin)
        worker.known = replace(facts, encoder_positions=loaded.spec.num_source, encoder_slots=slots.count)
        return worker

    @property
    def speculates_ahead(self) -> bool:
        """Steps are planned behind one whose drafts are not verified yet."""
        return self.config.engine.overlap > 1 and self.config.spec_decode.method != "none"

    def load(self) -> LoadedModel:
        asked = self.config.model
        loaded = load_model(
            asked.path,
            self.dtype,
            self.device,
            seed=asked.seed,
            tokenizer=asked.tokenizer,
            quantization=asked.quantization,
            dense_copy=asked.dense_copy,
            activation_bits=self.config.quantization.activation_bits,
            kernels=self.kernels,
            dtype_asked=asked.dtype != "auto",
            invariant=asked.invariant,
            network=asked.network,
        )
        if loaded.network is not None:
            self.decisions.note("model.network", *loaded.network)
        self.decisions.note("model.quantization", *loaded.quantization)
        if loaded.activation_bits is not None:
            self.decisions.note("quantization.activation_bits", *loaded.activation_bits)
        return loaded

    # ----------------------------------------------------------------------------------------------------- attention

    def choose_attention(self, layers: list[AttentionSpec], recipe: Recipe) -> tuple[str, type[AttentionBackend]]:
        own = [layer for layer in layers if layer.cross is None]
        subjects = [(own, self._kv_spec(own)), *([] if recipe.own is None else [recipe.own])]
        check_alike(layers, [] if recipe.own is None else recipe.own.layers)
        registry = features.LATENT_ATTENTION if is_latent(layers) else features.ATTENTION
        writes = {"cache write in 8 bits" if spec.dtype.itemsize == 1 else "cache write" for _, spec in subjects}
        names = "decode attention", "prefill attention", *sorted(writes)

        def proves(kind: type[AttentionBackend]) -> tuple[bool, str]:
            def proof(device: torch.device) -> bool:
                return all(gives_the_references_answer(kind, *subject, self.dtype, device) for subject in subjects)

            return self.kernels.verdict(names, proof, "the reference")

        other = None if self._kv_dtype() is self.dtype else self._kv_dtype()
        backend_class, choice = choose_attention(
            self.config.runner.attention, self.device, layers, registry, other, proves
        )
        self.of_states = backend_beside(choice.name, STATE, layers, features.STATE_ATTENTION)
        self.of_cross = backend_beside(choice.name, CROSS, layers, features.CROSS_ATTENTION)
        self.decisions.note("runner.attention", choice.name, choice.reason)
        return choice.name, backend_class

    def _with_room_for_states(self, layers: list[AttentionSpec]) -> EngineConfig:
        """The configuration, whose blocks hold a layer's recurrent state each."""
        asked, of_state = self.config.kv.block_size, next((x for x in layers if x.state is not None), None)
        if of_state is None or of_state.state is None:
            return self.config
        bytes_per_token = kv_spec([of_state], 1, self._kv_dtype()).bytes_per_block
        size = block_size_for(of_state.state, bytes_per_token, asked)
        if size == asked:
            return self.config
        takes = f"{format_size(4 * of_state.state.num_floats)}, as K and V of {size} tokens do; {asked} were asked for"
        self.decisions.note("kv.block_size", size, f"a block holds a layer's recurrent state, which takes {takes}")
        return self.config.override({"kv.block_size": size})

    def _encoder_slots(self, layers: list[AttentionSpec], spec: KVSpec, loaded: LoadedModel, forwards: int) -> Slots:
        """How many encoder outputs there may be at once; no memory is taken for them but for the first one."""
        each = sum(prod(slot_shape(layer)) * self.dtype.itemsize for layer in layers if layer.cross is not None)
        if not each:
            return Slots(0, 0)
        longest = self.config.model.max_model_len or loaded.spec.max_position
        slots = size_slots(self.config, spec, self.groups, self.device, longest, forwards, each)
        told = (
            f"as configured; {slots.count} at once may have an encoder's output, {format_size(each)} each when it comes"
        )
        self.decisions.note("scheduler.max_num_seqs", self.config.scheduler.max_num_seqs, told)
        return slots

    def make_groups(self, layers: list[AttentionSpec], recipe: Recipe) -> KVGroups:
        return choose_groups(self.config, [layer.kind for layer in layers], recipe.own is not None, self.decisions)

    def _place_inputs(self, backend_class: type[AttentionBackend]) -> Callable[[InputSizes], InputBuilder]:
        name, registries = self.config.runner.inputs, (features.INPUT_BUILDERS, features.DEVICE_INPUT_BUILDERS)
        placed = place_inputs(name, *registries, self.device, backend_class, self.kernels)
        if placed.reason is not None:
            self.decisions.note("runner.inputs", name, placed.reason)
        return placed.make

    def _make_backend(
        self, kind: type[AttentionBackend], layers: list[AttentionSpec], spec: KVSpec, num_blocks: int
    ) -> AttentionBackend:
        return make_backend(kind, layers, spec, num_blocks, self.device, self.of_states, self.of_cross)

    def _rotate_in_kernel(self, model: torch.nn.Module, backend_class: type[AttentionBackend]) -> None:
        """Where the model and its attention backend can, and the kernel is used. Before any forward is made."""
        if not (hasattr(model, "rotate_in_kernel") and hasattr(backend_class, "rope_and_attend")):
            return
        kv_dtype = self._kv_dtype()

        def proof(device: torch.device) -> bool:
            from minivllm.kernels.triton import proofs

            return proofs.rope_write(device, self.dtype, kv_dtype)

        name = "rope + norm + write in 8 bits" if kv_dtype.itemsize == 1 else "rope + norm + cache write"
        if self.kernels.uses(name, proof):
            model.rotate_in_kernel()

    def _kv_spec(self, layers: list[AttentionSpec]) -> KVSpec:
        return kv_spec(layers, self.config.kv.block_size, self._kv_dtype())

    def _kv_dtype(self) -> torch.dtype:
        return self.dtype if self.config.kv.dtype == "auto" else getattr(torch, self.config.kv.dtype)

    # ------------------------------------------------------------------------------------------------------- forward

    def _forward(self, model: torch.nn.Module, backend: AttentionBackend, sizes: InputSizes) -> Graphed:
        asked, graphs = self.config.runner.forward, self.config.runner.graphs
        if asked == "auto":  # fused says why where it stays eager
            asked = "fused" if graphs == "none" else "eager"
        make, options = features.FORWARDS.get(asked), self._forward_options(sizes.max_model_len)
        spec_decode = self.config.spec_decode
        num_drafts = 0 if spec_decode.method == "none" else spec_decode.k
        setting = Setting(make, model, self.device, options, backend, sizes, num_drafts)
        return features.GRAPHS.get(graphs)(setting)

    def _forward_options(self, max_model_len: int) -> ForwardOptions:
        config = self.config
        return ForwardOptions(
            compile=config.runner.compile,
            max_tokens=max(config.scheduler.max_num_batched_tokens, max_model_len, MEASURED_TOKENS),
            num_threads=torch.get_num_threads(),
            cache=default_cache_dir() / "compiled",
        )

    def profile_run(self, loaded: LoadedModel, backend_class: type[AttentionBackend], spec: KVSpec) -> None:
        layers, longest = loaded.model.attention_layers, self.config.model.max_model_len or loaded.spec.max_position
        attention = self._make_backend(backend_class, layers, spec, 1)
        sizes = self._input_sizes(Sizes(num_blocks=0, num_host_blocks=0, max_model_len=longest))  # the spare one alone
        graphed, most = self._forward(loaded.model, attention, sizes), budget_of(self.config, longest)
        with nullcontext(self.make_inputs(sizes)):  # its tables may take the device's memory, beside the forwards
            tensors = [zeros(attention.kv_shape(1), spec.dtype, self.device) for _ in range(self.groups.num_tensors)]
            profile_run(loaded.model, graphed, self._caches(layers, tensors), sizes, most)

    # -------------------------------------------------------------------------------------------------------- runner

    def make_runner(self, loaded: LoadedModel, backend: AttentionBackend, sizes: Sizes, recipe: Recipe) -> ModelRunner:
        config, model, kv_dtype = self.config, loaded.model, self._kv_dtype()
        # One spare block takes the K and V of padding tokens.
        shape = backend.kv_shape(sizes.num_blocks + 1)
        tensors = [zeros(shape, kv_dtype, self.device, config.kv.prefault) for _ in range(self.groups.num_tensors)]
        device_caches = self._caches(model.attention_layers, tensors)
        adapters = self._adapters(loaded)  # first: a forward that is traced must see them
        inputs = self.make_inputs(self._input_sizes(sizes))
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
            self.decisions.note("runner.graphs", *graphed.decision)
        make_acceptance = features.ACCEPTANCES.get(config.spec_decode.acceptance)
        verifier = Verifier(sampler, make_acceptance(proposer, sampler.draws))
        max_rows = config.scheduler.max_num_seqs
        num_async = 1 if self.speculates_ahead else config.engine.overlap  # drafts are proposed behind known tokens
        verifier, inputs = stay_on_device(verifier, inputs, num_async, max_rows, self.device)
        moved = [*tensors, *proposer.kv_caches]
        host_caches = [host_cache(cache, backend.block_axis, sizes.num_host_blocks) for cache in moved]
        places = moved, host_caches, backend.block_axis
        moves_blocks = config.kv.fork == "share" or config.kv.preemption != "recompute"  # else no kernel is compiled
        move = choose_move(self.kernels, *places) if moves_blocks else TorchMove(backend.block_axis)
        prompt_logprobs = PromptLogprobs(model.logits, send_for(num_async, self.device))
        model_state = make_state(model, loaded.spec.hidden_size, self.dtype, self.device, device_caches)
        return ModelRunner(
            model=model,
            forward=graphed.forward,
            attention=graphed.attention,
            kv_caches=device_caches,
            inputs=inputs,
            rows=Rows(max_rows),
            head=SamplingHead(model, inputs, sampler, verifier, proposer, prompt_logprobs),
            block_moves=BlockMoves(*places, move),
            adapters=adapters,
            model_state=model_state,
            states=(sampler, prompt_logprobs, proposer, adapters, model_state),
        )

    def _caches(self, layers: list[AttentionSpec], tensors: list[Tensor]) -> list[Any]:
        """What each layer reads: its group's tensor or, of cross attention, slots of its own."""
        places = self.groups.places()
        return [
            tensors[places[i][1]] if i in places else {FIRST_SLOT: zeros(slot_shape(layer), self.dtype, self.device)}
            for i, layer in enumerate(layers)
        ]

    def _input_sizes(self, sizes: Sizes) -> InputSizes:
        max_rows, block_size = self.config.scheduler.max_num_seqs, self.config.kv.block_size
        return InputSizes(max_rows, sizes.max_model_len, block_size, sizes.num_blocks, len(self.groups.groups))

    def _sampler(self, loaded: LoadedModel) -> Sampler:
        grammars = build_grammars(self.config, loaded.tokenizer_dir, loaded.spec.vocab_size)
        processors = (make_grammar_mask(grammars, self.device), *DEFAULT_PROCESSORS)
        max_rows, draws = self.config.scheduler.max_num_seqs, choose_draws(self.kernels)
        return Sampler(loaded.spec.vocab_size, max_rows, self.device, processors, draws)

    def _adapters(self, loaded: LoadedModel) -> AdapterSlots | NoAdapters:
        lora = self.config.lora
        if not lora.enabled:
            return NoAdapters()
        if loaded.spec.num_source:
            raise ConfigError(
                "lora.enabled: adapters change what a step computes for each of its requests, and this model's encoder "
                "runs outside of steps. Use lora.enabled=false"
            )
        sizes = lora.max_loras, lora.max_rank, self.config.scheduler.max_num_seqs
        slots = AdapterSlots(loaded.model, *sizes, self.dtype, self.kernels)
        self.decisions.note("lora.enabled", lora.max_loras, slots.reason)
        return slots

    # ---------------------------------------------------------------------------------- what is known once it has run

    def _warm_up(self, worker: Worker) -> None:
        run_dummy = weakref.WeakMethod(worker.run_dummy)  # the forward runner must not keep its worker alive
        worker.runner.forward.warmup(lambda key: run_dummy()(key))
        if self.config.runner.forward != "eager":
            self.decisions.note("runner.forward", *worker.runner.forward.decision)

    def _measure(self, worker: Worker, loaded: LoadedModel, backend: AttentionBackend) -> None:
        config, runner = self.config, worker.runner
        if self.device.type != "cpu" or config.runner.kernels != "auto":  # else there was nothing to choose
            self.decisions.note("runner.kernels", *self.kernels.decision)
        self.decisions.note("model.linear", *settle_linear(loaded, self.dtype, worker.run_dummy, runner))
        self.decisions.note("model.invariant", *self._is_invariant(loaded.model, backend))
        if config.spec_decode.method != "none" and config.spec_decode.adaptive:
            k, most = config.spec_decode.k, config.scheduler.max_num_batched_tokens
            self.decisions.note("spec_decode.k", k, calibrate_throttle(self.throttle, runner, worker.dummies, most, k))

    def _is_invariant(self, model: torch.nn.Module, backend: AttentionBackend) -> tuple[bool, str]:
        """Asked for or not."""
        if not getattr(backend, "is_by_row", False):
            return False, "attention sums by its number of queries"
        if (conflict := declared_conflict(self.config.override({"model.invariant": True}))) is not None:
            return False, conflict.reason
        if (why := rowwise.unsupported_reason(model)) is not None:
            return False, why
        asked = "" if self.config.model.invariant else ", which costs nothing here"
        return True, f"all numbers are computed by row, in one order{asked}"

    def _facts(
        self, loaded: LoadedModel, attention: str, sizes: Sizes, runner: ModelRunner, seconds: float
    ) -> WorkerFacts:
        dtype = str(self.dtype).removeprefix("torch.")
        more = {"embed_size": runner.model_state.width, "audio_shape": getattr(loaded.model, "input_shape", ())}
        told = loaded.name, loaded.tokenizer_dir, str(self.device), loaded.spec.vocab_size, dtype, attention, more
        budget, lookahead = self._budget(sizes.max_model_len), runner.head.lookahead
        return facts_with_kv(self.config, About(*told), sizes, self.groups, self.decisions, seconds, budget, lookahead)

    def _budget(self, max_model_len: int) -> int:
        budget = budget_of(self.config, max_model_len)
        if budget == self.config.scheduler.max_num_batched_tokens:
            return budget
        reason = "without chunked prefill one step must be able to take the longest request"
        return self.decisions.note("scheduler.max_num_batched_tokens", budget, reason)
