"""From the JSON of bench/ablate.py: a plot as PNG and SVG, and a table in Markdown, beside it. ablate does it itself.
Of bench/serve.py's lines the last one is drawn (bench/serve_plot.py); what follows is of ablations.

    python bench/plots.py bench/results/ablate-v0-v1-auto.json

A dot is how many times better B is than A, right of 1 whatever the metric's own direction, with its 95 % interval. One
colour a meaning: better, worse, no difference shown. Several switches: one row each, one column a metric, and a ring
around the metric that the switch was made for. One switch: one row a metric.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from latency import METRICS

COLOURS = {"better": "#0072b2", "worse": "#d55e00", "": "#8c8c8c"}  # Okabe and Ito: told apart by every eye
MEANING = {"better": "better", "worse": "worse", "": "no difference shown"}
COLUMNS = ("throughput", "ttft_p50", "itl_p99", "stall_steps", "host_ms", "kv_used")  # of the plot of several switches
TABLE = ("throughput", "ttft_p50", "ttft_p99", "tpot_p50", "itl_p99", "itl_max", "latency_p50", "host_ms", "kv_used")
SHARES = ("kv_reserved", "kv_internal", "kv_external")  # of the pool, often 0: the two medians say more than a ratio
COUNTS = ("preemptions", "stall_steps")
WORTH_SAYING = 1.02  # in a title
KINDS = {"whole": "A → B", "path": "on the path", "alone": "off alone"}
Row = dict[str, Any]

# ---------------------------------------------------------------------------------------- text


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def change(row: Row) -> str:
    """ "prefix: none → hash", or the presets."""
    if len(row["changes"]) != 1:
        return row["switch"]
    ((before, after),) = row["changes"].values()
    return f"{row['switch']}: {shown(before)} → {shown(after)}"


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "auto" if value is None else str(value)


def medians(row: Row, metric: str) -> tuple[float, float]:
    a, b = (statistics.median(row["values"][side][metric]) for side in "ab")
    return a, b


def cell(row: Row, metric: str) -> str:
    """ "x 1.52 (1.48 to 1.56) better"; for counts, and where there is no ratio, the two medians."""
    ratio = row["ratios"].get(metric)
    if ratio is None:
        return ""
    mark = {"better": " ▲", "worse": " ▼", "": ""}[ratio["verdict"]]
    if ratio["ratio"] is None or metric in (*SHARES, *COUNTS):
        text = "{} → {}".format(*map(number, medians(row, metric)))
    else:
        text = f"× {ratio['ratio']:.3g} ({ratio['low']:.3g} to {ratio['high']:.3g})"
    return f"**{text}{mark}**" if metric == row["metric"] else text + mark


def says(row: Row) -> str:
    """What the row's own metric says of the switch."""
    wrong = row["outputs"]["num_different"]
    if wrong:
        return f"**OUTPUTS DIFFER ({wrong} of {row['outputs']['num']})**"
    return {"better": "wins", "worse": "**LOSES**", "": "no difference shown"}[row["verdict"]]


def markdown(record: dict[str, Any]) -> str:
    results, params = record["results"], record["params"]
    head = ["switch", "", "workload", *TABLE, *SHARES, *COUNTS, "its metric says"]
    lines = [
        f"B / A, {params['repetitions']} repetitions of A and B in turns, 95 % bootstrap interval; {params['model']} "
        f"in {params['dtype']}, {record['machine']['num_cores']} cores, commit {record['commit']}, "
        f"{record['date'][:10]}. "
        "▲ better, ▼ worse, unmarked: the interval holds 1. Bold: the metric that the switch was made for. "
        "Nothing is marked with fewer than 5 repetitions.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for row in results["rows"]:
        cells = [
            change(row),
            KINDS[row["kind"]],
            row["workload"],
            *(cell(row, m) for m in (*TABLE, *SHARES, *COUNTS)),
            says(row),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"Not compared: {why}" for why in results["skipped"])] if results["skipped"] else []
    return "\n".join(lines) + "\n"


def gain(row: Row, metric: str) -> tuple[float, float, float] | None:
    """(times better, low, high): above 1 is better for every metric."""
    ratio = row["ratios"].get(metric, {"ratio": None})
    if ratio["ratio"] is None:
        return None
    if METRICS[metric].higher_is_better:
        return ratio["ratio"], ratio["low"], ratio["high"]
    return 1 / ratio["ratio"], 1 / ratio["high"], 1 / ratio["low"]


def conclusion(record: dict[str, Any]) -> str:
    """The title: what the figure shows."""
    rows = record["results"]["rows"]
    if any(row["outputs"]["num_different"] for row in rows):
        return "OUTPUTS OF A AND B DIFFER: these times compare different work"
    if all(row["kind"] == "whole" for row in rows):
        return "\n".join(one_sentence(row) for row in rows[:4])
    whole = [one_sentence(row) for row in rows if row["kind"] == "whole"][:1]
    steps = [row for row in rows if row["kind"] == "path"] or [row for row in rows if row["kind"] == "alone"]
    parts = [f"{', '.join(found)} {word}" for word in ("better", "worse") if (found := effects(steps, word))]
    return "\n".join([*whole, ("; ".join(parts) or "no switch shows a difference") + ", each by its own metric"])


def effects(rows: Sequence[Row], word: str) -> list[str]:
    """Switches whose own metric says so, with by how much, where that is at least WORTH_SAYING."""
    found = []
    for row in rows:
        times = gain(row, row["metric"])
        if row["verdict"] == word and times is None:
            found.append(row["switch"])
        elif row["verdict"] == word and max(times[0], 1 / times[0]) >= WORTH_SAYING:
            found.append(f"{row['switch']} {max(times[0], 1 / times[0]):.3g}×")
    return found


def one_sentence(row: Row) -> str:
    found, metric = gain(row, row["metric"]), METRICS[row["metric"]]
    what = f"{change(row)}, {row['workload'].replace('_', ' ')}: {metric.what}"
    if found is None:
        a, b = medians(row, row["metric"])
        return f"{what} {number(a)} → {number(b)} {metric.unit}"
    if row["verdict"] == "":
        return f"{what} shows no difference"
    return f"{what} {max(found[0], 1 / found[0]):.3g}× {row['verdict']}"


# ---------------------------------------------------------------------------------------- drawing


def plot(record: dict[str, Any]) -> Any:
    """A matplotlib figure."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "minivllm"})
    rows = record["results"]["rows"]
    if not rows:
        raise SystemExit("the file holds no comparison")
    figure = plot_one(rows[0]) if len(rows) == 1 else plot_many(rows)
    figure.suptitle(conclusion(record), x=0.01, ha="left", fontsize=11, fontweight="bold")
    legend(figure, ring=len(rows) > 1, title=measured(record))
    return figure


def measured(record: dict[str, Any]) -> str:
    params, machine = record["params"], record["machine"]
    return (
        f"{params['model']}, {params['dtype']}, {machine.get('gpu') or machine['cpu']}, {params['repetitions']} paired "
        f"repetitions, {'arrivals by step' if params['virtual'] else 'open loop'}, {scales(record)}"
        f"bars: 95 % bootstrap; commit {record['commit']}"
    )


def scales(record: dict[str, Any]) -> str:
    found = sorted({row["shape"]["scale"] for row in record["results"]["rows"]})
    if found == [1.0]:
        return ""
    return f"lengths × {found[0]:.2g}{f' to {found[-1]:.2g}' if len(found) > 1 else ''}; "


def plot_one(row: Row) -> Any:
    from matplotlib.figure import Figure

    names = [name for name in row["ratios"] if name != "num_steps" and any(medians(row, name))]
    figure = Figure(figsize=(8.2, 1.7 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    forest(axes, [(row, name) for name in names])
    own = names.index(row["metric"]) if row["metric"] in names else None
    axes.set_yticks(range(len(names)), [METRICS[name].what for name in names])
    if own is not None:
        axes.get_yticklabels()[own].set_fontweight("bold")
    axes.set_xlabel("times better after the switch (log scale; 1 = equal)")
    right = axes.secondary_yaxis("right")
    labels = ["{} → {} {}".format(*map(number, medians(row, name)), METRICS[name].unit) for name in names]
    right.set_yticks(range(len(names)), labels)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)
    return figure


def plot_many(rows: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 + 1.75 * len(COLUMNS), 2.1 + 0.36 * len(rows)), layout="constrained")
    grid = figure.subplots(1, len(COLUMNS), sharey=True)
    for axes, name in zip(grid, COLUMNS, strict=True):
        forest(axes, [(row, name) for row in rows], ring=True)
        axes.set_title(METRICS[name].what.replace(", ", ",\n").replace(" (", "\n("), fontsize=8.5)
        if name in COUNTS:
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
        axes.set_xlabel(f"{METRICS[name].unit}, A → B" if name in COUNTS else "times better", fontsize=8)
    workloads = [row["workload"].replace("_", " ") for row in rows]
    labels = [f"{change(row)}  ({KINDS[row['kind']]})\n{load}" for row, load in zip(rows, workloads, strict=True)]
    grid[0].set_yticks(range(len(rows)), labels, fontsize=7.5)
    for y, (above, below) in enumerate(pairwise(rows)):
        if above["kind"] != below["kind"]:
            for axes in grid:
                axes.axhline(y + 0.5, color="#bbbbbb", linewidth=0.8, linestyle=":")
    return figure


def forest(axes: Any, cells: Sequence[tuple[Row, str]], ring: bool = False) -> None:
    """A line of (row, metric) each, from above."""
    axes.set_xscale("log")
    if not (ring and cells[0][1] in COUNTS):
        axes.axvline(1, color="#333333", linewidth=0.8, zorder=1)
    halo = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    for y, (row, metric) in enumerate(cells):
        if metric not in row["ratios"]:
            continue
        found, colour = gain(row, metric), COLOURS[row["ratios"][metric]["verdict"]]
        middle, low, high = found or (1, 1, 1)
        if found is None or (ring and metric in COUNTS):
            text = "{} → {}".format(*map(number, medians(row, metric)))
            axes.text(1, y, text, va="center", ha="center", fontsize=7, color=colour, bbox=halo, zorder=4)
            continue
        axes.plot([low, high], [y, y], color=colour, linewidth=2, solid_capstyle="butt", zorder=3)
        axes.plot(middle, y, "o", color=colour, markersize=5, zorder=4)
        if ring and row["metric"] == metric:
            axes.plot(middle, y, "o", color=colour, markersize=10, markerfacecolor="none", zorder=4)
        place = {"xytext": (0, 7 if ring else 6), "textcoords": "offset points", "ha": "center", "zorder": 2}
        axes.annotate(f"{middle:.2f}", (middle, y), fontsize=7, color=colour, bbox=halo, **place)
    limits(axes, [value for row, metric in cells for value in gain(row, metric) or ()])
    axes.set_ylim(len(cells) - 0.5, -0.7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color="#eeeeee", zorder=0)


def limits(axes: Any, values: Sequence[float]) -> None:
    """At least 0.8 to 1.25, so that noise does not look like an effect; ticks as plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min([0.8, *values]) / 1.06, max([1.25, *values]) * 1.06
    steps = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    ticks = [tick for tick in steps if low <= tick <= high]
    if high / low > 3:
        ticks = [tick for tick in ticks if tick not in (0.8, 1.25)]
    elif 0.5 in ticks or 2 in ticks:
        ticks.remove(1.25 if 0.5 in ticks else 0.8)  # too near to its neighbour in a narrow panel
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def legend(figure: Any, ring: bool, title: str) -> None:
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], color=colour, marker="o", linewidth=2, markersize=5, label=MEANING[verdict])
        for verdict, colour in COLOURS.items()
    ]
    if ring:
        what = "the metric that the switch was made for"
        marks.append(
            Line2D([], [], color="#333333", marker="o", markersize=9, markerfacecolor="none", linestyle="", label=what)
        )
    found = figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=7.5)
    found.set_title(title, {"size": 6.5})
    found.get_title().set_color("#555555")


# ---------------------------------------------------------------------------------------- the command


def write(path: Path) -> list[Path]:
    """The plot of one result file, beside it; of an ablation its table too."""
    record = last_record(path)
    if record["bench"] == "serve":
        from serve_plot import plot as plot_serve

        return save(plot_serve(record), path)
    table = path.with_suffix(".md")
    table.write_text(markdown(record))
    return [*save(plot(record), path), table]


def last_record(path: Path) -> dict[str, Any]:
    text = path.read_text()
    return json.loads(text.splitlines()[-1] if path.suffix == ".jsonl" else text)


def save(figure: Any, path: Path) -> list[Path]:
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for image in written:
        metadata = {"Date": None} if image.suffix == ".svg" else None
        figure.savefig(image, dpi=160, bbox_inches="tight", pad_inches=0.1, metadata=metadata)
    return written


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths:
        raise SystemExit("usage: python bench/plots.py RESULT.json ...")
    for path in paths:
        for written in write(path):
            print(written)


if __name__ == "__main__":
    main()
