"""From set-ups to what each reaches: the trials that simulate/capacity.py asks for, on simulated engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import build_cluster
from minivllm.engine.build.disaggregated import Counts, build_disaggregated
from minivllm.errors import ConfigError
from minivllm.simulate.capacity import (
    ALONE,
    Answer,
    Loads,
    Objective,
    Rates,
    Setup,
    Shares,
    Summary,
    Trial,
    find,
    find_band,
    highest,
    holds,
)
from minivllm.simulate.cluster import Cluster
from minivllm.simulate.cost import Step, StepCost
from minivllm.simulate.machines import find_machine
from minivllm.simulate.steady import Arithmetic, Lengths, Place, of_sides
from minivllm.simulate.wire import parse_wire
from minivllm.simulate.workload import TraceRequest

UNKNOWN_ERROR = 0.2  # of a device whose kernels nobody has measured here: assumed
MEASURED = 1000  # requests of a workload, whose lengths the arithmetic takes
LONG, LEAST_SECONDS = (
    10,
    20.0,
)  # a trial's arrivals go on for the time of so many requests, one behind the other, at least
STRIDE = 2  # of rates: the arithmetic is right to about two tolerances

Requests = Callable[[float, float], Iterable[TraceRequest]]  # requests a second, for so many seconds -> these
Build = Callable[[], Cluster]
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of each set-up."""

    config: EngineConfig
    requests: Requests
    objectives: Sequence[Objective]
    rate: float | None = None  # requests a second that replicas have to serve together; None: as many as one can

    def lengths(self) -> Lengths:
        return Lengths.of(islice(self.requests(1.0, MEASURED), MEASURED))


def reckon(question: Question, setup: Setup) -> Arithmetic:
    """What needs no simulation. Raises ConfigError for what cannot be served so."""
    cluster, config = build_of(question.config, setup)(), question.config.override(setup.options)
    sides = {name: [_place(replica.core) for replica in side] for name, side in cluster.sides().items()}
    weights = max(cost.weight_bytes for replica in cluster.replicas for cost in replica.core.executor.costs)
    lengths = question.lengths()
    spec_decode = config.spec_decode
    most_tokens = 1 if spec_decode.method == "none" else 1 + spec_decode.k
    return of_sides(sides, weights, lengths, _most_step_seconds(question.objectives, lengths), most_tokens)


def _place(core: Any) -> Place:
    limits = core.scheduler.base.limits
    return Place(
        partial(_step_seconds, core.executor.costs),
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.kv_capacity,
    )


def _step_seconds(costs: Sequence[StepCost], step: Step) -> float:
    """costs: of the stages that a step passes."""
    return sum(cost.step_seconds(step) for cost in costs)


def _most_step_seconds(objectives: Iterable[Objective], lengths: Lengths) -> float:
    """In which a step may end, for what is asked of the time between tokens."""
    shares = {"tpot": 1.0, "itl": 1.0, "latency": 1 / lengths.output}
    return min((each.seconds * shares.get(each.metric, math.inf) for each in objectives), default=math.inf)


def explore(question: Question, setup: Setup, price: float, note: Note = print) -> Answer:
    """The highest rate of one engine that serves so, or of one such group of prefill and decode replicas; or the fewest
    of them that serve the rate asked for. With its band. price: of an hour of all its devices. note: takes a line about
    each trial. Raises ConfigError for what cannot be served so."""
    known, objectives = reckon(question, setup), question.objectives
    if why := known.why_none(objectives):
        return Answer(setup, price, math.nan, [], None, why=why)
    loads, begin = _loads(question.rate, known.rate)
    requests = partial(question.requests, seconds=max(LEAST_SECONDS, LONG * known.seconds))
    trial = trial_of(build_of(question.config, setup), requests, partial(_note, note, setup.name, objectives))
    points = find(trial, objectives, loads, begin, STRIDE if question.rate is None else 1)
    if (best := highest(points)) is None:
        return Answer(setup, price, math.nan, points, None, why=points[0].summary.get("why_refused", ""))
    got, error = best.summary, max(map(error_of, setup.num_by_kind))
    output = got["output_tokens_per_s"] / got["requests_per_s"] if got["num_cut"] else question.lengths().output
    return Answer(setup, price, output, points, best, find_band(trial, objectives, loads, best, error))


def _loads(rate: float | None, guess: float) -> tuple[Loads, int]:
    """What may be tried, and where to begin."""
    if rate is None:
        return Rates(guess), 0
    return Shares(rate, math.ceil(ALONE * max(1.0, rate / guess))), math.ceil(rate / guess)


def _note(note: Note, name: str, objectives: Sequence[Objective], rate: float, summary: Summary) -> None:
    note(f"{name}: {rate:.3g} requests/s {'hold' if holds(summary, objectives) else 'are too many'}")


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


def trial_of(
    build: Build,
    requests: Callable[[float], Iterable[TraceRequest]],
    told: Callable[[float, Summary], None] = lambda *_: None,
) -> Trial:
    """Each rate is simulated once, and no further than to the last arrival where a queue has grown until then. told: of
    each. Raises ConfigError if no request can ever run."""

    @cache
    def run(rate: float) -> Summary:
        figures = build().run(requests(rate), gives_up=True)
        summary = figures.summary()
        if figures.num_refused:
            summary["why_refused"] = figures.why_refused
        if figures.num_refused and not summary["num_finished"] and not figures.num_live:
            raise ConfigError(f"none of the requests can run: {figures.why_refused}")
        told(rate, summary)
        return summary

    return run
