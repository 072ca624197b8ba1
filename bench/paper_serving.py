"""Figures of papers that followed vLLM's: Sarathi-Serve (chunked prefills) and DistServe (prompts here, answers there).

Both ask how many requests a second are served within objectives. All systems here have this engine's kernels and the
same host's work; the papers compare engines of their own with vLLM. Where their figures were read is said beside each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from common import note
from paper_figures import Claim, Figure, Found, Settings, Unsure

from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import build_cluster
from minivllm.engine.build.disaggregated import Counts, build_disaggregated
from minivllm.simulate.capacity import Objective, find_rate, highest
from minivllm.simulate.cluster import Cluster
from minivllm.simulate.cost import Cost, Numbers, Step
from minivllm.simulate.devices import Device
from minivllm.simulate.host import NO_HOST, HostCost
from minivllm.simulate.shape import Shape
from minivllm.simulate.traces import load_trace
from minivllm.simulate.wire import WIRES

LEAST_REQUESTS = 60

# Milliseconds of OPT-13B's steps on A100-80G, host and all, by engine and GPUs, as DistServe measured and fitted them
# (LLMServe/DistServe 82831f1, profiler-a100-80g.*.json; Apache-2.0): of prompts by step, token and squared length; of
# decodes by step, token of context and request, below and above 95 requests.
STEPS = {
    ("vllm", 1): ((22.0522, 0.140509, 8.07658e-6), (23.475, 5.92934e-4, 0.0607269), (20.2064, 4.90773e-4, 0.120003)),
    ("distserve", 1): ((18.1025, 0.101912, 7.12226e-6), (19.9347, 6.26936e-4, 0.038507), (7.16619, 5.798e-4, 0.158311)),
    ("distserve", 2): (
        (14.743, 0.0685772, 2.44957e-6),
        (13.2948, 3.41092e-4, 0.0629639),
        (10.6387, 3.11834e-4, 0.0856291),
    ),
}
LARGE_BATCH = 95


class MeasuredSteps(Cost):
    """A Cost whose steps take what was measured of an engine: of prompts, or of decodes; with both, the sum."""

    def __init__(self, device: Device, shape: Shape, numbers: Numbers, engine: str):
        super().__init__(device, shape, numbers)
        self._prompts, self._few, self._many = STEPS[engine, device.count]

    def step_seconds(self, step: Step) -> float:
        decodes = step.num_new == 1
        lengths, count = step.num_new[~decodes], int(decodes.sum())
        seconds = 0.0
        if len(lengths):
            constant, of_token, of_square = self._prompts
            seconds += constant + of_token * float(lengths.sum()) + of_square * float((lengths**2).sum())
        if count:
            constant, of_context, of_request = self._many if count > LARGE_BATCH else self._few
            seconds += constant + of_context * float((step.start[decodes] + 1).sum()) + of_request * count
        return seconds / 1e3


@dataclass(frozen=True, slots=True)
class System:
    preset: str
    num_gpus: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    prompts: Mapping[str, Any] | None = None  # what differs on a replica for prompts; None: there is none
    measured: str = ""  # whose steps it takes, of STEPS; "": the simulated device's and the host's


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    model: str
    trace: str
    rate: float  # about the middle of the paper's axis
    objectives: Sequence[Objective]  # in a metric of _summary
    of: Mapping[str, System]
    slo: Mapping[str, float] = field(default_factory=dict)  # seconds that a request must keep to
    paper: Mapping[str, float] = field(default_factory=dict)

    @property
    def systems(self) -> tuple[str, ...]:
        return tuple(self.of)


def build(panel: Panel, system: System, settings: Settings) -> Cluster:
    own = {"model.path": panel.model, "model.dtype": "float16", "executor.kind": "simulated"}
    config = EngineConfig.build(system.preset, {**own, "executor.device": "a100-80", **system.options})
    host, make_cost = HostCost(settings.host_ms / 1e3, settings.host_us / 1e6), Cost
    if system.measured:
        host, make_cost = NO_HOST, partial(MeasuredSteps, engine=system.measured)
    if system.prompts is None:
        return build_cluster(config, host=host, make_cost=make_cost)
    sides = config.override(system.prompts), config
    return build_disaggregated(*sides, Counts(1, 1), host, wire=WIRES["nvlink3"], make_cost=make_cost)


def per_gpu(panel: Panel, settings: Settings) -> Found:
    """The highest rate within the objectives, for each GPU of a system; and what was got at all that were tried."""
    values, curves = {}, {}
    first = panel.objectives[0]
    for name, system in panel.of.items():
        points = find_rate(_trial(panel, name, settings), panel.objectives, panel.rate * system.num_gpus)
        best = highest(points)
        values[name] = None if best is None else best.rate / system.num_gpus
        curves[name] = [(p.rate / system.num_gpus, p.summary[first.metric].get(first.place, 0.0)) for p in points]
    return Found(values, curves)


def _trial(panel: Panel, name: str, settings: Settings) -> Callable[[float], Mapping[str, Any]]:
    @cache
    def trial(rate: float) -> Mapping[str, Any]:
        count = max(LEAST_REQUESTS, round(60 * settings.minutes * rate))
        requests = load_trace(panel.trace, rate=rate, num_requests=count, seed=settings.seed)
        found = build(panel, panel.of[name], settings).run(requests).summary(panel.slo)
        found["missed"] = {"share": 1 - found.get("attained", 1.0)}
        note(f"    {name} at {rate:.3g} a second: {[found[o.metric].get(o.place) for o in panel.objectives]}")
        return found

    return trial


# ---------------------------------------------------------------------------------------------------- Sarathi-Serve

# Objectives, budgets, 128 sequences and 8,192 tokens of a chat: its artifact (microsoft/sarathi-serve 02d2567,
# osdi-experiments/figure-5-6). Prompts and answers of its table 2, from memory, as log-normal ones of the same median
# and 90th percentile: 1,730 and 5,696 tokens, 415 and 834.
CHATS = "lognormal:prompt=2666,prompt_sigma=0.93,output=481,output_sigma=0.545,longest=8192"
DELAY = Objective("ttft", "p50", 2.0)  # its artifact's is of the time to be scheduled, in the median (capacity_search)


def _mistral(title: str, seconds: float, budget: int) -> Panel:
    most = {"scheduler.max_num_seqs": 128, "model.max_model_len": 16_384}
    of = {
        "vllm": System("v0", options=most),
        "sarathi": System("sarathi", options={**most, "scheduler.max_num_batched_tokens": budget}),
    }
    return Panel(title, "mistral-7b", CHATS, 0.8, [Objective("itl", "p99", seconds), DELAY], of)


_STALLS = "99 of 100 gaps are counted over all requests here; how the paper weighs requests is not said"
SARATHI = Figure(
    "Sarathi-Serve (Agrawal et al., OSDI 2024)",
    "Figure 10: capacity under an objective of the gaps between tokens, Mistral-7B, 1 A100",
    {
        "sarathi-strict": _mistral("99 % of gaps within 0.1 s, chunks of 512", 0.1, 512),
        "sarathi-relaxed": _mistral("99 % of gaps within 0.5 s, chunks of 2,048", 0.5, 2048),
    },
    per_gpu,
    # 2.6 "on a single A100": its abstract
    [Claim("sarathi-strict sarathi-relaxed", "most over vLLM", "sarathi", "vllm", 2.6, 2.6, _STALLS)],
    "requests a second",
    ("requests a second", "99th percentile of gaps, s"),
    unsure=[
        Unsure("the host's work, ms a step", "sarathi-strict", {"none": {"host_ms": 0.0}, "30": {"host_ms": 30.0}})
    ],
)

# ---------------------------------------------------------------------------------------------------------- DistServe

# Means from memory of the paper; how lengths spread is assumed. Objectives, the share of nine in ten and one GPU beside
# three: its artifact (LLMServe/DistServe 1947724, evaluation/ae-scripts/e2e/_plot.py, figure 8).
SHAREGPT = "lognormal:prompt=755,output=200,prompt_sigma=0.8,output_sigma=0.8,longest=1800"
TTFT, TPOT = 0.25, 0.1
_MOST = {"kv.preemption": "recompute"}
_OTHER = "one of each replica; other kernels, another host and another spread of lengths than the paper's"


def _chats(title: str, systems: Mapping[str, System]) -> Panel:
    missed = [Objective("missed", "share", 0.1)]
    return Panel(title, "opt-13b", SHAREGPT, 1.5, missed, systems, {"ttft": TTFT, "tpot": TPOT})


# Of chats, "2.0 to 4.6" is from memory of section 6.2; its abstract has 7.4 as the most of all workloads.
_TWO = {"executor.device": "2xa100-80"}
DISTSERVE = Figure(
    "DistServe (Zhong et al., OSDI 2024)",
    "Figure 8: requests a second of a GPU, of which nine in ten keep to TTFT 0.25 s and TPOT 0.1 s; OPT-13B, A100",
    {
        "distserve-simulated": _chats(
            "simulated A100, one host's work for all",
            {
                "vllm": System("v0", options=_MOST),
                "distserve": System("distserve", 3, prompts=_TWO),
                "distserve-1+1": System("distserve", 2, prompts={}),
            },
        ),
        "distserve-measured": _chats(
            "each engine's steps as DistServe measured them",
            {
                "vllm": System("v0", options=_MOST, measured="vllm"),
                "vllm, DistServe's steps": System("v0", options=_MOST, measured="distserve"),
                "distserve": System("distserve", 3, prompts=_TWO, measured="distserve"),
                "distserve-1+1": System("distserve", 2, prompts={}, measured="distserve"),
            },
        ),
    },
    per_gpu,
    [
        Claim("distserve-simulated", "a GPU's rate over vLLM's", "distserve", "vllm", 2.0, 4.6, _OTHER),
        Claim("distserve-measured", "a GPU's rate over vLLM's", "distserve", "vllm", 2.0, 4.6, _OTHER),
    ],
    "requests a second of a GPU",
    ("requests a second of a GPU", "share that missed an objective"),
    unsure=[Unsure("the host's work, ms a step", "distserve-simulated", {"none": {"host_ms": 0.0}})],
)
