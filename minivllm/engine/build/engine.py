"""From a configuration to an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from minivllm import features, waiting
from minivllm.config import Decision, EngineConfig
from minivllm.engine.build.grammars import build_grammars
from minivllm.engine.build.kv import build_kv
from minivllm.engine.build.scheduler import build_scheduler
from minivllm.engine.core import EngineCore, Observer
from minivllm.engine.live import LiveView
from minivllm.errors import ConfigError
from minivllm.executor.background import BackgroundExecutor
from minivllm.executor.base import Executor
from minivllm.facts import WorkerFacts
from minivllm.kernels.cpu.memory import in_huge_pages
from minivllm.kv.base import KVManager
from minivllm.kv.none import NoKV
from minivllm.lora.request import LoRARequest
from minivllm.lora.scheduling import AdapterUse
from minivllm.lora.table import Adapter, AdapterTable, NoAdapters
from minivllm.pooling.options import check_task
from minivllm.pooling.task import GENERATE, choose_task
from minivllm.scheduler.base import Limits
from minivllm.structured.compiler import GrammarCompiler
from minivllm.trace import TraceRecorder, keep_earlier
from minivllm.trace_recent import RecentSteps

if TYPE_CHECKING:
    from minivllm.engine.routing import RoutingPolicy
    from minivllm.runner.worker import Worker


@dataclass(slots=True)
class Engine:
    """A built engine: its core, and what its front end needs to know of the model."""

    config: EngineConfig
    core: EngineCore
    decisions: list[Decision]
    max_model_len: int
    model_name: str
    tokenizer_dir: Any  # pathlib.Path
    info: dict[str, Any]
    adapters: AdapterTable | NoAdapters
    recent: RecentSteps
    grammars: GrammarCompiler  # that the workers of this process share
    live: LiveView

    @property
    def calls(self) -> dict[str, Callable[..., Any]]:
        """What a front end may ask for by name, between two steps (engine/messages.py: Call). Those about adapters give
        the ones that are loaded then.
        """

        def then_list(change: Callable[..., Any]) -> Callable[..., list[Adapter]]:
            def call(*args: Any) -> list[Adapter]:
                change(*args)
                return list(self.adapters.loaded.values())

            return call

        return {
            "load_lora": then_list(self.adapters.load),
            "unload_lora": then_list(self.adapters.unload),
            "ensure_lora": then_list(lambda asked: self.adapters.ensure(msgspec.convert(asked, LoRARequest))),
            "recent_steps": self.recent.snapshot,
            "look": self.live.look,
        }

    @property
    def executor(self):
        return self.core.executor


def build(
    config: EngineConfig,
    observers: Sequence[Observer] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Load the model, size the KV pool, wire the parts. Raises UserError for what the caller can mend.

    clock: seconds; of the core, its scheduler, traces, the live view and whoever serves it. It need not be a real one:
    nothing of the engine sleeps by it. What guards processes (engine/watchdog.py, pulse.py) has the machine's.
    """
    check_task(config)
    kind = features.EXECUTORS.get(config.executor.kind)
    make_executor = partial(kind, partial(build_worker, config))
    return build_over(_with_overlap(make_executor, config.engine.overlap), config, observers, clock)


def _with_overlap(make: Callable[[], Executor], overlap: int) -> Executor:
    if overlap == 1:
        return make()
    executor = BackgroundExecutor(make)
    executor.hold_until_forwards()
    return executor


def build_over(
    executor: Executor,
    config: EngineConfig,
    observers: Sequence[Observer] = (),
    clock: Callable[[], float] = time.monotonic,
    make_kv: Callable[..., KVManager] = build_kv,
) -> Engine:
    """The control plane of an executor whose workers are there. It is the core's from then on. make_kv: as build_kv."""
    facts = executor.call("facts")[0]
    costs = executor.call("measure_costs")[0] if config.kv.preemption == "auto" else None
    if facts.keeps_kv:
        config = config.override({"kv.block_size": facts.block_size})
    sizes = facts.num_blocks, facts.max_model_len, facts.num_host_blocks, costs, facts.groups
    kv = make_kv(config, *sizes) if facts.keeps_kv else NoKV(facts.max_model_len)
    max_model_len = _fit_length(config, facts.max_model_len, kv, facts.decisions)
    limits = Limits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_model_len=max_model_len + facts.num_ends,
        kv_capacity=kv.capacity,
        max_new_items=_items_per_step(config, facts),
        max_items=facts.encoder_slots or None,
    )
    scheduler = build_scheduler(config, kv, limits, facts.lookahead, facts.keeps_kv)
    base = scheduler.base
    if config.debug.trace is not None:
        keep_earlier(config.debug.trace)
        observers = [*observers, TraceRecorder(config.debug.trace, clock)]
    recent = RecentSteps(config.debug.recent_steps, clock)
    if recent.num_steps:
        observers = [*observers, recent]
    adapters: AdapterTable | NoAdapters = NoAdapters()
    if config.lora.enabled:
        adapters = AdapterTable(executor.call, config.lora.max_cpu_loras)
        scheduler = AdapterUse(scheduler, adapters)
        for name, path in config.lora.adapters.items():
            adapters.load(name, path)
    core = EngineCore(scheduler, executor, observers, clock, config.debug.check, config.engine.overlap)
    for observer in observers:
        observer.on_start(config.flat(), facts.info)
    return Engine(
        config=config,
        core=core,
        decisions=facts.decisions,
        max_model_len=facts.max_model_len,
        model_name=facts.model_name,
        tokenizer_dir=facts.tokenizer_dir,
        info=facts.info,
        adapters=adapters,
        recent=recent,
        grammars=build_grammars(config, Path(facts.tokenizer_dir), facts.info["vocab_size"]),
        live=LiveView(core, base),
    )


def _items_per_step(config: EngineConfig, facts: WorkerFacts) -> int | None:
    """None: they cost nothing. One is always let in, however small the budget."""
    budget, each = config.scheduler.encoder_budget, facts.encoder_positions
    if not each:
        if budget is not None:
            raise ConfigError(f"scheduler.encoder_budget={budget}, but {facts.model_name} has no encoder: leave it out")
        return None
    count = max(1, (budget or each) // each)
    reason = f"{count} item{'s' * (count > 1)} of {each} positions in a step"
    facts.decisions.append(Decision("scheduler.encoder_budget", budget or each, reason))
    return count


def _fit_length(config: EngineConfig, max_model_len: int, kv: KVManager, decisions: list[Decision]) -> int:
    """The longest request that one request's share of the pool can hold; its last token needs no slot."""
    longest = min(max_model_len, kv.capacity + 1)
    if longest == max_model_len:
        return longest
    reason = f"kv.allocation={config.kv.allocation} gives a request one run, {kv.capacity} tokens of this pool at most"
    if config.model.max_model_len is not None:
        raise ConfigError(
            f"model.max_model_len={max_model_len}, but {reason}. Raise kv.num_blocks or kv.memory, or lower "
            "model.max_model_len"
        )
    decisions.append(Decision("model.max_model_len", longest, reason))
    return longest


def build_routing(config: EngineConfig) -> RoutingPolicy:
    return features.ROUTERS.get(config.engine.router)(config.kv.block_size)


def build_worker(config: EngineConfig) -> Worker:
    """The data plane of one device, in whichever process it shall live."""
    settled = waiting.settle()  # before torch
    task = choose_task(config).value
    registry, name = (features.WORKERS, config.executor.kind) if task == GENERATE else (features.POOLING_WORKERS, task)
    with in_huge_pages(config.model.huge_pages):
        return registry.get(name)(config, settled).build()
