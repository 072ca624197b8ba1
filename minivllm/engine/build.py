"""The composition root: from a configuration to an engine. The only file that reads registries.

Everything below receives built objects, so that "which part is it?" is answered here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm import features
from minivllm.config import Decision, EngineConfig
from minivllm.engine.core import EngineCore, Observer
from minivllm.kv.manager import PagedKVManager
from minivllm.scheduler.base import Limits, Scheduler
from minivllm.scheduler.inject import Injector

if TYPE_CHECKING:
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

    @property
    def executor(self):
        return self.core.executor


def build(config: EngineConfig, observers: Sequence[Observer] = ()) -> Engine:
    """Load the model, size the KV pool, wire the parts. Raises UserError for what the caller can mend."""
    executor = features.EXECUTORS.get(config.executor.kind)(lambda: build_worker(config))
    facts = executor.call("facts")[0]
    capacity = facts.num_blocks * config.kv.block_size
    limits = Limits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        kv_capacity=capacity,
    )
    costs = executor.call("measure_costs")[0] if config.kv.preemption == "auto" else None
    kv = build_kv(config, facts.num_blocks, facts.num_host_blocks, costs)
    scheduler = build_scheduler(config, kv, limits)
    core = EngineCore(scheduler, executor, observers, check=config.debug.check)
    for observer in observers:
        observer.on_start(config.flat(), facts.info)
    return Engine(config, core, facts.decisions, facts.max_model_len, facts.model_name, facts.tokenizer_dir, facts.info)


def build_kv(
    config: EngineConfig, num_blocks: int, num_host_blocks: int = 0, costs: Mapping[str, float] | None = None
) -> PagedKVManager:
    """costs: seconds_per_token and seconds_per_block, as measured; what kv.preemption=auto weighs."""
    key_hash = features.KEY_HASHES.get(config.kv.hash)
    index = features.PREFIX_INDEXES.get(config.kv.prefix)(key_hash=key_hash, seed=config.kv.hash_seed)
    policy = features.PREEMPTIONS.get(config.kv.preemption)(**(costs or {}))
    return PagedKVManager(num_blocks, config.kv.block_size, index, num_host_blocks, policy)


def build_scheduler(config: EngineConfig, kv: PagedKVManager, limits: Limits) -> Scheduler:
    policy = features.POLICIES.get(config.scheduler.policy)()
    kind = features.SCHEDULERS.get(config.scheduler.kind)
    scheduler = kind(kv, limits, policy, chunked_prefill=config.scheduler.chunked_prefill)
    if config.debug.preempt_every or config.debug.evict_all:
        return Injector(scheduler, kv, config.debug.preempt_every, config.debug.evict_all)
    return scheduler


def build_worker(config: EngineConfig) -> Worker:
    """The data plane of one device, in whichever process it shall live."""
    from minivllm.runner.worker import Worker

    return Worker(config, features.ATTENTION, features.FORWARDS, features.INPUT_BUILDERS)
