"""From set-ups to what each reaches: the trials that simulate/capacity.py asks for, on simulated engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import islice

from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import build_cluster
from minivllm.engine.build.disaggregated import Counts, build_disaggregated
from minivllm.errors import ConfigError
from minivllm.simulate.capacity import Answer, Objective, Setup, Summary, Trial, find_band, find_rate, highest
from minivllm.simulate.cluster import Cluster
from minivllm.simulate.machines import find_machine
from minivllm.simulate.wire import parse_wire
from minivllm.simulate.workload import TraceRequest

UNKNOWN_ERROR = 0.2  # of a device whose kernels nobody has measured here: assumed
BATCH = 32  # requests at once of each core, that say which rate is tried first
AT_ONCE = 2.0**20  # requests a second

Requests = Callable[[float], Iterable[TraceRequest]]  # requests a second -> these
Build = Callable[[], Cluster]


def explore(
    config: EngineConfig, setup: Setup, requests: Requests, objectives: Sequence[Objective], price: float
) -> Answer:
    """The highest rate of one engine that serves so, or of one such group of prefill and decode replicas, with its
    band. price: of an hour of all its devices. Raises ConfigError for what cannot be served so."""
    build = build_of(config, setup)
    trial = trial_of(build, requests)
    points = find_rate(trial, objectives, _start(build(), requests))  # what cannot be is said here
    best = highest(points)
    error = max(map(error_of, setup.num_by_kind))
    band = (0.0, 0.0) if best is None else find_band(trial, objectives, best, error)
    return Answer(setup, price, points, best, band)


def error_of(device: str) -> float:
    """Of a step's time, relative: how far the fit of the device is from what was measured."""
    error = find_machine(device).error
    return UNKNOWN_ERROR if error is None else error


def build_of(config: EngineConfig, setup: Setup) -> Build:
    """What makes the set-up's cluster, anew for each trial."""
    own = config.override({**setup.options, "executor.kind": "simulated", "executor.device": setup.devices.name})
    if (of := setup.prefill) is None:
        return partial(build_cluster, own)
    sides = own.override({"executor.device": of.devices.name}), own
    return partial(build_disaggregated, *sides, Counts(of.num_replicas, of.num_decode), wire=parse_wire(of.wire))


def trial_of(build: Build, requests: Requests) -> Trial:
    """Each rate is simulated once."""

    @cache
    def run(rate: float) -> Summary:
        return build().run(requests(rate)).summary()

    return run


def _start(cluster: Cluster, requests: Requests) -> float:
    """Requests a second of a batch that comes at once: a rate to begin at. Far below it a trial has many short steps
    and takes long. Raises ConfigError if none of them can ever run."""
    figures = cluster.run(islice(requests(AT_ONCE), BATCH * len(cluster.replicas)))
    if rate := figures.summary()["requests_per_s"]:
        return rate
    raise ConfigError(f"none of the first requests can run: {figures.why_refused}")
