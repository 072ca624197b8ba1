"""Papers' figures as data: what is measured again, and what the paper says of it. bench/papers.py runs them all alike.

A figure is a row of FIGURES. It has panels, a way to measure one of them (Found: a figure for each system, and a curve
of it where there is one), claims about those figures, and the constants that the paper does not say, with what else
they could be: where a verdict hangs on one, it is measured again with each value.

A new figure is a Figure in a module of its paper and a row here; nothing else changes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

NEAR = 0.15  # a ratio that is so near to the paper's range, relative, is the paper's
PARTLY = 1.3  # the same system is ahead, by so much at least

FIGURES = {  # name of a command's --figure -> where it is defined
    "2": "paper_vllm:FIGURE_2",
    "12": "paper_vllm:FIGURE_12",
    "13": "paper_vllm:FIGURE_13",
    "14": "paper_vllm_sequences:FIGURE_14",
    "15": "paper_vllm_sequences:FIGURE_15",
    "16": "paper_vllm:FIGURE_16",
    "17": "paper_vllm_sequences:FIGURE_17",
    "18b": "paper_vllm_blocks:FIGURE_18",
    "19a": "paper_vllm_blocks:FIGURE_19A",
    "19b": "paper_vllm_blocks:FIGURE_19",
    "blog": "paper_blog:FIGURE",
    "v1": "paper_v1:FIGURE",
    "sarathi": "paper_serving:SARATHI",
    "distserve": "paper_serving:DISTSERVE",
    "mooncake": "paper_mooncake:FIGURE_1",
    "mooncake-store": "paper_mooncake:STORE",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What no paper says, alike for all systems of a figure; stated beside every result."""

    limit: float = 0.5  # seconds of normalized latency, in the mean, that a rate must keep to
    minutes: float = 5.0  # of arrivals in each simulation
    host_ms: float = 15.0  # of the host's work in each step
    host_us: float = 0.0  # and for each request in it
    host_share: float = 29 / 38  # of V0's host in each step, over the device's time, in the figure of V1's post
    load: float = 1.0  # times a panel's rate, where one is given
    batch: int = 8  # prompts that a static batch is given, where memory does not say
    long_share: float = 0.7  # of a chat's prompts fill the context
    copy_us: float = 5.0  # to start one copy between host and device
    link_share: float = 0.75  # of the link's rate that copies reach
    prefill_nodes: int = 8  # of Mooncake's 16
    router: str = "round_robin"  # among nodes of vLLM's beside Mooncake
    seed: int = 0


class Found(NamedTuple):
    """Of a panel."""

    values: Mapping[str, float | None]  # by system; None: there is none (a system that holds no rate)
    curves: Mapping[str, Sequence[tuple[float, float]]] = {}  # by system


@dataclass(frozen=True, slots=True)
class Claim:
    """What a paper says of two systems' figures, or of one: a range. Of several panels the largest is meant."""

    panel: str  # or several, with spaces between
    what: str
    of: str  # a system
    over: str  # whose figure it is divided by; "": by none
    low: float  # 0: "at most"
    high: float  # inf: "at least"
    why: str = ""  # it may be missed

    def ratio(self, panels: Mapping[str, Mapping[str, float | None]]) -> float | None:
        """panels: figures by system, of all that were measured."""
        found = [_divided(panels[panel], self.of, self.over) for panel in self.panel.split()]
        return max((ratio for ratio in found if ratio is not None), default=None)

    def verdict(self, ratio: float | None) -> str:
        if ratio is None:
            return "not: one of the two holds no rate"
        if self.low * (1 - NEAR) <= ratio <= self.high * (1 + NEAR):
            return "reproduced"
        if ratio > self.high:
            return "partly: more than the paper's"
        return "partly: less than the paper's" if ratio >= min(PARTLY, self.low) else "not"

    @property
    def paper(self) -> str:
        if self.low == self.high:
            return f"{self.low:g}"
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        return f"{self.low:g} to {self.high:g}" if self.low else f"at most {self.high:g}"


def _divided(values: Mapping[str, float | None], of: str, over: str) -> float | None:
    ours, theirs = values[of], values[over] if over else 1.0
    return ours / theirs if ours and theirs else None


@dataclass(frozen=True, slots=True)
class Unsure:
    """A constant that the paper does not say, and what it could be as well."""

    what: str
    panels: str  # that are measured again, with spaces between
    values: Mapping[str, Mapping[str, Any]]  # by name: fields of Settings that change


@dataclass(frozen=True, slots=True)
class Figure:
    paper: str
    title: str
    panels: Mapping[str, Any]  # by name; each has a title, and paper: the paper's own figures by system, if it has any
    measure: Callable[[Any, Settings], Found]
    claims: Sequence[Claim]
    unit: str  # of values
    axes: tuple[str, str] = ("", "")  # of curves
    logarithmic: bool = False  # their x
    unsure: Sequence[Unsure] = field(default=())


def load(name: str) -> Figure:
    module, _, attribute = FIGURES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


Note = Callable[[str], None]


def run(figure: Figure, settings: Settings, note: Note) -> dict[str, Any]:
    """Everything that a page and a picture show of it, as plain data."""
    found = _measured(figure, figure.panels, settings, note)
    panels = {
        name: {
            "title": figure.panels[name].title,
            "systems": {system: {"value": value} for system, value in one.values.items()},
            "curves": {system: [list(point) for point in points] for system, points in one.curves.items()},
            "paper": dict(figure.panels[name].paper),
        }
        for name, one in found.items()
    }
    known = {name: one.values for name, one in found.items()}
    return {
        "paper": figure.paper,
        "title": figure.title,
        "panels": panels,
        "claims": judge(figure.claims, known),
        "unsure": [row for unsure in figure.unsure for row in _again(figure, unsure, settings, known, note)],
    }


def _measured(figure: Figure, names: Iterable[str], settings: Settings, note: Note) -> dict[str, Found]:
    found = {}
    for name in names:
        found[name] = figure.measure(figure.panels[name], settings)
        note(f"  {name}: " + ", ".join(f"{s} {v if v is None else f'{v:.3g}'}" for s, v in found[name].values.items()))
    return found


def _again(figure: Figure, unsure: Unsure, settings: Settings, known: Mapping[str, Any], note: Note) -> list[Any]:
    names, rows = unsure.panels.split(), []
    claims = [claim for claim in figure.claims if set(claim.panel.split()) & set(names)]
    for value, changes in unsure.values.items():
        note(f"  {unsure.what}: {value}")
        found = _measured(figure, names, replace(settings, **changes), note)
        judged = judge(claims, {**known, **{name: one.values for name, one in found.items()}})
        rows += [{"constant": unsure.what, "value": value, **row} for row in judged]
    return rows


def judge(claims: Sequence[Claim], panels: Mapping[str, Mapping[str, float | None]]) -> list[dict[str, Any]]:
    """Of the claims whose panels were measured."""
    rows = []
    for claim in claims:
        if not set(claim.panel.split()) <= panels.keys():
            continue
        ratio = claim.ratio(panels)
        verdict = claim.verdict(ratio)
        rows.append(
            {
                "panel": claim.panel,
                "what": claim.what,
                "paper": claim.paper,
                "low": claim.low or None,
                "high": None if math.isinf(claim.high) else claim.high,
                "ratio": ratio,
                "verdict": verdict,
                "why": "" if verdict == "reproduced" else claim.why,
            }
        )
    return rows
