"""What a rate of arrivals did to a server: its latencies, how many requests met their objectives, where the knee is.

Beside the metrics of bench/latency.py, whose definitions hold here with the client as the observer:

    offered_rate   of the arrivals as they were drawn: a short Poisson run is seldom of its nominal rate.
    request_rate   answered requests / (last token - first arrival). Below the offered rate even of a server that keeps
                   up, by the time that the last answers take: longer runs, smaller difference.
    output_rate    output tokens over the same time.
    attained       requests that met every objective / all that were sent. One that failed met none.
    goodput        requests that met every objective, a second (as in DistServe, Zhong et al. 2024).
    late           how long after its time the client sent a request; part of every latency here.
    knee           of the offered rates, the one where request_rate / latency_p50 is highest: Kleinrock's power
                   ("Power and deterministic rules of thumb", 1979). Beyond it waiting grows faster than work done.
    best_in_slo    the highest rate at which, and at all lower ones, `attain` of the requests met the objectives.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from http_load import Answer
from latency import Timeline, request_metrics

from minivllm.simulate.objectives import parse_objectives

PERCENTILES = (50, 90, 99)
OBJECTIVES: dict[str, Callable[[Timeline], float]] = {  # of one sequence, in seconds
    "ttft": lambda timeline: timeline.ttft,
    "tpot": lambda timeline: timeline.tpot,
    "itl": lambda timeline: timeline.itl_max,  # the worst gap
    "latency": lambda timeline: timeline.latency,
}
Slo = Mapping[str, float]


def parse_slo(texts: Sequence[str]) -> dict[str, float]:
    return parse_objectives(texts, OBJECTIVES)


def meets(answer: Answer, slo: Slo) -> bool:
    """Whether each of its sequences met every objective."""
    return answer.error is None and all(
        OBJECTIVES[name](timeline) <= most for name, most in slo.items() for timeline in answer.timelines
    )


def summary(answers: Sequence[Answer], slo: Slo) -> dict[str, float]:
    """One run. Latencies are missing if nothing was answered."""
    late = 1e3 * np.percentile([answer.late_s for answer in answers], (50, 99, 100))
    found = dict(zip(("late_p50", "late_p99", "late_max"), late.tolist(), strict=True))
    arrivals = [answer.timelines[0].arrival for answer in answers]
    found["offered_rate"] = (len(arrivals) - 1) / span if (span := max(arrivals) - min(arrivals)) else 0.0
    good = [answer for answer in answers if answer.error is None]
    found["failed"] = len(answers) - len(good)
    if not good:
        return found | ({"attained": 0.0, "goodput": 0.0} if slo else {})
    timelines = [timeline for answer in good for timeline in answer.timelines]
    seconds = max(timeline.times[-1] for timeline in timelines) - min(arrivals)
    found |= request_metrics(timelines, PERCENTILES)
    found["request_rate"] = len(good) / seconds
    found["output_rate"] = sum(len(timeline.times) for timeline in timelines) / seconds
    if slo:
        num_met = sum(meets(answer, slo) for answer in answers)
        found |= {"attained": num_met / len(answers), "goodput": num_met / seconds}
    return found


def errors(answers: Sequence[Answer]) -> Counter[str]:
    return Counter(answer.error for answer in answers if answer.error is not None)


def median(row: Mapping[str, Any], name: str) -> float | None:
    """Over a row's runs; None if any has no such figure."""
    values = [run.get(name) for run in row["runs"]]
    return None if None in values else statistics.median(values)


def knee(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """rows: of rising rate. `inside`: whether both a lower and a higher rate were tried. None: nothing was answered.
    `says`: as words."""
    powers = [
        0.0 if (rate := median(row, "request_rate")) is None else rate / median(row, "latency_p50") for row in rows
    ]
    best = max(range(len(rows)), key=powers.__getitem__)
    if powers[best] == 0.0:
        return None
    rate, is_last = rows[best]["rate"], best == len(rows) - 1
    says = f"no knee up to {rate:g} requests/s" if is_last else f"the knee is at {rate:g} requests/s"
    says += " or below" if best == 0 and not is_last else ""
    return {"rate": rate, "inside": best > 0 and not is_last, "says": says}


def best_in_slo(rows: Sequence[Mapping[str, Any]], attain: float) -> float | None:
    """rows: of rising rate. None: even the lowest rate was too much."""
    best = None
    for row in rows:
        if median(row, "attained") < attain:
            break
        best = row["rate"]
    return best
