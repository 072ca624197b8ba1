"""A paper's figure, drawn again: what was measured here, and beside it what the paper says, with the verdict.

Above, a panel each: curves with the limit that makes a rate, or bars with the paper's own figures as marks. Below, a
line for each claim: the paper's range as a band, ours as a dot in its verdict's colour; rings are ours with other
values of a constant that the paper does not say.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paper_figures import Figure

# Okabe and Ito: told apart by every eye
SYSTEMS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c8c8c", "#e69f00")
VERDICTS = {"reproduced": "#009e73", "partly": "#e69f00", "not": "#d55e00"}
BAND, INK = "#c9d6e2", "#333333"
COLUMNS = 3  # of panels
FAR = (1e-6, 1e6)  # ends of a band that has none


def plot(record: Mapping[str, Any], figure: Figure) -> Any:
    """A matplotlib figure of a line of bench/results/papers.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "minivllm"})
    matplotlib.rcParams["font.sans-serif"] = ["DejaVu Sans"]  # each text names the whole list, in kilobytes
    from matplotlib.figure import Figure as Picture

    results = record["results"]
    panels, claims = results["panels"], results["claims"]
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    heights = rows * _height(panels, rows), 0.7 + 0.32 * len(claims)
    picture = Picture(figsize=(9.2, 0.5 + sum(heights)), layout="constrained", facecolor="white")
    above, below = picture.subfigures(2, 1, height_ratios=heights)
    grid = above.add_gridspec(rows, columns)
    systems = list(dict.fromkeys(name for panel in panels.values() for name in panel["curves"] or panel["systems"]))
    colours = dict(zip(systems, SYSTEMS, strict=False))
    for i, (name, panel) in enumerate(panels.items()):
        axes = above.add_subplot(grid[i // columns, i % columns])
        axes.set_title(f"{name}  {panel['title']}", fontsize=8.5, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        if panel["curves"]:
            _curves(axes, panel, figure, colours, record["params"]["limit"])
            if i == 0:
                axes.legend(frameon=False, fontsize=7)
        else:
            _bars(axes, panel, figure.unit, colours)
    _claims(below.add_subplot(), claims, results["unsure"])
    picture.suptitle(f"{results['title']}. {results['paper']}", x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    return picture


_NUMBER = re.compile(r"-?\d+\.\d{2,}")


def _shortened(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def save(picture: Any, path: Path) -> None:
    """As SVG of two thirds of the bytes: several of them are on a page."""
    text = io.StringIO()
    picture.savefig(text, format="svg", metadata={"Date": None})
    kept = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text.getvalue(), flags=re.DOTALL)
    kept = re.sub(r"<[^>]*>", lambda tag: _NUMBER.sub(_shortened, tag[0]), kept)  # places, and not what is written
    path.write_text(re.sub(r"\n\s*", "\n", kept))


def _height(panels: Mapping[str, Any], rows: int) -> float:
    if any(panel["curves"] for panel in panels.values()):
        return 2.3 if rows > 1 else 2.6
    return 0.8 + 0.3 * max(len(panel["systems"]) for panel in panels.values())


def _curves(axes: Any, panel: Mapping[str, Any], figure: Figure, colours: Mapping[str, str], limit: float) -> None:
    """Latencies far above the limit are cut off: the paper's axis ends soon above it, too."""
    for system, points in panel["curves"].items():
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colours[system], marker="o", markersize=3, linewidth=1.2, label=system)
    if figure.logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.axhline(limit, color=INK, linewidth=0.8, linestyle="--")
        axes.set_ylim(0, 2 * limit)
        most = max((value["value"] or 0 for value in panel["systems"].values()), default=0)
        axes.set_xlim(0, 1.15 * most if most else None)
        axes.locator_params(axis="x", nbins=4)
    axes.set_xlabel(figure.axes[0], fontsize=7.5)
    axes.set_ylabel(figure.axes[1], fontsize=7.5)
    axes.locator_params(axis="y", nbins=4)


def _bars(axes: Any, panel: Mapping[str, Any], unit: str, colours: Mapping[str, str]) -> None:
    """A mark is the paper's figure."""
    names = list(panel["systems"])
    values = [panel["systems"][name]["value"] or 0.0 for name in names]
    axes.barh(range(len(names)), values, height=0.6, color=[colours[name] for name in names], alpha=0.75)
    for y, (name, value) in enumerate(zip(names, values, strict=True)):
        theirs = panel["paper"].get(name)
        if theirs is not None:
            axes.plot([theirs, theirs], [y - 0.42, y + 0.42], color=INK, linewidth=2)
        told = f" {value:.3g}" + (f"  (paper {theirs:g})" if theirs is not None else "")
        axes.text(max(value, theirs or 0), y, told, va="center", fontsize=7.5)
    axes.set_xlim(0, 1.45 * max([*values, *panel["paper"].values()]))
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xlabel(unit, fontsize=7.5)


def _claims(axes: Any, claims: Sequence[Mapping[str, Any]], unsure: Sequence[Mapping[str, Any]]) -> None:
    axes.set_xscale("log")
    ends, told = [], []
    for y, claim in enumerate(claims):
        low, high = claim["low"] or FAR[0], claim["high"] or FAR[1]
        low, high = min(low, high / 1.03), max(high, low * 1.03)
        axes.barh(y, high - low, left=low, height=0.6, color=BAND, zorder=1)
        others = [row["ratio"] for row in unsure if _is_of(row, claim) and row["ratio"]]
        axes.plot(others, [y] * len(others), "o", color=INK, markersize=4.5, markerfacecolor="none", zorder=3)
        ours, verdict = claim["ratio"], claim["verdict"]
        colour = VERDICTS[verdict.partition(":")[0]]
        if ours:
            axes.plot(ours, y, "o", color=colour, markersize=6, zorder=4)
        told.append(f"{ours:.3g}, paper {claim['paper']}: {verdict}" if ours else verdict)
        ends += [*(end for end in (low, high) if end not in FAR), *others, *([ours] if ours else [])]
    axes.set_yticks(range(len(claims)), [f"{claim['panel']}  {claim['what']}" for claim in claims], fontsize=7.5)
    axes.set_ylim(len(claims) - 0.4, -0.6)
    _ticks(axes, min(ends) / 1.1, max(ends) * 1.1)
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(claims)), told, fontsize=7.5)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)
    axes.spines[["top", "right"]].set_visible(False)
    rings = "; rings: ours with other constants" if unsure else ""
    axes.set_xlabel(f"band: the paper's; dot: ours{rings} (log scale)", fontsize=7.5)


def _is_of(row: Mapping[str, Any], claim: Mapping[str, Any]) -> bool:
    return (row["panel"], row["what"]) == (claim["panel"], claim["what"])


def _ticks(axes: Any, low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    round_ones = [factor * 10.0**power for power in range(-3, 5) for factor in (1, 2, 5)]
    marks = [mark for mark in round_ones if low <= mark <= high]
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(marks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{mark:g}" for mark in marks])
