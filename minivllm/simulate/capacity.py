"""Capacity: how many requests a second a set-up serves within its objectives, what a token then costs, who is better.

A load is tried by simulating it (a Trial), from a guess on in growing strides, and then halved in between, on the same
requests, closer together. Loads are rates (Rates), or shares of a rate that replicas divide among themselves (Shares).
What a load gives is that of a system in balance or it does not hold: a queue that grows throughout fails any objective,
however short the run.

The fit of a device's cost is off by a known share (devices.py). So each load is found for a device, too, that is slower
by that share, and for one that is faster. A device that takes f times as long for each step does at R / f requests a
second what the other does at R, f times as slowly: so these are the same trials, with other objectives (find_band).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from minivllm.errors import ConfigError
from minivllm.registry import did_you_mean
from minivllm.simulate.objectives import parse_objectives

METRICS = ("ttft", "tpot", "itl", "latency")
PLACES = ("mean", "p50", "p90", "p99")
ALONE = 64.0  # a rate that is so many times lower than the first tried leaves a request alone; if it fails, all do
MOST_RATE = 2.0**20  # requests a second
TOLERANCE = 1.04  # between a rate that holds and one that does not
WIDE = 18  # a stride of so many TOLERANCEs is a factor of 2

Summary = Mapping[str, Any]  # of Figures.summary()
Trial = Callable[[float], Summary]  # requests a second -> what they get


@dataclass(frozen=True, slots=True)
class Objective:
    metric: str  # one of METRICS
    place: str  # one of PLACES
    seconds: float

    def is_met(self, summary: Summary) -> bool:
        """By a run in which nobody had such a time too: one token has no gap."""
        return summary[self.metric].get(self.place, 0.0) <= self.seconds

    def over(self, factor: float) -> Objective:
        """What a device must keep to, if all that it takes is yet to be multiplied."""
        return replace(self, seconds=self.seconds / factor)


def read_objective(text: str) -> Objective:
    """ "ttft_p99=500ms". Raises ConfigError."""
    name = text.partition("=")[0]
    known = [f"{metric}_{place}" for metric in METRICS for place in PLACES]
    if name not in known:
        raise ConfigError(f'no objective "{name}".{did_you_mean(name, known)} Objectives: {", ".join(known)}')
    try:
        (seconds,) = parse_objectives([text], [name]).values()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    metric, _, place = name.partition("_")
    return Objective(metric, place, seconds)


@dataclass(frozen=True, slots=True)
class Point:
    rate: float  # requests a second
    holds: bool
    summary: Summary

    @property
    def median_tpot(self) -> float:
        """0: no request has a second token."""
        return self.summary.get("tpot", {}).get("p50", 0.0)


def holds(summary: Summary, objectives: Iterable[Objective]) -> bool:
    if summary["queue_grew"] or summary["num_refused"] or not summary["num_finished"]:
        return False
    return all(objective.is_met(summary) for objective in objectives)


class Loads(Protocol):
    """That may be tried, by number, the heaviest first."""

    least: int
    most: int

    def rate(self, number: int) -> float:
        """Requests a second."""
        ...

    def number(self, rate: float) -> int: ...
    def over(self, factor: float) -> Loads:
        """What to try in the place of a device that takes so many times as long: its rates times the factor."""
        ...


class Rates:
    """TOLERANCE apart, from MOST_RATE down to one that leaves a request alone if the first does not."""

    def __init__(self, first: float):
        """first: number 0."""
        self.first = first
        self.least = -math.floor(math.log(MOST_RATE / first, TOLERANCE))
        self.most = math.ceil(math.log(ALONE, TOLERANCE))

    def rate(self, number: int) -> float:
        return self.first * TOLERANCE**-number

    def number(self, rate: float) -> int:
        return round(math.log(self.first / rate, TOLERANCE))

    def over(self, factor: float) -> Rates:
        return self  # fine enough for any device


class Shares:
    """Of a rate, of which as many replicas as the number get the same each; at most `most`."""

    least = 1

    def __init__(self, total: float, most: int):
        self.total = total
        self.most = most

    def rate(self, number: int) -> float:
        return self.total / number

    def number(self, rate: float) -> int:
        return round(self.total / rate)

    def over(self, factor: float) -> Shares:
        return Shares(self.total * factor, self.most)


def find(trial: Trial, objectives: Sequence[Objective], loads: Loads, begin: int, stride: int) -> list[Point]:
    """All that were tried, in order of their rates, from load number `begin` on: of the heaviest that holds the next
    heavier does not, unless there is none. None holds if the lightest does not. stride: the first one."""
    points: dict[float, Point] = {}

    def try_at(number: int) -> bool:
        rate = loads.rate(number)
        summary = trial(rate)
        points[rate] = Point(rate, holds(summary, objectives), summary)
        return points[rate].holds

    first_that(try_at, loads.least, loads.most, begin, stride)
    return [points[rate] for rate in sorted(points)]


def first_that(holds: Callable[[int], bool], least: int, most: int, begin: int, stride: int) -> int | None:
    """The first number of [least, most] that holds, where all behind it do; None: not even the last. Asked from `begin`
    on, in strides that double until one holds and one does not."""
    low, high, at = least - 1, most + 1, min(max(begin, least), most)
    while high - low > 1:
        if holds(at):
            high = at
        else:
            low = at
        if least <= low and high <= most:
            at = (low + high) // 2
            continue
        at = max(high - stride, least) if high <= most else min(low + stride, most)
        stride *= 2
    return high if high <= most else None


def find_rate(trial: Trial, objectives: Sequence[Objective], start: float, stride: int = WIDE) -> list[Point]:
    """Of rates, with `start` as the first."""
    return find(trial, objectives, Rates(start), 0, stride)


def find_band(
    trial: Trial, objectives: Sequence[Objective], loads: Loads, best: Point, error: float
) -> tuple[float, float]:
    """The highest rates on a device that takes 1 + error times as long, and on one that is as much faster. 0: none."""
    rates, begin = [], loads.number(best.rate)
    for factor in (1 + error, 1 / (1 + error)):
        if factor < 1 and begin == loads.least:  # it holds there, too, and there is no more to try
            rates.append(best.rate)
            continue
        found = find(trial, [each.over(factor) for each in objectives], loads.over(factor), begin, 1)
        rates.append(point.rate / factor if (point := highest(found)) else 0.0)
    return rates[0], rates[1]


def highest(points: Iterable[Point]) -> Point | None:
    """The highest rate that holds."""
    return max((point for point in points if point.holds), key=lambda point: point.rate, default=None)


# -------------------------------------------------------------------------------------------------------- set-ups


@dataclass(frozen=True, slots=True)
class Devices:
    """That share one model, of one kind: so many stages of so many each."""

    kind: str
    count: int = 1
    num_stages: int = 1

    @property
    def name(self) -> str:
        """As executor.device has it."""
        if self.num_stages > 1:
            return f"{self.num_stages}x{self.count}x{self.kind}"
        return self.kind if self.count == 1 else f"{self.count}x{self.kind}"

    @property
    def total(self) -> int:
        return self.num_stages * self.count


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts here, answers there: replicas that compute prompts alone, and how many go on from their KV."""

    devices: Devices  # of each that computes prompts
    num_replicas: int
    num_decode: int
    wire: str  # that KV takes from one to the other (wire.parse_wire)


@dataclass(frozen=True, slots=True)
class Setup:
    """One way of serving: devices of a replica, and options. Where prompts are computed elsewhere, these replicas only
    decode."""

    devices: Devices
    options: Mapping[str, Any]
    prefill: Prefill | None = None

    @property
    def name(self) -> str:
        changed = ", ".join(f"{field.rpartition('.')[2]}={value}" for field, value in self.options.items())
        return self._place + (f" ({changed})" if changed else "")

    @property
    def _place(self) -> str:
        if (of := self.prefill) is None:
            return self.devices.name
        return f"{of.num_replicas} prefill {of.devices.name} + {of.num_decode} decode {self.devices.name}"

    @property
    def num_by_kind(self) -> dict[str, int]:
        """Of all its devices."""
        if (of := self.prefill) is None:
            return {self.devices.kind: self.devices.total}
        counts = dict.fromkeys((of.devices.kind, self.devices.kind), 0)
        counts[of.devices.kind] += of.num_replicas * of.devices.total
        counts[self.devices.kind] += of.num_decode * self.devices.total
        return counts

    @property
    def num_devices(self) -> int:
        return sum(self.num_by_kind.values())

    def price(self, prices: Mapping[str, float]) -> float:
        """An hour of all. prices: of one of each kind."""
        return sum(prices[kind] * count for kind, count in self.num_by_kind.items())


@dataclass(frozen=True, slots=True)
class Answer:
    """What a set-up reaches."""

    setup: Setup
    price: float  # an hour of all its devices, in whatever unit the user counts
    output: float  # tokens of a request, in the mean
    points: Sequence[Point]  # of the rates tried
    best: Point | None  # None: no rate holds
    band: tuple[float, float] = (0.0, 0.0)  # the highest rate on a slower device and on a faster one
    why: str = ""  # no rate holds

    def cost(self, rate: float | None = None) -> float:
        """Of a million tokens of output, at the highest rate or at another one's time; inf if no rate holds."""
        if self.best is None or not (rate := self.best.rate if rate is None else rate):
            return math.inf
        return 1e6 * self.price / 3600 / (rate * self.output)

    @property
    def cost_band(self) -> tuple[float, float]:
        return self.cost(self.band[1]), self.cost(self.band[0])


def rank(answers: Iterable[Answer]) -> list[Answer]:
    """Cheapest first, of two that cost the same the one whose tokens come faster; those of which no rate holds last."""
    return sorted(answers, key=lambda answer: (answer.cost(), answer.best.median_tpot if answer.best else math.inf))


@dataclass(frozen=True, slots=True)
class Choice:
    """A set-up at a rate: what a user gets, and what the owner pays."""

    setup: str
    rate: float
    tokens_per_s_of_a_user: float  # 1 / the median TPOT
    tokens_per_s_of_a_device: float
    cost: float  # of a million tokens of output


def choices(answers: Iterable[Answer]) -> list[Choice]:
    """Of all rates that were tried and could be kept up."""
    return [
        Choice(
            answer.setup.name,
            point.rate,
            1 / point.median_tpot,
            point.rate * answer.output / answer.setup.num_devices,
            1e6 * answer.price / 3600 / (point.rate * answer.output),
        )
        for answer in answers
        for point in answer.points
        if not point.summary["queue_grew"] and point.median_tpot
    ]


def front(found: Iterable[Choice]) -> list[Choice]:
    """Pareto's: nobody else is as fast for a user at a lower cost, or cheaper as fast. Fastest first."""
    kept: list[Choice] = []
    for choice in sorted(found, key=lambda c: (-c.tokens_per_s_of_a_user, c.cost)):
        if not kept or choice.cost < kept[-1].cost:
            kept.append(choice)
    return kept
