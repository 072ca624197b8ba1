"""vLLM's post on V1 (January 2025): the same models, data and GPUs as V0, up to 1.7 times the throughput.

The post says that kernels were almost the same and the host's work was less, and not how much of it either has. Of V0
another post does (on 0.6.0, September 2024): of the time for a Llama 3 8B on an H100 38 % was the GPU's, 29 %
scheduling and inputs, 33 % the server in the same process, which was then moved out. So V0's host works 29/38 of the
8B's mean step here, in each step of either model. V1's is what vLLM 0.32 took beside its model on a CPU, with no step
planned ahead (bench/LOG.md, 2026-11-27). A third system has V1's scheduler and cache and V0's host, and says which of
the two a gain is. What this engine's own host takes is another bench's: `ablate --over http`.

ShareGPT's 500 prompts, all at once, with the mean lengths that 0.6.0's post has, for models and GPUs like these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paper_figures import Claim, Figure, Found, Settings, Unsure

from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import build_cluster
from minivllm.simulate.figures import Figures
from minivllm.simulate.host import NO_HOST, HostCost
from minivllm.simulate.traces import load_trace

POST = "vLLM V1's post (January 2025)"
TRACE = "lognormal:prompt=202,prompt_sigma=1.1,output=179,output_sigma=0.9,longest=1024,arrivals=at_once"
NUM_REQUESTS = 500
HOST_OF_V1 = HostCost(1.3e-3, 7.5e-6)
V0, BETWEEN, V1 = "V0", "V1, V0's host", "V1"
PRESETS = {V0: "v0", BETWEEN: "v1", V1: "v1"}


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    model: str
    device: str
    systems: tuple[str, ...] = tuple(PRESETS)
    paper: Mapping[str, float] = field(default_factory=dict)


PANELS = {
    "v1-8b": Panel("Llama 3.1 8B, 1 H100", "llama-3.1-8b", "h100"),
    "v1-70b": Panel("Llama 3.3 70B, 4 H100", "llama-3.3-70b", "4xh100"),
}


def throughput(panel: Panel, settings: Settings) -> Found:
    """Requests a second, of NUM_REQUESTS that are all there at once."""
    of_v0 = HostCost(settings.host_share * mean_step(settings.seed))
    hosts = {V0: of_v0, BETWEEN: of_v0, V1: HOST_OF_V1}
    return Found({name: NUM_REQUESTS / seconds(run(panel, name, hosts[name], settings.seed)) for name in panel.systems})


def mean_step(seed: int) -> float:
    """Seconds that the 8B's device takes, by V1's plans."""
    figures = run(PANELS["v1-8b"], V1, NO_HOST, seed)
    return seconds(figures) / figures.num_steps


def run(panel: Panel, system: str, host: HostCost, seed: int) -> Figures:
    own = {"model.path": panel.model, "executor.kind": "simulated", "executor.device": panel.device}
    config = EngineConfig.build(PRESETS[system], {**own, "scheduler.max_num_seqs": 256})
    return build_cluster(config, host=host).run(load_trace(TRACE, num_requests=NUM_REQUESTS, seed=seed))


def seconds(figures: Figures) -> float:
    return float(figures.rows.column("last").max())


_HOST = "how long V0's host works in a step decides: 0.6.0's post tells its share, of another version and load"
FIGURE = Figure(
    POST,
    "Requests a second of ShareGPT's, all at once, V0 and V1 on H100",
    PANELS,
    throughput,
    [
        Claim("v1-8b v1-70b", "the most that V1 has over V0", V1, V0, 1.7, 1.7, _HOST),
        Claim("v1-70b", "V1 over V0, 70B", V1, V0, 1.0, 1.7, _HOST),
    ],
    "requests a second",
    unsure=[
        Unsure(
            "V0's host, times the 8B's step",
            "v1-8b v1-70b",
            {
                "a third": {"host_share": 1 / 3},
                "half": {"host_share": 0.5},
                "62/38, the server's too": {"host_share": 62 / 38},
            },
        )
    ],
)
