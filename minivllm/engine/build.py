"""The composition root: from a configuration to an engine. The only file that reads registries.

Everything below receives built objects, so that "which part is it?" is answered here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from minivllm import features, waiting
from minivllm.config import Decision, EngineConfig
from minivllm.engine.core import EngineCore, Observer
from minivllm.engine.live import LiveView
from minivllm.engine.vocabulary import load_vocabulary
from minivllm.errors import ConfigError
from minivllm.executor.background import BackgroundExecutor
from minivllm.kv.base import KVManager
from minivllm.kv.contiguous import ContiguousKVManager, Reservation, reserve_max, reserve_oracle, reserve_pow2
from minivllm.kv.manager import PagedKVManager
from minivllm.lora.request import LoRARequest
from minivllm.lora.scheduling import AdapterLimit, AdapterUse
from minivllm.lora.table import Adapter, AdapterTable, NoAdapters
from minivllm.pooling.task import refuse_pooling
from minivllm.scheduler.admission import Admission
from minivllm.scheduler.base import Limits
from minivllm.scheduler.beam import BeamScheduler, ForkingScheduler
from minivllm.scheduler.inject import Injector
from minivllm.scheduler.suspects import Suspects
from minivllm.structured.compiler import GrammarCompiler, is_installed, shared_compiler
from minivllm.trace import TraceRecorder
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


def build(config: EngineConfig, observers: Sequence[Observer] = ()) -> Engine:
    """Load the model, size the KV pool, wire the parts. Raises UserError for what the caller can mend."""
    refuse_pooling(config)
    make_executor = partial(features.EXECUTORS.get(config.executor.kind), partial(build_worker, config))
    executor = BackgroundExecutor(make_executor) if config.engine.overlap > 1 else make_executor()
    facts = executor.call("facts")[0]
    costs = executor.call("measure_costs")[0] if config.kv.preemption == "auto" else None
    kv = build_kv(config, facts.num_blocks, facts.max_model_len, facts.num_host_blocks, costs)
    max_model_len = _fit_length(config, facts.max_model_len, kv, facts.decisions)
    limits = Limits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_capacity=kv.capacity,
    )
    scheduler = build_scheduler(config, kv, limits, facts.lookahead)
    base = scheduler.base
    if config.debug.trace is not None:
        observers = [*observers, TraceRecorder(config.debug.trace)]
    recent = RecentSteps(config.debug.recent_steps)
    if recent.num_steps:
        observers = [*observers, recent]
    adapters: AdapterTable | NoAdapters = NoAdapters()
    if config.lora.enabled:
        adapters = AdapterTable(executor.call, config.lora.max_cpu_loras)
        scheduler = AdapterUse(scheduler, adapters)
        for name, path in config.lora.adapters.items():
            adapters.load(name, path)
    core = EngineCore(scheduler, executor, observers, check=config.debug.check, overlap=config.engine.overlap)
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


@dataclass(frozen=True, slots=True)
class KVSizes:
    """What the entries of features.ALLOCATIONS are called with, beside the configuration."""

    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0
    costs: Mapping[str, float] | None = None


def build_kv(
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    num_host_blocks: int = 0,
    costs: Mapping[str, float] | None = None,
) -> KVManager:
    """costs: seconds_per_token and seconds_per_block, as measured; what kv.preemption=auto weighs."""
    sizes = KVSizes(num_blocks, max_model_len, num_host_blocks, costs)
    return features.ALLOCATIONS.get(config.kv.allocation)(config, sizes)


def build_paged(config: EngineConfig, sizes: KVSizes) -> PagedKVManager:
    key_hash = features.KEY_HASHES.get(config.kv.hash)
    index = features.PREFIX_INDEXES.get(config.kv.prefix)(key_hash=key_hash, seed=config.kv.hash_seed)
    policy = features.PREEMPTIONS.get(config.kv.preemption)(**(sizes.costs or {}))
    shares_forks = config.kv.fork == "share"
    return PagedKVManager(sizes.num_blocks, config.kv.block_size, index, sizes.num_host_blocks, policy, shares_forks)


def _contiguous(config: EngineConfig, sizes: KVSizes, reservation: Reservation) -> ContiguousKVManager:
    kv = ContiguousKVManager(sizes.num_blocks, config.kv.block_size, reservation, sizes.max_model_len)
    kv.max_model_len = min(sizes.max_model_len, kv.capacity + 1)
    return kv


def build_max(config: EngineConfig, sizes: KVSizes) -> ContiguousKVManager:
    return _contiguous(config, sizes, reserve_max)


def build_pow2(config: EngineConfig, sizes: KVSizes) -> ContiguousKVManager:
    return _contiguous(config, sizes, reserve_pow2)


def build_oracle(config: EngineConfig, sizes: KVSizes) -> ContiguousKVManager:
    return _contiguous(config, sizes, reserve_oracle)


def build_admission(config: EngineConfig, limits: Limits) -> Admission:
    options = {"block_size": config.kv.block_size, "max_model_len": limits.max_model_len}
    wanted = {"peak": options}.get(config.scheduler.admission, {})
    admission = features.ADMISSIONS.get(config.scheduler.admission)(**wanted)
    return AdapterLimit(admission, config.lora.max_loras) if config.lora.enabled else admission


def build_scheduler(config: EngineConfig, kv: KVManager, limits: Limits, lookahead: int = 0) -> BeamScheduler:
    policy = features.POLICIES.get(config.scheduler.policy)()
    kind = features.SCHEDULERS.get(config.scheduler.kind)
    admission = build_admission(config, limits)
    base = kind(kv, limits, policy, config.scheduler.chunked_prefill, admission, lookahead)
    inner: ForkingScheduler = base
    if config.debug.preempt_every or config.debug.evict_all:
        inner = Injector(base, kv, config.debug.preempt_every, config.debug.evict_all)
    return BeamScheduler(Suspects(inner, base), base)


def build_routing(config: EngineConfig) -> RoutingPolicy:
    return features.ROUTERS.get(config.engine.router)(config.kv.block_size)


def build_worker(config: EngineConfig, kind: type[Worker] | None = None) -> Worker:
    """The data plane of one device, in whichever process it shall live. kind: an executor's own sort of worker."""
    settled = waiting.settle()  # before torch
    from minivllm.runner.worker import Parts, Worker

    parts = Parts(
        attention=features.ATTENTION,
        forwards=features.FORWARDS,
        graphs=features.GRAPHS,
        inputs=features.INPUT_BUILDERS,
        device_inputs=features.DEVICE_INPUT_BUILDERS,
        make_grammars=partial(build_grammars, config),
        make_proposer=features.PROPOSERS.get(config.spec_decode.method),
        make_acceptance=features.ACCEPTANCES.get(config.spec_decode.acceptance),
    )
    worker = (kind or Worker)(config, parts)
    if worker.device.type == "cpu":
        worker.decisions.append(settled)
    return worker


def build_grammars(config: EngineConfig, tokenizer_dir: Path, vocab_size: int) -> GrammarCompiler:
    """The compiler of structured output; equal arguments give the same one while it lives. Loads nothing yet.

    Raises ConfigError for a backend that is asked for and not installed.
    """
    asked = config.structured.backend
    names = features.GRAMMARS.names() if asked == "auto" else (asked,)
    backends = [(name, backend) for name in names if is_installed(backend := features.GRAMMARS.get(name))]
    if not backends:
        raise ConfigError(f'structured.backend={asked} is not installed: pip install "minivllm[structured]"')
    load = partial(load_vocabulary, tokenizer_dir, vocab_size)
    key = (tuple(name for name, _ in backends), str(tokenizer_dir), vocab_size)
    return shared_compiler(key, lambda: GrammarCompiler(load, backends))
