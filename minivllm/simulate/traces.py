"""load_trace: what is asked of a simulated engine, from a file or drawn by name, as a lazy sequence of TraceRequest."""

from __future__ import annotations

import inspect
import math
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.errors import TraceError
from minivllm.registry import did_you_mean
from minivllm.simulate.trace_draws import DRAWS, GAPS, Chance
from minivllm.simulate.trace_files import FORMS, MOST_TOKENS, read_trace
from minivllm.simulate.workload import TraceRequest

SLOWEST, MOST_NUMBER = 1e-6, 1e6  # of a rate, of a draw's numbers
DRAWN_REQUESTS, DRAWN_RATE = 1000, 1.0  # where nobody says how many, and how many a second


def load_trace(
    source: str | Path, *, rate: float | None = None, num_requests: int | None = None, seed: int = 0
) -> Iterator[TraceRequest]:
    """In order of arrival, the first at 0.

    source: a file (trace_files.py), or the name of a draw with its parameters: "sharegpt", "fixed:prompt=64,output=8",
    "alpaca:arrivals=gamma,cv=2" (trace_draws.py). rate: requests a second in the mean; a file's times are stretched to
    it. num_requests: no more than the first so many; of a draw 1,000 if not said. seed: of all that is drawn.

    Raises TraceError at once for what is no trace or no parameter; for a broken line when it comes to that, which is
    at once if a rate is asked for.
    """
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise TraceError(f"a trace's rate must be above 0 requests a second, got {rate}")
    if num_requests is not None and num_requests < 1:
        raise TraceError(f"a trace must have at least 1 request, got {shown(num_requests)}")
    num_requests = None if num_requests is None else min(num_requests, sys.maxsize)
    if rate is not None and not SLOWEST <= rate <= 1 / SLOWEST:
        raise TraceError(f"a trace's rate must be {SLOWEST:g} to {1 / SLOWEST:g} requests a second, got {rate}")
    if os.path.isfile(source):  # False, too, of what no file can be called
        return _from_file(source, rate, num_requests)
    return _drawn(str(source), rate, num_requests, seed)


def _from_file(path: str | Path, rate: float | None, num_requests: int | None) -> Iterator[TraceRequest]:
    requests = islice(read_trace(path), num_requests)
    if rate is None:
        return requests
    count, last = 0, 0.0
    for request in requests:
        count, last = count + 1, request.arrival
    if not last:
        raise TraceError(f"{path}: all {count} requests arrive at once, so that their rate cannot be changed")
    if not math.isfinite(stretch := (count - 1) / last / rate):
        raise TraceError(f"{path}: its {count} requests arrive within {last} s: their rate cannot be changed")
    return (replace(r, arrival=r.arrival * stretch) for r in islice(read_trace(path), num_requests))


def _drawn(source: str, rate: float | None, num_requests: int | None, seed: int) -> Iterator[TraceRequest]:
    name, _, given = source.partition(":")
    if name not in DRAWS.names():
        hint = did_you_mean(name, DRAWS.names())
        raise TraceError(
            f'no trace "{shown(source)}": there is no such file, and no draw of that name.{hint} '
            f"Draws: {', '.join(DRAWS.names())}; files: {', '.join(FORMS.names())}"
        )
    if seed < 0:
        raise TraceError(f"a trace's seed must be at least 0, got {seed}")
    draw = DRAWS.get(name)
    parameters = _parameters(name, draw, given)
    arrivals, cv = parameters.pop("arrivals"), parameters.pop("cv")
    if arrivals not in GAPS:
        raise TraceError(
            f"{name}: arrivals={shown(arrivals)}.{did_you_mean(arrivals, list(GAPS))} One of {', '.join(GAPS)}"
        )
    if cv != 1.0 and arrivals != "gamma":
        raise TraceError(f"{name}: cv={cv:g} needs arrivals=gamma")
    if arrivals == "at_once" and rate is not None:
        raise TraceError(f"{name}: all requests arrive at once, so that they have no rate")
    chance = Chance(seed, rate or DRAWN_RATE, arrivals, cv)
    return islice(draw(chance, **parameters), num_requests or DRAWN_REQUESTS)


def _parameters(name: str, draw: Callable[..., Any], given: str) -> dict[str, Any]:
    """Of "prompt=64,output=8", with the defaults of what is not given."""
    own = {key: p.default for key, p in inspect.signature(draw).parameters.items() if key != "chance"}
    known = {"arrivals": "poisson", "cv": 1.0, **own}
    found = dict(known)
    for pair in filter(None, given.split(",")):
        key, _, text = pair.partition("=")
        if key not in known:
            raise TraceError(f'{name}: no parameter "{shown(key)}".{did_you_mean(key, list(known))} {", ".join(known)}')
        found[key] = _value(f"{name}: {key}", text, known[key])
    return found


def _value(what: str, text: str, default: str | int | float) -> str | int | float:
    """Of the default's type; a number above 0."""
    if isinstance(default, str):
        return text
    whole = isinstance(default, int)
    least, most = (1, MOST_TOKENS) if whole else (0.01, MOST_NUMBER)
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = 0
    if not least <= value <= most:
        upwards = f" to {most:,.0f}" if value > most else ""
        kind = "an integer" if whole else "a number"
        raise TraceError(f"{what} must be {kind} from {least}{upwards}, got {shown(text)!r}")
    return value


def shown(value: object) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < 10**30 else "more"
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass(frozen=True, slots=True)
class Description:
    num_requests: int
    seconds: float  # from the first arrival to the last
    prompts: dict[str, float]  # tokens: mean, p50, p99, max
    outputs: dict[str, float]
    shared: float  # share of all prompt tokens that a prefix cache without bounds has seen before

    @property
    def rate(self) -> float:
        """Requests a second; inf if all arrive at once."""
        return (self.num_requests - 1) / self.seconds if self.seconds else math.inf


def describe(requests: Iterable[TraceRequest]) -> Description:
    """In one pass. Raises TraceError for none."""
    prompts, outputs, cache, num_shared, last = array("q"), array("q"), UnboundedCache(), 0, 0.0
    for request in requests:
        prompts.append(request.num_prompt)
        outputs.append(request.num_output)
        num_shared += cache.find_and_add(request)
        last = request.arrival
    if not prompts:
        raise TraceError("a trace of no requests")
    return Description(len(prompts), last, _moments(prompts), _moments(outputs), num_shared / sum(prompts))


def _moments(lengths: array) -> dict[str, float]:
    values = np.frombuffer(lengths, np.int64)
    p50, p99 = np.percentile(values, (50, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p99": float(p99), "max": float(values.max())}


class UnboundedCache:
    """A tree of the pieces that prompts began with: what a prefix cache would find that forgets nothing and keeps
    single tokens. Answers are not in it, since a trace does not say their tokens."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], tuple[int, int]] = {}  # (parent, piece) -> (number, tokens known of it)

    def find_and_add(self, request: TraceRequest) -> int:
        """Tokens of the request's prompt that were there before it."""
        found, parent, left, hits = 0, 0, request.num_prompt, True
        for piece in request.pieces:
            length = min(request.piece_tokens, left)
            if length <= 0:
                break
            number, known = self._nodes.get((parent, piece), (len(self._nodes) + 1, 0))
            found += min(known, length) if hits else 0
            hits = hits and known >= length
            self._nodes[parent, piece] = number, max(known, length)
            parent, left = number, left - length
        return found
