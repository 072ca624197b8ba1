"""Charts as SVG, drawn at build time from committed results; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 30, 46

# One colour for each meaning in the whole book (static/book.css has them).
MEANINGS = ("without", "with", "v0", "v1", "contiguous", "other")


def of_preset(name: str) -> str:
    """What a preset of minivllm/config.py means, for bars that are presets."""
    return name if name in MEANINGS else "contiguous"


class Series(NamedTuple):
    name: str
    meaning: str
    values: list[float]
    low: list[float]  # the interval around each; as values where there is none
    high: list[float]


def ticks(top: float) -> list[float]:
    """Four to six round numbers from 0 to at least top."""
    step = 10 ** math.floor(math.log10(top / 4)) if top > 0 else 1.0
    step *= next(factor for factor in (1, 2, 5, 10) if top / (step * factor) <= 5)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def line(xs: Sequence[float], series: Sequence[Series], x_label: str, y_label: str) -> str:
    marks = ticks(max(max(s.high) for s in series))

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / max(xs)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / marks[-1]

    parts = [_grid(marks, y, y_label)]
    shown = [value for i, value in enumerate(xs) if i == 0 or x(value) - x(xs[i - 1]) > 26]
    parts += [
        f'<text class="tick" x="{x(v):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{v:g}</text>' for v in shown
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    for s in series:
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, s.values, strict=True))
        parts.append(f'<g class="m-{s.meaning}"><polyline points="{points}" fill="none" stroke-width="2.5"/>')
        for a, b, low, high in zip(xs, s.values, s.low, s.high, strict=True):
            parts.append(
                f'<line x1="{x(a):.1f}" x2="{x(a):.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" stroke-width="1.5"/>'
            )
            parts.append(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="4"><title>{a:g}: {b:g}</title></circle>')
        parts.append(_name_at(s.name, x(xs[-1]) - 8, y(s.values[-1])) + "</g>")
    return _svg(parts, HEIGHT, f"{y_label} against {x_label}")


def bars(labels: Sequence[str], series: Series, unit: str) -> str:
    """Horizontal bars, one a row."""
    row, left = 30, 150
    height = TOP + row * len(labels) + 8
    top = max(series.high)

    def x(value: float) -> float:
        return left + (WIDTH - left - 70) * value / top

    parts = [f'<text class="label" x="{left}" y="{TOP - 12}">{escape(unit)}</text>']
    for i, (label, value, low, high) in enumerate(zip(labels, series.values, series.low, series.high, strict=True)):
        y = TOP + row * i
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>')
        meaning = of_preset(label) if series.meaning == "preset" else series.meaning
        parts.append(f'<g class="m-{meaning}">')
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{x(value) - left:.1f}" height="18" rx="2"/>')
        if high > low:
            at = f'x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y + 12}" y2="{y + 12}"'
            parts.append(f'<line class="interval" {at} stroke-width="2"/>')
        parts.append(f'</g><text class="tick" x="{x(high) + 6:.1f}" y="{y + 16}">{value:g}</text>')
    return _svg(parts, height, unit)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    titles = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    inner = f"<thead><tr>{titles}</tr></thead><tbody>{cells}</tbody>"
    return f'<div class="scroll" tabindex="0"><table class="docutils">{inner}</table></div>'


def _grid(marks: Sequence[float], y: Any, label: str) -> str:
    lines = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>'
        for v in marks
    )
    return lines + f'<text class="label" x="4" y="16">{escape(label)}</text>'


def _name_at(name: str, x: float, y: float) -> str:
    return f'<text class="name" x="{x:.1f}" y="{max(y - 12, 26):.1f}" text-anchor="end">{escape(name)}</text>'


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    return (
        f'<svg class="chart-svg" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
