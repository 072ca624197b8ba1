"""Charts as SVG, drawn at build time from committed results; colours come from the page's style sheet.

Each is drawn twice, for a desk and for a phone, so that its letters have one size on both; the style sheet shows one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

from bookext.frames import Frame, element, slot

WIDE, NARROW, HEIGHT = 640, 350, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 12, 28
MANY = 24  # points of a line: more have no dots, and round numbers below

# One colour for each meaning in the whole book (static/book.css has them).
MEANINGS = ("without", "with", "v0", "v1", "contiguous", "other", "better", "worse")


# The meaning of a bar by its name, for bars of several meanings: presets of minivllm/config.py, engines of bench/peers.
OF_LABEL: dict[str, Callable[[str], str]] = {
    "preset": lambda name: name if name in MEANINGS else "contiguous",
    "engine": lambda name: "v1" if name.startswith("minivllm") else "other",
}


class Series(NamedTuple):
    name: str
    meaning: str
    values: list[float]
    low: list[float]  # the interval around each; as values where there is none
    high: list[float]


def both(draw: Callable[[int], str]) -> str:
    """What `draw(width)` gives, for a desk and for a phone."""
    return f'<div class="on-desk">{draw(WIDE)}</div><div class="on-phone">{draw(NARROW)}</div>'


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# ---------------------------------------------------------------------------------------- scales


def ticks(top: float) -> list[float]:
    """Four to six round numbers from 0 to at least top."""
    step = 10 ** math.floor(math.log10(top / 4)) if top > 0 else 1.0
    step *= next(factor for factor in (1, 2, 5, 10) if top / (step * factor) <= 5)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around low .. high; with 2 and 5 between them where that gives few."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    marks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    start = max((mark for mark in marks if mark <= low * 1.001), default=marks[0])
    end = min((mark for mark in marks if mark >= high * 0.999), default=marks[-1])
    return [mark for mark in marks if start <= mark <= end]


class Scale(NamedTuple):
    """Numbers to places on the page."""

    marks: list[float]
    begin: float  # the place of the first mark
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        return self.begin + (self.end - self.begin) * self.share(value)

    def share(self, value: float) -> float:
        """0 at the first mark, 1 at the last."""
        of = math.log10 if self.is_log else float
        low, high = of(self.marks[0]), of(self.marks[-1])
        return (of(value) - low) / (high - low)


def scale(values: Sequence[float], begin: float, end: float, is_log: bool = False) -> Scale:
    if is_log:
        if min(values) <= 0:
            raise ValueError("a logarithmic axis has no place for 0")
        return Scale(log_ticks(min(values), max(values)), begin, end, True)
    return Scale(ticks(max(values)), begin, end)


# ---------------------------------------------------------------------------------------- lines


def line(
    xs: Sequence[float], series: Sequence[Series], x_label: str, y_label: str, log: str = "", tag: str = "mv-chart"
) -> str:
    """log: the axes that are logarithmic, of "xy". The reader steps through the xs."""
    share = x_scale(xs, log, 0, 1).share
    frames = [_point_frame(i, xs, series, x_label, y_label, log) for i in range(len(xs))]
    last = len(xs) - 1
    drawn = legend(series) + axis_label(y_label)
    drawn += both(lambda width: _line(width, xs, series, f"{y_label} against {x_label}", log, frames[last]))
    drawn += axis_label(x_label, "below")
    drawn += f'<p class="mv-said">{slot(frames[last], "said")}</p>'
    return element(tag, drawn, frames, "the chart's points", last, times=[share(x) for x in xs], nearest=True)


def x_scale(xs: Sequence[float], log: str, begin: float, end: float) -> Scale:
    """From 0 to the largest value; by a logarithmic axis from a round number to another."""
    return scale(xs, begin, end, is_log=True) if "x" in log else Scale([0.0, max(xs)], begin, end)


def _axes(width: int, xs: Sequence[float], series: Sequence[Series], log: str) -> tuple[Scale, Scale]:
    ys = [value for s in series for value in (*s.low, *s.high)]
    x = x_scale(xs, log, LEFT, width - RIGHT)
    return x, scale(ys, HEIGHT - BOTTOM, TOP, "y" in log)


def _point_frame(
    i: int, xs: Sequence[float], series: Sequence[Series], x_label: str, y_label: str, log: str
) -> dict[str, str]:
    values = [
        f"{s.name} {shown(s.values[i])}"
        + (f" ({shown(s.low[i])} to {shown(s.high[i])})" if s.high[i] > s.low[i] else "")
        for s in series
    ]
    frame = {"said": f"At {shown(xs[i])} ({x_label}), {y_label}: {'; '.join(values)}."}
    for width in (WIDE, NARROW):
        x, _ = _axes(width, xs, series, log)
        frame[f"cursor{width}@transform"] = f"translate({x(xs[i]):.1f})"
    return frame


def _line(
    width: int,
    xs: Sequence[float],
    series: Sequence[Series],
    title: str,
    log: str,
    frame: Frame,
) -> str:
    x, y = _axes(width, xs, series, log)
    round_ones = x.marks if x.is_log else ticks(max(xs))
    named = [mark for mark in round_ones if mark <= max(xs)] if len(xs) > MANY else xs
    parts = [grid(y, width), *x_marks(named, x), cursor(width, frame)]
    for number, s in enumerate(series):
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, s.values, strict=True))
        parts.append(f'<g class="m-{s.meaning}"><polyline points="{points}" fill="none" stroke-width="2.5"/>')
        for a, b, low, high in zip(xs, s.values, s.low, s.high, strict=True):
            if high > low:
                parts.append(f'<path class="spread" d="M{x(a):.1f} {y(low):.1f}V{y(high):.1f}"/>')
            if len(xs) <= MANY:
                parts.append(dot(number, x(a), y(b)))
        parts.append("</g>")
    return svg([*parts, plot(width)], width, HEIGHT, title, "mv-area")


def axis_label(text: str, place: str = "above") -> str:
    """What an axis shows. As a paragraph and not in the picture, so that it breaks where there is no room for it."""
    return f'<p class="axis-label {place}">{escape(text)}</p>'


def cursor(width: int, frame: Frame) -> str:
    """The line at the point that the reader is at."""
    place = frame[f"cursor{width}@transform"]
    return f'<g data-slot="cursor{width}" transform="{place}"><path class="cursor" d="M0 {TOP}V{HEIGHT - BOTTOM}"/></g>'


def plot(width: int) -> str:
    """What a click is looked for in."""
    size = f'width="{width - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
    return f'<rect class="mv-plot" x="{LEFT}" y="{TOP}" {size}/>'


def x_marks(xs: Sequence[float], x: Scale) -> list[str]:
    """Names of values, as far as there is room for them. One at the right edge stays inside."""
    parts, free = [], -math.inf
    for value in xs:
        half = 4 * len(shown(value))
        middle = min(x(value), x.end + RIGHT - half)
        if middle - half > free:
            parts.append(
                f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
                f"{shown(value)}</text>"
            )
            free = middle + half + 4
    return parts


def dot(number: int, x: float, y: float) -> str:
    """Each series has its own shape beside its own colour."""
    shapes = (
        "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
        "m-4 -4h8v8h-8z",
        "m0 -5.5l5 9h-10z",
        "m0 -5.5l5 5.5l-5 5.5l-5 -5.5z",
    )
    return f'<path class="dot" d="M{x:.1f} {y:.1f}{shapes[number % len(shapes)]}"/>'


def legend(series: Sequence[Series]) -> str:
    keys = "".join(
        f'<span class="m-{s.meaning}"><svg viewBox="0 0 12 12" aria-hidden="true">{dot(i, 6, 6)}</svg>'
        f"{escape(s.name)}</span>"
        for i, s in enumerate(series)
    )
    return f'<p class="legend">{keys}</p>'


def grid(y: Scale, width: int) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{shown(v)}</text>'
        for v in y.marks
    )


# ---------------------------------------------------------------------------------------- bars


def bars(labels: Sequence[str], series: Series, unit: str, beside: Sequence[float | None] = ()) -> str:
    """Horizontal bars, one a row. beside: a second figure for each, where there is one, as a mark (a paper's)."""
    return axis_label(unit) + both(lambda width: _bars(width, labels, series, unit, beside))


def _bars(width: int, labels: Sequence[str], series: Series, unit: str, beside: Sequence[float | None]) -> str:
    needed, most = 20 + 7.5 * max(map(len, labels)), 170 if width == WIDE else 120
    is_above = needed > most  # then each name stands over its bar
    row, left, down = (48, 8, 18) if is_above else (30, needed, 0)
    height = TOP + row * len(labels) + 8
    x = Scale([0.0, max([*series.high, *(b for b in beside if b)])], left, width - 58)
    parts = []
    for i, (label, value, low, high) in enumerate(zip(labels, series.values, series.low, series.high, strict=True)):
        y = TOP + row * i + down
        place = f'x="{left}" y="{y - 2}"' if is_above else f'x="{left - 8:g}" y="{y + 16}" text-anchor="end"'
        parts.append(f'<text class="tick" {place}>{escape(label)}</text>')
        meaning = OF_LABEL[series.meaning](label) if series.meaning in OF_LABEL else series.meaning
        parts.append(f'<g class="m-{meaning}">')
        parts.append(f'<rect x="{left:g}" y="{y + 3}" width="{x(value) - left:.1f}" height="18" rx="2"/>')
        if high > low:
            parts.append(f'<path class="interval" d="M{x(low):.1f} {y + 12}H{x(high):.1f}"/>')
        parts.append("</g>")
        end = x(high)
        if i < len(beside) and (other := beside[i]) is not None:
            parts.append(f'<path class="beside" d="M{x(other):.1f} {y}v24"><title>{other:g}</title></path>')
            end = max(end, x(other))
        parts.append(f'<text class="tick" x="{end + 6:.1f}" y="{y + 16}">{shown(value)}</text>')
    return svg(parts, width, height, unit)


# ---------------------------------------------------------------------------------------- from A to B


class Ratio(NamedTuple):
    """One comparison: B / A with its interval. `starts` is where its bar begins: 1, or what came before it."""

    name: str
    ratio: float
    low: float
    high: float
    verdict: str  # better | worse | "" where the interval holds 1
    starts: float = 1.0


RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 10)  # that an axis may name


def waterfall(ratios: Sequence[Ratio], unit: str) -> str:
    """Ratios on a logarithmic axis, so that steps which multiply up are lengths that add up."""
    return axis_label(unit) + both(lambda width: _waterfall(width, ratios, unit))


def _waterfall(width: int, ratios: Sequence[Ratio], unit: str) -> str:
    needed = 24 + 7.5 * max(len(r.name) for r in ratios)
    is_above = needed > (200 if width == WIDE else 120)  # then each name stands over its bar
    row, left, down = (50, 14, 18) if is_above else (32, needed, 0)
    height = TOP + row * len(ratios) + 34
    ends = [r.starts * value for r in ratios for value in (1.0, r.low, r.high)]
    x = Scale([min(ends) / 1.04, max(ends) * 1.04], left, width - 62, is_log=True)
    marks = [mark for mark in RATIOS if x.marks[0] <= mark <= x.marks[1]]
    parts, free = [], -math.inf
    for mark in sorted(marks, key=lambda m: (m != 1, m)):
        at = x(mark)
        kind = "one" if mark == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - 30}"/>')
        if mark == 1 or (at > free and abs(at - x(1)) > 44):
            parts.append(f'<text class="tick" x="{at:.1f}" y="{height - 12}" text-anchor="middle">{mark:g} ×</text>')
            free = at + 44 if mark != 1 else free
    for i, r in enumerate(ratios):
        y, begin, end = TOP + row * i + down, x(r.starts), x(r.starts * r.ratio)
        place = f'x="4" y="{y + 2}"' if is_above else f'x="{left - 8:g}" y="{y + 20}" text-anchor="end"'
        parts.append(f'<text class="tick" {place}>{escape(r.name)}</text>')
        parts.append(f'<g class="m-{r.verdict or "other"}"><rect x="{min(begin, end):.1f}" y="{y + 7}" ')
        parts.append(f'width="{max(abs(end - begin), 1):.1f}" height="18" rx="2"/>')
        parts.append(f'<path class="interval" d="M{x(r.starts * r.low):.1f} {y + 16}H{x(r.starts * r.high):.1f}"/></g>')
        right = max(begin, end, x(r.starts * r.high))
        parts.append(f'<text class="tick" x="{right + 6:.1f}" y="{y + 20}">{r.ratio:.2f} ×</text>')
    return svg(parts, width, height, unit)


# ---------------------------------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """`rows` as HTML; floats to six digits."""
    return markup_table(head, [[escape(f"{c:.6g}" if isinstance(c, float) else str(c)) for c in row] for row in rows])


def markup_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are HTML, without the ending tags that HTML does not ask for. The search index takes the tags
    out: a space keeps two cells' words apart."""
    cells = "".join("<tr>" + " ".join(f"<td>{cell}" for cell in row) + " " for row in rows)
    titles = " ".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    inner = f"<thead><tr>{titles} </tr></thead><tbody>{cells}</tbody>"
    return f'<div class="scroll" tabindex="0"><table class="docutils">{inner}</table></div>'


def svg(parts: Sequence[str], width: int, height: float, title: str, look: str = "") -> str:
    return (
        f'<svg class="chart-svg {look}" viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(title)}">'
        f"{' '.join(parts)}</svg>"  # a space keeps two texts' words apart in the search index
    )
