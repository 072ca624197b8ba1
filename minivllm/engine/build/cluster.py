"""From a configuration to a simulated cluster: as many engines in this process, each on a device of its own.

They share what is the same in each: the model's shape, its cost, what a device's memory holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from minivllm.config import EngineConfig
from minivllm.engine.build.engine import Engine, build_over, build_routing
from minivllm.engine.build.kv import build_kv, build_stored
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.engine.routing import Ledger, RoutingPolicy
from minivllm.errors import ConfigError
from minivllm.executor.base import Executor
from minivllm.facts import WorkerFacts
from minivllm.kv.base import KVManager
from minivllm.kv.store import BlockStore, StoredKV
from minivllm.request import EngineRequest
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cluster import Cluster
from minivllm.simulate.cost import Numbers, RankCost, Step, StepCost
from minivllm.simulate.devices import DEFAULT_DEVICE, Device, Link
from minivllm.simulate.host import NO_HOST, HostCost
from minivllm.simulate.light_worker import LightWorker
from minivllm.simulate.machines import cost_on, find_machine
from minivllm.simulate.pipeline import Pipeline, PipelineExecutor, Stage
from minivllm.simulate.prompts import Prompts
from minivllm.simulate.ranks import RankedCluster, RankExecutor, RankGroup
from minivllm.simulate.shape import Shape
from minivllm.simulate.timeline import TimedWorker, TimelineExecutor
from minivllm.simulate.worker import SimulatedWorker

MakeCost = Callable[[Any, Shape, Numbers], StepCost]


class PolicyRouter:
    """A Router: a policy, and the ledgers that RouterLink keeps of its replicas."""

    def __init__(self, policy: RoutingPolicy, num_replicas: int):
        self._policy = policy
        self._ledgers = [Ledger() for _ in range(num_replicas)]
        self._loads = [ledger.load(number) for number, ledger in enumerate(self._ledgers)]

    def place(self, request: EngineRequest) -> int:
        number = self._policy.choose(request, self._loads)
        self._ledgers[number].add([request.id], len(request.prompt_token_ids))
        self._loads[number] = self._ledgers[number].load(number)
        return number

    def forget(self, replica: int, req_id: str) -> None:
        self._ledgers[replica].remove(req_id)
        self._loads[replica] = self._ledgers[replica].load(replica)


class HostKV(NamedTuple):
    """Host memory for K and V that the device has no more."""

    num_tokens: int  # of each replica
    is_shared: bool = False  # any replica finds what any has computed


def build_cluster(
    config: EngineConfig,
    num_replicas: int = 1,
    host: HostCost = NO_HOST,
    link_seconds: float = 0.0,
    make_cost: MakeCost = cost_on,
    host_kv: HostKV | None = None,
) -> Cluster:
    """config: of each replica; executor.kind=simulated. make_cost: as a SimulatedWorkerBuilder's. Raises UserError."""
    check_simulated(config, num_replicas, "--replicas")
    if config.debug.trace is not None and num_replicas > 1:
        raise ConfigError("debug.trace records one replica: simulate one (--replicas 1)")
    make_kv = build_kv if host_kv is None else storing(config, host_kv, num_replicas, StoredKV)
    engines = build_engines(config, num_replicas, host, make_cost, make_kv)
    prompts = Prompts(engines[0][0].info["vocab_size"])
    router = PolicyRouter(build_routing(config), len(engines))
    replicas = [(engine.core, clock) for engine, clock in engines]
    executors = [core.executor for core, _ in replicas]
    groups = [executor.group for executor in executors if isinstance(executor, RankExecutor)]
    if groups:
        return RankedCluster([*dict.fromkeys(groups)], replicas, router, prompts, link_seconds)
    return Cluster(replicas, router, prompts, link_seconds)


def storing(config: EngineConfig, host_kv: HostKV, num_replicas: int, kind: type[StoredKV]) -> Callable[..., KVManager]:
    """In the place of build_kv: managers with a store each, or with one of all. Raises ConfigError."""
    device = find_machine(config.executor.device or DEFAULT_DEVICE)
    if isinstance(device, Device) and (device.num_stages > 1 or device.has_ranks):
        what = "data-parallel ranks" if device.has_ranks else "a pipeline"
        raise ConfigError(f"executor.device={config.executor.device}: no K and V in host memory in {what}")
    num_blocks = host_kv.num_tokens // config.kv.block_size
    if num_blocks < 1:
        raise ConfigError(f"{host_kv.num_tokens} tokens in host memory are no block of {config.kv.block_size}")
    common = BlockStore(num_blocks * num_replicas)

    def make(own: EngineConfig, *sizes: Any) -> KVManager:
        if not host_kv.is_shared:
            return build_stored(BlockStore(num_blocks), kind, own, *sizes)
        seed = own.kv.hash_seed or "shared"  # else the keys of no two managers are equal
        return build_stored(common, kind, own.override({"kv.hash_seed": seed}), *sizes)

    return make


def check_simulated(config: EngineConfig, count: int, option: str) -> None:
    """Raises ConfigError for what cannot be so many (option) replicas on a virtual clock."""
    if config.executor.kind != "simulated":
        raise ConfigError(f"executor.kind={config.executor.kind} has no virtual clock: simulated has")
    if config.engine.replicas != 1:
        raise ConfigError("engine.replicas is of processes on a real clock; a simulated cluster has --replicas")
    if count < 1:
        raise ConfigError(f"{option} {count}: a cluster has at least 1")


def build_engines(
    config: EngineConfig,
    num_replicas: int,
    host: HostCost,
    make_cost: MakeCost,
    make_kv: Callable[..., KVManager] = build_kv,
) -> list[tuple[Engine, VirtualClock]]:
    """Each with the clock that it reads; of a replica that is a pipeline, a core for each stage; of one that is
    data-parallel ranks, theirs."""
    device = find_machine(config.executor.device or DEFAULT_DEVICE)
    if isinstance(device, Device) and device.num_stages > 1:
        make_executors = _pipelines(config, device, host, make_cost)
    elif isinstance(device, Device) and device.has_ranks:
        make_executors = _ranks(config, device, host, make_cost)
    else:
        make_executors = _devices(config, host, make_cost)
    clocked = [pair for _ in range(num_replicas) for pair in make_executors()]
    return [(build_over(executor, config, clock=clock, make_kv=make_kv), clock) for executor, clock in clocked]


Executors = Callable[[], list[tuple[Executor, VirtualClock]]]  # of one replica: of each of its cores


def _devices(config: EngineConfig, host: HostCost, make_cost: MakeCost) -> Executors:
    make_worker = _workers(config, make_cost)

    def make() -> list[tuple[Executor, VirtualClock]]:
        clock, stopwatch = VirtualClock(), VirtualClock()
        return [(TimelineExecutor(make_worker(stopwatch), stopwatch, clock, host), clock)]

    return make


def _pipelines(config: EngineConfig, device: Device, host: HostCost, make_cost: MakeCost) -> Executors:
    """A core for each step in flight, with its part of the pool."""
    _check_pipeline(config)
    count = device.num_stages
    builders = [SimulatedWorkerBuilder(config, None, VirtualClock(), None, make_cost, stage) for stage in range(count)]
    likes = [builder.build() for builder in builders]
    least = min(like.facts().num_blocks for like in likes)
    if least < count:
        raise ConfigError(f"{least} blocks of KV are not one for each of the {count} steps in flight: kv.num_blocks")
    facts = [replace(like.facts(), num_blocks=least // count) for like in likes]
    shape, numbers = likes[0].cost.shape, likes[0].cost.numbers
    assert device.link is not None
    send = partial(_send_seconds, device.link, shape.hidden_size * numbers.size)

    def stage(like: SimulatedWorker, own: WorkerFacts) -> Stage:
        stopwatch = VirtualClock()
        return Stage(LightWorker(like, stopwatch, own), stopwatch)

    def make() -> list[tuple[Executor, VirtualClock]]:
        pipeline, clocks = Pipeline(count, send, host), [VirtualClock() for _ in range(count)]
        lanes = [[stage(*pair) for pair in zip(likes, facts, strict=True)] for _ in clocks]
        executors = [PipelineExecutor(*own, pipeline) for own in zip(lanes, clocks, strict=True)]
        return list(zip(executors, clocks, strict=True))

    return make


def _ranks(config: EngineConfig, device: Device, host: HostCost, make_cost: MakeCost) -> Executors:
    """A core for each device."""
    what = "among data-parallel ranks"
    _check_plain(config, what)
    like = SimulatedWorkerBuilder(config, clock=VirtualClock(), make_cost=make_cost, is_rank=True).build()
    cost = like.cost
    if not isinstance(cost, RankCost):
        raise ConfigError(f"executor.device={config.executor.device}: {type(cost).__name__} has no figures {what}")
    idle = cost.own_seconds(replace(Step.of(1), num_samples=0))

    def make() -> list[tuple[Executor, VirtualClock]]:
        group, found = RankGroup(device.count, cost.shared_seconds, idle), []
        for _ in range(device.count):
            clock, stopwatch = VirtualClock(), VirtualClock()
            worker = LightWorker(like, stopwatch, step_seconds=cost.own_seconds)
            found.append((RankExecutor(worker, stopwatch, clock, host, group), clock))
        return found

    return make


def _check_pipeline(config: EngineConfig) -> None:
    if config.engine.overlap > 1:
        raise ConfigError("engine.overlap=2 in a pipeline: as many steps as stages are in flight already")
    _check_plain(config, "in a pipeline")


def _check_plain(config: EngineConfig, what: str) -> None:
    if config.spec_decode.method != "none":
        raise ConfigError(f"spec_decode.method={config.spec_decode.method} {what} is not simulated")
    if config.debug.trace is not None:
        raise ConfigError(f"debug.trace records one core, and there are several {what}")


def _send_seconds(link: Link, bytes_per_token: int, num_tokens: int) -> float:
    """As two devices need for a sum, in which each sends as much."""
    return link.all_reduce_seconds(2, num_tokens * bytes_per_token)


def _workers(config: EngineConfig, make_cost: Callable) -> Callable[[VirtualClock], TimedWorker]:
    """What makes one, for its stopwatch. Where nobody guesses, those that know lengths alone."""
    if config.spec_decode.method != "none":
        return lambda stopwatch: SimulatedWorkerBuilder(config, clock=stopwatch, make_cost=make_cost).build()
    like = SimulatedWorkerBuilder(config, clock=VirtualClock(), make_cost=make_cost).build()
    return partial(LightWorker, like)
