"""The worker of executor.kind=simulated: the engine's own inputs, and a device's time in the place of a model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from minivllm import features
from minivllm.batch import InputSizes
from minivllm.config import Decision, Decisions, EngineConfig, budget_of
from minivllm.engine.build.facts import About, facts_with_kv
from minivllm.engine.build.kv import choose_groups
from minivllm.errors import ConfigError
from minivllm.facts import WorkerFacts
from minivllm.kv_groups import FULL, STATE, KVGroups, LayerKind
from minivllm.runner.memory import Sizes, format_size, size_memory
from minivllm.simulate.babble import Babble
from minivllm.simulate.clock import Clock, RealClock
from minivllm.simulate.cost import Numbers, Step, StepCost
from minivllm.simulate.devices import DEFAULT_DEVICE, Device, find_larger
from minivllm.simulate.machines import Machine, cost_on, find_machine
from minivllm.simulate.shape import Shape, read_shape
from minivllm.simulate.sources import Found, find_model
from minivllm.simulate.weights import weight_bytes
from minivllm.simulate.worker import Answers, Guesses, SimulatedWorker, Tokens
from minivllm.spec_decode.ahead import DraftsAhead
from minivllm.spec_decode.throttle import Throttle

OWN_LAYERS = ("draft", "eagle")  # proposers that keep K and V of their own
STEP_SIZES = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257)  # tokens of the steps that drafts are weighed by
WEIGHTS_SHARE = 0.8  # of a device's memory at most, where one is proposed: the rest is for KV
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}  # bytes of a number


class Block(NamedTuple):
    bytes_per_block: int


class Memory(NamedTuple):
    type: str  # as torch.device.type


def numbers_of(config: EngineConfig, found: Found, usual: str) -> tuple[Numbers, Decisions]:
    """How the model's numbers are kept. usual: the dtype of a device on which none is asked for. Raises ModelError."""
    decisions = Decisions()
    asked, kept = config.model.dtype, config.kv.dtype
    dtype = usual if asked == "auto" else asked
    decisions.note("model.dtype", dtype, "the device computes in it" if asked == "auto" else "as configured")
    size = SIZES[dtype if kept == "auto" else kept]
    weights = weight_bytes(found.config, config.model.quantization, dtype, SIZES[dtype], found.where)
    said = "none" if weights.expert == SIZES[dtype] else f"{8 * weights.expert:g} bits"
    decisions.note("model.quantization", said, weights.reason)
    return Numbers(dtype, SIZES[dtype], size, 4 if size == 1 else 0, weights), decisions


class SimulatedWorkerBuilder:
    """As WorkerBuilder; _settled is about torch, which nothing here loads. tokens: in the place of Babble's.
    make_cost: in the place of what the device says."""

    def __init__(
        self,
        config: EngineConfig,
        _settled: Decision | None = None,
        clock: Clock | None = None,
        tokens: Tokens | None = None,
        make_cost: Callable[[Any, Shape, Numbers], StepCost] = cost_on,
        stage: int | None = None,
        is_rank: bool = False,
    ):
        """stage: of a pipeline, whose layers and memory it has. is_rank: one of those that share experts."""
        if config.model.device != "auto":
            raise ConfigError(f"model.device={config.model.device}: a simulated model is on executor.device")
        self.config = config
        self.decisions = Decisions()
        self.clock = clock or RealClock()
        self.tokens = tokens
        self.make_cost = make_cost
        self.stage = stage
        self.is_rank = is_rank

    def build(self) -> SimulatedWorker:
        begin, config = time.perf_counter(), self.config
        device, found = self._device(), find_model(config.model.path, config.model.tokenizer)
        self.decisions.note("model.tokenizer", found.tokenizer_dir.name, found.tokenizer)
        shape = self._part(read_shape(found.config, found.where), device)
        numbers, decisions = numbers_of(config, found, device.dtype)
        self.decisions += decisions
        cost = self.make_cost(device, shape, numbers)
        config = self.config = self._with_room_for_states(cost)
        self.groups = self._make_groups(shape)
        sizes = self._sizes(cost, device)
        babble = Babble(
            shape.vocab_size, config.scheduler.max_num_seqs, config.model.seed, config.executor.answer_tokens
        )
        worker = SimulatedWorker(
            inputs=features.INPUT_BUILDERS.get(config.runner.inputs)(self._input_sizes(sizes)),
            max_rows=config.scheduler.max_num_seqs,
            block_tokens=config.kv.block_size * self.groups.num_tensors / shape.num_attention_layers,
            tokens=self.tokens or babble,
            answers=Answers(babble),
            guesses=self._guesses(babble, cost),
            cost=cost,
            clock=self.clock,
            facts=self._facts(found, shape, cost, sizes, time.perf_counter() - begin),
        )
        if config.engine.overlap > 1 and config.spec_decode.method != "none":
            worker.execute = DraftsAhead(worker.execute)
        return worker

    def _part(self, shape: Shape, device: Machine) -> Shape:
        if not isinstance(device, Device):
            return shape
        if self.stage is not None:
            return shape.stages(device.num_stages, device.split)[self.stage]
        if device.num_stages > 1 or (device.has_ranks and not self.is_rank):
            what = "pipelines" if device.num_stages > 1 else "data-parallel ranks"
            raise ConfigError(
                f"executor.device={self.config.executor.device}: {what} have a virtual clock alone: `minivllm simulate`"
            )
        return shape

    def _with_room_for_states(self, cost: StepCost) -> EngineConfig:
        """The configuration, whose blocks hold a layer's recurrent state each."""
        size = cost.block_size(self.config.kv.block_size)
        if size == self.config.kv.block_size:
            return self.config
        self.decisions.note("kv.block_size", size, "a block holds a layer's recurrent state, which takes as much")
        return self.config.override({"kv.block_size": size})

    def _make_groups(self, shape: Shape) -> KVGroups:
        """As a model's own layers would be grouped."""
        kinds = [
            FULL if window is None else LayerKind("window", window)
            for window, num_layers in shape.windows.items()
            for _ in range(num_layers)
        ]
        kinds += [STATE] * (shape.states.num_layers if shape.states else 0)
        return choose_groups(self.config, kinds, self.config.spec_decode.method in OWN_LAYERS, self.decisions)

    def _device(self) -> Machine:
        asked = self.config.executor.device or DEFAULT_DEVICE
        device = find_machine(asked)
        reason = device.reason
        if isinstance(device, Device) and device.count > 1:
            assert device.link is not None
            own = "requests of its own and its part of the experts" if device.has_ranks else "its part of every layer"
            reason += f"; each has {own}; {device.link.source}"
        self.decisions.note("executor.device", asked, reason)
        return device

    def _sizes(self, cost: StepCost, device: Machine) -> Sizes:
        """As size_memory has it, of a device that holds its weights and nothing else. Several have as many blocks
        each as any: a part of every block."""
        config, limit = self.config, cost.shape.max_position
        free = device.memory - cost.weight_bytes
        if free <= 0:
            raise ConfigError(self._too_small(cost, device))
        per_layer = cost.kv_bytes_per_token * config.kv.block_size / cost.shape.num_attention_layers
        block = Block(int(per_layer * self.groups.num_tensors))
        forwards = cost.forward_bytes(budget_of(config, config.model.max_model_len or limit), self._most_samples())
        place = Memory("cpu" if device.is_cpu else "cuda")
        sizes, decisions = size_memory(config, block, self.groups, place, limit, forwards, free)
        self.decisions += decisions
        return sizes

    def _too_small(self, cost: StepCost, device: Machine) -> str:
        if not isinstance(device, Device):
            return f"{self.config.model.path} has {format_size(cost.weight_bytes)} of weights, more than {device.what}"
        larger = find_larger(device, lambda one: self._weight_bytes(one, cost) < WEIGHTS_SHARE * one.memory)
        advice = "no device here would hold it" if larger is None else f"{larger} would hold it (executor.device)"
        each = " on each" if device.count > 1 else ""
        return (
            f"{self.config.model.path} has {format_size(cost.weight_bytes)} of weights{each}, and {device.what} "
            f"{format_size(device.memory)} of memory{each}: {advice}"
        )

    def _weight_bytes(self, device: Device, like: StepCost) -> float:
        try:
            return self.make_cost(device, like.shape, like.numbers).weight_bytes
        except ConfigError:  # sizes that so many cannot share
            return math.inf

    def _most_samples(self) -> int:
        spec_decode = self.config.spec_decode
        return self.config.scheduler.max_num_seqs * (1 if spec_decode.method == "none" else 1 + spec_decode.k)

    def _input_sizes(self, sizes: Sizes) -> InputSizes:
        config = self.config
        own = sizes.max_model_len, config.kv.block_size, sizes.num_blocks, len(self.groups.groups)
        return InputSizes(config.scheduler.max_num_seqs, *own)

    def _guesses(self, babble: Babble, cost: StepCost) -> Guesses | None:
        config = self.config.spec_decode
        if config.method == "none":
            return None
        throttle = Throttle(self.config.scheduler.max_num_seqs)
        if config.adaptive:
            throttle.calibrate({n: cost.step_seconds(Step.of(n)) for n in STEP_SIZES})
        acceptance = self.config.executor.acceptance
        self.decisions.note("executor.acceptance", acceptance, "each guess is right by this chance, whoever makes it")
        return Guesses(babble, config.k, acceptance, throttle)

    def _facts(self, found: Found, shape: Shape, cost: StepCost, sizes: Sizes, seconds: float) -> WorkerFacts:
        device = f"{self.config.executor.device or DEFAULT_DEVICE} (simulated)"
        about = About(found.name, found.tokenizer_dir, device, shape.vocab_size, cost.numbers.dtype, "simulated")
        budget = budget_of(self.config, sizes.max_model_len)
        return facts_with_kv(self.config, about, sizes, self.groups, self.decisions, seconds, budget)
