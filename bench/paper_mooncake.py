"""Figures of Mooncake (Qin et al., FAST 2025): prompts and answers on nodes of their own, one store of K and V for all.

What the paper says is read from its PDF in github.com/kvcache-ai/Mooncake (FAST25-release, commit 3b5a594), which has
the trace of conversations too (traces/conversation_trace.jsonl; Apache-2.0; 12,031 requests of an hour, their blocks of
512 tokens by hash). The file is looked for beside the checkout, as shared/data/traces/mooncake_conversations.jsonl.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from common import note
from paper_figures import Claim, Figure, Found, Settings, Unsure

from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import HostKV, build_cluster
from minivllm.engine.build.disaggregated import Counts, build_disaggregated
from minivllm.errors import TraceError
from minivllm.kv.store import BlockStore
from minivllm.plan import Delta
from minivllm.simulate.cluster import Cluster
from minivllm.simulate.cost import Cost, Numbers
from minivllm.simulate.devices import Device, Link
from minivllm.simulate.figures import Figures
from minivllm.simulate.host import HostCost
from minivllm.simulate.shape import Shape
from minivllm.simulate.traces import load_trace
from minivllm.simulate.wire import Wire
from minivllm.simulate.workload import TraceRequest

PLACES = [parent / "shared/data/traces/mooncake_conversations.jsonl" for parent in Path(__file__).parents[2:5]]
NODES = 16  # each 8 x A800
TTFT = 30.0
SLOWEST = 0.1  # of a request's gaps, whose mean is its TBT: section 5.1
HOST_TOKENS = 3_000_000  # of K and V in about 1 TB of a node's memory: section 5.3.1
NETWORK, HOST_LINK = 100e9 / 8, 128e9 / 8  # bytes a second of a GPU: table 1's Bnic and Bh2d, of eight
NVLINK = 400 / 600  # of an A800 over an A100's, by their data sheets
BLOCK = 128  # divides the trace's 512, so that what is shared is found
MODEL = "llama-3.1-70b"  # the paper's LLaMA3-70B, with positions enough for the trace
VLLMS = ("vllm", "vllm, prefix caching", "vllm, chunked prefill")
BEST = "best of vllm's"


def conversations(minutes: float) -> Iterator[TraceRequest]:
    """Those that arrive so early. Raises TraceError if the file is not there."""
    path = next((path for path in PLACES if path.is_file()), None)
    if path is None:
        raise TraceError(f"Mooncake's trace of conversations is needed as {PLACES[0]}")
    return takewhile(lambda request: request.arrival < 60 * minutes, load_trace(path))


# ---------------------------------------------------------------------------------------------------------- simulations


@dataclass(frozen=True, slots=True)
class System:
    preset: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_mooncake: bool = False


WHOLE = {"scheduler.max_num_batched_tokens": 131_072}  # prompts are not cut
SYSTEMS = {
    "mooncake": System("distserve", {**WHOLE, "kv.prefix": "hash"}, is_mooncake=True),
    "vllm": System("v0", {**WHOLE, "kv.prefix": "none"}),
    "vllm, prefix caching": System("v0", {**WHOLE, "kv.prefix": "hash"}),
    "vllm, chunked prefill": System("v1", {"scheduler.max_num_batched_tokens": 512, "kv.prefix": "none"}),
}


class Stalls(Figures):
    """Figures that know each request's TBT: the mean of the longest tenth of its gaps."""

    def __init__(self, num_replicas: int):
        super().__init__(num_replicas)
        self.tbt = array("d")  # as rows are, in the order of their ends; 0: one token
        self._gaps_of: defaultdict[str, list[float]] = defaultdict(list)

    def told(self, deltas: Sequence[Delta], now: float) -> list[str]:
        for delta in deltas:
            if (live := self._live[delta.req_id]).num_tokens:
                self._gaps_of[delta.req_id].append(now - live.last)
        ended = super().told(deltas, now)
        for req_id in ended:
            gaps = sorted(self._gaps_of.pop(req_id, [0.0]), reverse=True)
            count = max(1, round(SLOWEST * len(gaps)))
            self.tbt.append(sum(gaps[:count]) / count)
        return ended

    def effective(self, tbt: float) -> float:
        """Of all requests the share that keeps to TTFT and to such a TBT."""
        ttft = self.rows.column("first") - self.rows.column("arrival")
        met = (ttft <= TTFT) & (np.array(self.tbt) <= tbt)
        return float(met.sum()) / (len(met) + self.num_refused)


class A800s(Cost):
    """A simulated A100 whose links to others are slower, and from whose host K and V come as fast as is said."""

    def __init__(self, device: Device, shape: Shape, numbers: Numbers, host_link: float = HOST_LINK):
        assert device.link is not None
        by_count = {count: (latency, NVLINK * rate) for count, (latency, rate) in device.link.by_count.items()}
        link = Link(by_count, device.link.error, device.link.source)
        super().__init__(replace(device, link=link, host_link=host_link), shape, numbers)


def over_the_network(device: Device, shape: Shape, numbers: Numbers) -> A800s:
    """What one store gives comes mostly from other nodes."""
    return A800s(device, shape, numbers, NETWORK)


def config_of(preset: str, options: Mapping[str, Any], router: str) -> EngineConfig:
    own = {"model.path": MODEL, "executor.kind": "simulated", "executor.device": "8xa100-80"}
    return EngineConfig.build(
        preset,
        {
            **own,
            "kv.block_size": BLOCK,
            "kv.preemption": "recompute",
            "scheduler.max_num_seqs": 256,
            "engine.router": router,
            **options,
        },
    )


def build(system: System, settings: Settings) -> Cluster:
    host = HostCost(settings.host_ms / 1e3, settings.host_us / 1e6)
    if not system.is_mooncake:
        return build_cluster(config_of(system.preset, system.options, settings.router), NODES, host, make_cost=A800s)
    config, counts = config_of(system.preset, system.options, "least_loaded"), Counts(*_split(settings))
    store, wire = HostKV(HOST_TOKENS, is_shared=True), Wire(NETWORK, 20e-6)
    return build_disaggregated(config, config, counts, host, wire=wire, make_cost=over_the_network, host_kv=store)


def _split(settings: Settings) -> tuple[int, int]:
    return settings.prefill_nodes, NODES - settings.prefill_nodes


def simulate(name: str, settings: Settings) -> Stalls:
    """Once with each of the settings that the system has to do with."""
    others = {"router": Settings.router} if SYSTEMS[name].is_mooncake else {"prefill_nodes": Settings.prefill_nodes}
    return _simulate(name, replace(settings, **others))


@cache
def _simulate(name: str, settings: Settings) -> Stalls:
    cluster = build(SYSTEMS[name], settings)
    cluster.figures = figures = Stalls(len(cluster.replicas))
    cluster.run(conversations(settings.minutes))
    found = figures.summary()
    told = ", ".join(f"{1e3 * tbt:.0f} ms {figures.effective(tbt):.1%}" for tbt in (0.1, 0.2, 0.3))
    note(f"    {name}: {told}; TTFT {found['ttft']['mean']:.2f} s, found {found['prefix_hit_rate']:.1%}")
    return figures


# ------------------------------------------------------------------------------------------------------------- figure 1


@dataclass(frozen=True, slots=True)
class Within:
    title: str
    tbt: float  # seconds
    paper: Mapping[str, float] = field(default_factory=dict)

    @property
    def systems(self) -> tuple[str, ...]:
        return (*SYSTEMS, BEST)


def effective(panel: Within, settings: Settings) -> Found:
    values = {name: 100 * simulate(name, settings).effective(panel.tbt) for name in SYSTEMS}
    return Found({**values, BEST: max(values[name] for name in VLLMS)})


_CHUNKS = "vLLM's chunks of 512 hold decodes up less here than in the paper, which measured vLLM 0.5.1"
_NODES = "mooncake-100 mooncake-200 mooncake-300"
FIGURE_1 = Figure(
    "Mooncake (Qin et al., FAST 2025)",
    "Figure 1: requests within 30 s of TTFT and a TBT, of an hour of conversations on 16 nodes of 8 A800",
    {f"mooncake-{ms}": Within(f"TBT within {ms} ms", ms / 1e3) for ms in (100, 200, 300)},
    effective,
    [
        claim
        for ms, gain in ((100, 5.98), (200, 2.57), (300, 1.59))
        for claim in (
            Claim(f"mooncake-{ms}", "over vLLM's", "mooncake", "vllm", gain, gain),
            Claim(f"mooncake-{ms}", "over the best of vLLM's three", "mooncake", BEST, gain, gain, _CHUNKS),
        )
    ],
    "percent of all requests",
    unsure=[
        Unsure("nodes for prompts, of 16", _NODES, {"10": {"prefill_nodes": 10}}),
        Unsure("who places vLLM's requests", _NODES, {"prefix": {"router": "prefix"}}),
    ],
)

# -------------------------------------------------------------------------------------------------------- figures 9, 10

PIECE = 512
ALL, LOCAL, GLOBAL = "without bounds", "3M tokens", "50M tokens"
CAPACITIES = {ALL: 10**9, LOCAL: HOST_TOKENS, GLOBAL: 50_000_000}
PREFILL_NODES = 10


@dataclass(frozen=True, slots=True)
class Stored:
    title: str
    systems: tuple[str, ...]
    paper: Mapping[str, float] = field(default_factory=dict)


def hit_rate(num_tokens: int) -> float:
    """Percent of prompts' tokens in the whole hour, of a store that sees nothing but the sequence of requests."""
    store, found, asked = BlockStore(num_tokens // PIECE), 0, 0
    for request in conversations(math.inf):
        found += min(request.num_prompt, PIECE * len(store.match(request.pieces)))
        asked += request.num_prompt
        store.put(request.pieces)
    return 100 * found / asked


def stored(panel: Stored, settings: Settings) -> Found:
    return by_capacity() if panel.systems[0] == ALL else by_nodes(panel, settings)


def by_capacity() -> Found:
    return Found({name: hit_rate(num_tokens) for name, num_tokens in CAPACITIES.items()})


OWN, IN_TURN, ONE = "own stores", "own stores, each node in turn", "one store"
NODES_OF = {OWN: (False, "prefix"), IN_TURN: (False, "round_robin"), ONE: (True, "prefix")}


def by_nodes(panel: Stored, settings: Settings) -> Found:
    place = 1 if "time" in panel.title else 0
    return Found({name: prefills(*NODES_OF[name], settings)[place] for name in panel.systems})


@cache
def prefills(is_shared: bool, router: str, settings: Settings) -> tuple[float, float]:
    """Percent of tokens found, and seconds of a node a request, where all say one token."""
    config = config_of("distserve", {**WHOLE, "kv.prefix": "hash"}, router)
    make_cost = over_the_network if is_shared else A800s
    cluster = build_cluster(config, PREFILL_NODES, make_cost=make_cost, host_kv=HostKV(HOST_TOKENS, is_shared))
    found = cluster.run(replace(r, num_output=1) for r in conversations(settings.minutes)).summary()
    note(f"    {is_shared}, {router}: {found['prefix_hit_rate']:.1%}, {found['ttft']}")
    busy = found["device_busy"] * found["seconds"] * PREFILL_NODES / found["num_finished"]
    return 100 * found["prefix_hit_rate"], busy


_STAYS = "a router that knows where beginnings are keeps a conversation where it began, and its own store is enough"
STORE = Figure(
    "Mooncake (Qin et al., FAST 2025)",
    "Table 2, figures 9 and 10: what a store of K and V finds again, of conversations",
    {
        "mooncake-capacity": Stored("percent of tokens found, by capacity", (ALL, LOCAL, GLOBAL), {ALL: 40.0}),
        "mooncake-hits": Stored("percent of tokens found, 10 nodes", tuple(NODES_OF)),
        "mooncake-time": Stored("seconds of a node's time a prompt", tuple(NODES_OF)),
    },
    stored,
    [
        Claim("mooncake-capacity", "percent of tokens, without bounds", ALL, "", 40, 40),
        Claim("mooncake-capacity", "3M tokens' share of the most", LOCAL, ALL, 0.41, 0.41),
        Claim("mooncake-capacity", "50M tokens' share of the most", GLOBAL, ALL, 0.95, 1.0),
        Claim("mooncake-hits", "one store over own ones", ONE, OWN, 2.22, 2.22, _STAYS),
        Claim("mooncake-hits", "one store over own ones, in turn", ONE, IN_TURN, 2.22, 2.22),
        # 0.76, the other way round
        Claim("mooncake-time", "own stores over one", OWN, ONE, 1.32, 1.32, _STAYS),
        Claim("mooncake-time", "own stores over one, in turn", IN_TURN, ONE, 1.32, 1.32),
    ],
    "",
)
