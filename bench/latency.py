"""Latency, throughput and memory of a run, from the times of its tokens: the definitions, and nothing that measures.

As the first design text of this project defines them, for each request with N output tokens:

    TTFT     from the arrival to the first token. The arrival is when the workload wanted it, not when a busy engine
             took it (an open loop: waiting counts).
    latency  from the arrival to the last token.
    TPOT     (latency - TTFT) / N, so that latency = TTFT + TPOT * N. (vLLM's benchmark divides by N - 1, which is the
             mean ITL.)
    ITL      the gaps between consecutive tokens, pooled over all requests. A p99 sees stalls only if they are more than
             1 % of the gaps; itl_max sees every one. The mean over one request is (latency - TTFT) / (N - 1).
    throughput  (input + output tokens of all requests) / (last token - first arrival). A prompt with n outputs counts
             once.

And of the engine:

    host_ms      mean a step: schedule, prepare inputs, update.
    cpu_us       of all the processes of a server, for an output token.
    kv_used      tokens held / slots allocated, summed over steps. Above 1 where requests share blocks.
    kv_reserved, kv_internal, kv_external
                 waste as in Figure 2 of the vLLM paper (kv/waste.py), each a fraction of the slots that are not free to
                 be given out; the mean of samples taken every few steps.
    computed     tokens that went through the model: prompts without what a prefix cache had, outputs, and all that was
                 computed again, after a preemption or for a beam that was forked.
    running      requests held at once: the mean of the steps in which others wait (of all steps, if nobody ever does).
    preemptions  requests that lost their blocks.
    stall_steps  longest run of steps in which a request that had its first token and was not finished got none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Metric(NamedTuple):
    what: str
    unit: str
    higher_is_better: bool = False


METRICS: dict[str, Metric] = {
    "throughput": Metric("throughput (in + out)", "tokens/s", True),
    "ttft_p50": Metric("time to first token, median", "ms"),
    "ttft_p99": Metric("time to first token, p99", "ms"),
    "tpot_p50": Metric("time per output token, median", "ms"),
    "tpot_p99": Metric("time per output token, p99", "ms"),
    "itl_p50": Metric("inter-token latency, median", "ms"),
    "itl_p99": Metric("inter-token latency, p99", "ms"),
    "itl_max": Metric("inter-token latency, worst", "ms"),
    "latency_p50": Metric("latency, median", "ms"),
    "latency_p99": Metric("latency, p99", "ms"),
    "host_ms": Metric("host time a step", "ms"),
    "cpu_us": Metric("CPU time of a server, an output token", "µs"),
    "kv_used": Metric("KV slots that hold a token", "of allocated", True),
    "kv_reserved": Metric("KV slots reserved for later", "of taken"),
    "kv_internal": Metric("KV slots wasted inside", "of taken"),
    "kv_external": Metric("KV slots lost between", "of taken"),
    "computed": Metric("tokens computed", "tokens"),
    "running": Metric("requests held at once", "requests", True),
    "preemptions": Metric("preemptions", "requests"),
    "stall_steps": Metric("longest stall of a decode", "steps"),
    "num_steps": Metric("steps", "steps"),
}

SEEN_BY_CLIENTS = (  # of a server; who shares its machine knows its CPU time, too
    *("throughput", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p50", "itl_p99", "itl_max"),
    *("latency_p50", "latency_p99", "cpu_us"),
)


@dataclass(slots=True)
class Timeline:
    """One request: when it came and when each of its tokens did, in seconds; in which step, counted from 0."""

    arrival: float
    num_in: int
    times: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    @property
    def latency(self) -> float:
        return self.times[-1] - self.arrival

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / len(self.times)

    @property
    def itl_max(self) -> float:
        return max((after - before for before, after in pairwise(self.times)), default=0.0)

    def at(self, time: float, step: int, num: int) -> None:
        """num tokens more came now; below 0: the first ones did not count."""
        self.times += [time] * num
        self.steps += [step] * num
        if num < 0:
            del self.times[:-num], self.steps[:-num]


class StepRecord(NamedTuple):
    host_ms: float
    held: int  # tokens whose K and V live requests keep, each request counting its own
    slots: int  # allocated to live requests
    preempted: int
    waste: tuple[float, float, float, float] | None = None  # tokens, reserved, internal, external, where it was sampled
    running: int = 0  # requests
    waiting: int = 0
    computed: int = 0  # tokens


def metrics(timelines: Sequence[Timeline], steps: Sequence[StepRecord]) -> dict[str, float]:
    """METRICS of one run; waste only where it was sampled. Every timeline has a token."""
    slots = sum(s.slots for s in steps)
    return (
        request_metrics(timelines)
        | _waste(steps)
        | {
            "host_ms": float(np.mean([s.host_ms for s in steps])),
            "kv_used": sum(s.held for s in steps) / slots if slots else 0.0,
            "computed": sum(s.computed for s in steps),
            "running": float(np.mean([s.running for s in steps if s.waiting] or [s.running for s in steps])),
            "preemptions": sum(s.preempted for s in steps),
            "stall_steps": max((b - a - 1 for t in timelines for a, b in pairwise(t.steps) if b > a), default=0),
            "num_steps": len(steps),
        }
    )


def request_metrics(timelines: Sequence[Timeline], percentiles: Sequence[int] = (50, 99)) -> dict[str, float]:
    """Those of METRICS that clients see: throughput, and ttft_p50 ... for each percentile. Every timeline has a
    token."""
    itl = [after - before for t in timelines for before, after in pairwise(t.times)]
    num_tokens = sum(t.num_in + len(t.times) for t in timelines)
    seconds = max(t.times[-1] for t in timelines) - min(t.arrival for t in timelines)
    found = {"throughput": num_tokens / seconds}
    for name, values in (
        ("ttft", [t.ttft for t in timelines]),
        ("tpot", [t.tpot for t in timelines]),
        ("itl", itl),
        ("latency", [t.latency for t in timelines]),
    ):
        milliseconds = (1e3 * np.percentile(values or [0.0], percentiles)).tolist()
        found |= {f"{name}_p{q}": value for q, value in zip(percentiles, milliseconds, strict=True)}
    return found | {"itl_max": 1e3 * max(itl, default=0.0)}


def _waste(steps: Sequence[StepRecord]) -> dict[str, float]:
    samples = [[part / sum(s.waste) for part in s.waste] for s in steps if s.waste and sum(s.waste) > 0]
    if not samples:
        return {}
    means = np.mean(samples, axis=0).tolist()
    return dict(zip(("kv_reserved", "kv_internal", "kv_external"), means[1:], strict=True))


class Ratio(NamedTuple):
    ratio: float
    low: float
    high: float


def bootstrap_ratio(
    a: Sequence[float], b: Sequence[float], seed: int = 0, num: int = 10_000, level: float = 0.95
) -> Ratio | None:
    """B / A paired by repetition: the geometric mean of the ratios, with its percentile-bootstrap interval.

    None where a value is not positive (a count that was 0): there is no ratio. Few repetitions make the interval too
    narrow: of 5, it leaves 1 out only if all 5 agree on the side, which chance alone does 6 % of the time.
    """
    if min(*a, *b) <= 0:
        return None
    logs = np.log(np.asarray(b) / np.asarray(a))
    picks = np.random.default_rng(seed).integers(0, len(logs), (num, len(logs)))
    low, high = np.percentile(logs[picks].mean(axis=1), (50 - 50 * level, 50 + 50 * level))
    return Ratio(*(float(np.exp(value)) for value in (logs.mean(), low, high)))


def shown(ratio: Ratio | None) -> dict[str, float | None]:
    """As JSON keeps it."""
    return {key: round(value, 4) for key, value in ratio._asdict().items()} if ratio else {"ratio": None}


def undecided_within(ratio: Ratio) -> float:
    """How far from 1, as a fraction, the truth may be by this interval, in whichever direction."""
    return max(ratio.high, 1 / ratio.low) - 1


def is_decided(a: Sequence[float], b: Sequence[float], width: float) -> bool:
    """Whether more repetitions are not needed: the 99 % interval of B / A leaves 1 out, or half of the 95 % interval is
    at most `width` of the ratio. Counts that were 0 have no ratio, and more repetitions would not give them one."""
    usual, strict = bootstrap_ratio(a, b), bootstrap_ratio(a, b, level=0.99)
    if usual is None or strict is None:
        return True
    return not strict.low <= 1 <= strict.high or (usual.high - usual.low) / 2 <= width * usual.ratio


def verdict(metric: str, ratio: Ratio | None, a: Sequence[float] = (), b: Sequence[float] = ()) -> str:
    """What B means for whoever switches from A: "better", "worse", or "" where the interval holds 1.

    Counts that were 0 have no ratio: there all repetitions of at least 3 must agree.
    """
    if ratio is not None:
        if ratio.low <= 1 <= ratio.high:
            return ""
        higher = ratio.low > 1
    else:
        signs = {(y > x) - (y < x) for x, y in zip(a, b, strict=True)}
        if len(a) < 3 or signs not in ({1}, {-1}):
            return ""
        higher = signs == {1}
    return "better" if higher == METRICS[metric].higher_is_better else "worse"
