"""Figures of a simulated run, kept small: a row of numbers a request, and a histogram of the gaps between tokens.

    TTFT     from a request's arrival to its first token; waiting counts
    latency  from its arrival to its last token
    TPOT     the mean of its gaps: (latency - TTFT) / (tokens - 1), as vLLM's benchmark has it
    ITL      the gaps between tokens, of all requests; their percentiles are right to GAP_ERROR

Tokens that come together, as guesses do, have gaps of 0. All seconds are of the virtual clock.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from minivllm.plan import Delta
from minivllm.simulate.workload import TraceRequest

PERCENTILES = (50, 90, 99)
GAP_ERROR = 0.005  # of a percentile of gaps, relative: half a bucket
GROWTH = 1.3  # a queue that grows by so much from each part of a run to the next, and is long then, grows throughout
LONG_QUEUE = 2.0  # requests a replica


class Gaps:
    """A histogram whose buckets are as wide as GAP_ERROR allows."""

    _width = 2 * math.log1p(GAP_ERROR)

    def __init__(self) -> None:
        self.counts: Counter[int | None] = Counter()  # by bucket; None: no gap at all
        self.sum = self.longest = 0.0

    def add(self, seconds: float, count: int) -> None:
        self.counts[math.floor(math.log(seconds) / self._width) if seconds > 0 else None] += count
        self.sum += seconds * count
        self.longest = max(self.longest, seconds)

    def summary(self) -> dict[str, float]:
        """{} if there are none."""
        if not (total := self.counts.total()):
            return {}
        zeros = self.counts[None]
        buckets = sorted((bucket, count) for bucket, count in self.counts.items() if bucket is not None)
        middles = [0.0, *(min(self.longest, math.exp((bucket + 0.5) * self._width)) for bucket, _ in buckets)]
        below = np.cumsum([zeros, *(count for _, count in buckets)])
        at = {p: middles[int(np.searchsorted(below, p / 100 * total))] for p in PERCENTILES}
        return {"mean": self.sum / total, **{f"p{p}": value for p, value in at.items()}, "max": self.longest}


class Live:
    """A request that has not ended."""

    __slots__ = ("asked", "first", "last", "num_tokens")

    def __init__(self, asked: TraceRequest):
        self.asked = asked
        self.num_tokens = 0
        self.first = self.last = 0.0


class Rows:
    """Of requests that have ended, as they ended."""

    def __init__(self) -> None:
        self.arrival, self.first, self.last = array("d"), array("d"), array("d")
        self.num_prompt, self.num_output = array("q"), array("q")

    def add(self, live: Live) -> None:
        self.arrival.append(live.asked.arrival)
        self.first.append(live.first)
        self.last.append(live.last)
        self.num_prompt.append(live.asked.num_prompt)
        self.num_output.append(live.num_tokens)

    def column(self, name: str) -> np.ndarray:
        """[requests]"""
        return np.array(getattr(self, name))


class Figures:
    def __init__(self, num_replicas: int):
        self.rows = Rows()
        self.gaps = Gaps()
        self.num_refused = self.num_cut = self.num_steps = 0
        self.why_refused = ""  # the first one
        self.gave_up = False  # the run has ended before its requests
        self._num_replicas = num_replicas
        self._live: dict[str, Live] = {}
        self._num_waiting = 0  # for their first tokens
        self._waiting = array("q")  # how many did, when each request came
        self._arrivals = array("d")
        self._kv_seconds = self._kv_most = 0.0  # share of a pool in use, times seconds
        self._totals: Counter[str] = Counter()
        self._busy: dict[str, tuple[float, int]] = {}  # by what replicas do: seconds of their devices, replicas
        self.also: dict[str, Any] = {}  # what only some clusters have, in the summary's form

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    # --- as it happens

    def arrived(self, req_id: str, asked: TraceRequest) -> None:
        self._live[req_id] = Live(asked)
        self._waiting.append(self._num_waiting)
        self._arrivals.append(asked.arrival)
        self._num_waiting += 1

    def refused(self, req_id: str, why: str) -> None:
        del self._live[req_id]
        self._num_waiting -= 1
        self.num_refused += 1
        self.why_refused = self.why_refused or why

    def told(self, deltas: Sequence[Delta], now: float) -> list[str]:
        """Tokens have come -> the requests that have ended."""
        ended, all_live, last_gap, num_alike = [], self._live, 0.0, 0
        for delta in deltas:
            live, num_new = all_live[delta.req_id], len(delta.token_ids)
            if live.num_tokens:
                if (gap := now - live.last) != last_gap:  # those who run together have the same one
                    if num_alike:
                        self.gaps.add(last_gap, num_alike)
                    last_gap, num_alike = gap, 0
                num_alike += 1
            else:
                live.first = now
                self._num_waiting -= 1
            if num_new > 1:
                self.gaps.add(0.0, num_new - 1)
            live.last = now
            live.num_tokens += num_new
            if delta.finish_reason is not None:
                ended.append(delta.req_id)
        if num_alike:
            self.gaps.add(last_gap, num_alike)
        for req_id in ended:
            live = all_live.pop(req_id)
            self.num_cut += live.num_tokens < live.asked.num_output
            self.rows.add(live)
        return ended

    def ran(self, kv_usage: float, seconds: float) -> None:
        """A step of some core, whose pool was then used so far."""
        self.num_steps += 1
        self._kv_seconds += kv_usage * seconds
        self._kv_most = max(self._kv_most, kv_usage)

    def end(self, sides: Mapping[str, Sequence[Any]], prefix_cores: Iterable[Any]) -> None:
        """sides: all cores, by what they do. prefix_cores: whose prefix caches count."""
        for name, cores in sides.items():
            self._totals["num_preempted"] += sum(core.stats.num_preempted for core in cores)
            self._busy[name] = sum(core.executor.busy_seconds for core in cores), len(cores)
        for core in prefix_cores:
            for name in ("prefix_queries", "prefix_hits"):
                self._totals[name] += getattr(core.stats, name)

    # --- at the end

    @property
    def queue_grew(self) -> bool:
        """Whether more waited in each quarter of the arrivals than in the one before, and many at the end. Of a burst,
        which has no rate, False."""
        if len(self._waiting) < 8 or self._arrivals[-1] == self._arrivals[0]:
            return False
        _, *quarters = (float(part.mean()) for part in np.array_split(np.array(self._waiting), 4))
        grows = all(after >= GROWTH * before for before, after in zip(quarters, quarters[1:], strict=False))
        return grows and quarters[-1] > LONG_QUEUE * self._num_replicas

    def summary(self, objectives: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Plain data: seconds, tokens a second, fractions. objectives: the most seconds of ttft, tpot and latency."""
        rows = self.rows
        found: dict[str, Any] = {
            "num_requests": len(rows.arrival) + self.num_refused,
            "num_finished": len(rows.arrival),
            "num_refused": self.num_refused,
            "num_cut": self.num_cut,
            "num_steps": self.num_steps,
            "queue_grew": self.queue_grew,
        }
        if not len(rows.arrival):
            return found
        times = {name: rows.column(name) for name in ("arrival", "first", "last")}
        num_out = rows.column("num_output")
        seconds = float(times["last"].max() - self._arrivals[0])
        of = _latencies(**times, num_output=num_out)
        found |= {
            "seconds": seconds,
            "requests_per_s": len(num_out) / seconds,
            "output_tokens_per_s": int(num_out.sum()) / seconds,
            "total_tokens_per_s": int(num_out.sum() + rows.column("num_prompt").sum()) / seconds,
            **{name: _percentiles(values[~np.isnan(values)]) for name, values in of.items()},
            "itl": self.gaps.summary(),
            "preemptions": self._totals["num_preempted"],
            "prefix_hit_rate": self._totals["prefix_hits"] / max(1, self._totals["prefix_queries"]),
            "kv_usage": {"mean": self._kv_seconds / (seconds * self._num_replicas), "max": self._kv_most},
            "device_busy": sum(busy for busy, _ in self._busy.values()) / (seconds * self._num_replicas),
            **self.also,
        }
        if len(self._busy) > 1:
            found["device_busy_by"] = {name: busy / (seconds * count) for name, (busy, count) in self._busy.items()}
        if objectives:
            num_met = self._num_met(of, objectives)
            found["attained"] = num_met / found["num_requests"]
            found["goodput_per_s"] = num_met / seconds
        return found

    def _num_met(self, of: Mapping[str, np.ndarray], objectives: Mapping[str, float]) -> int:
        """Who has no gap has met every TPOT."""
        met = np.ones(len(self.rows.arrival), bool)
        for name, most in objectives.items():
            met &= ~(of[name] > most)
        return int(met.sum())


def _latencies(
    arrival: np.ndarray, first: np.ndarray, last: np.ndarray, num_output: np.ndarray
) -> dict[str, np.ndarray]:
    """[requests] each; a TPOT is NaN where there is one token."""
    gaps = np.where(num_output > 1, num_output - 1, np.nan)
    return {"ttft": first - arrival, "tpot": (last - first) / gaps, "latency": last - arrival}


def _percentiles(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    at = zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True)
    return {"mean": float(values.mean()), **{f"p{p}": value for p, value in at}, "max": float(values.max())}
