"""How does a run of ablate look as a plot (PNG and SVG) and as a table in Markdown?

Both go beside the JSON of bench/ablate.py, which draws them itself at its end. Of bench/serve.py's lines the last one
is drawn (bench/serve_plot.py); what follows is of ablations.

    python -m bench plots bench/results/ablate-v0-v1-auto.json

A mark is how many times better B is than A, right of 1 whatever the metric's own direction, with its 95 % interval. One
colour a meaning: better, worse, no difference found. No panel has more than one metric. One switch: one row a metric.
Several switches, each on its own workload: a panel for each metric, with the switches that were made for it. A path on
one workload: a panel for each of three metrics and for what else a switch was made for, with all switches; a bar begins
where the one above it ended, and a ring stands where the switch was made for the panel's metric.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latency import METRICS, Ratio, undecided_within

from minivllm.simulate.devices import DEFAULT_DEVICE

COLOURS = {"better": "#0072b2", "worse": "#d55e00", "": "#8c8c8c"}  # Okabe and Ito: told apart by every eye
MEANING = {"better": "better", "worse": "worse", "": "no difference found"}
PANELS = ("throughput", "ttft_p50", "itl_p99")  # of a path on one workload, always
TABLE = (
    "throughput",
    "ttft_p50",
    "ttft_p99",
    "tpot_p50",
    "itl_p99",
    "itl_max",
    "latency_p50",
    "host_ms",
    "cpu_us",
    "kv_used",
    "computed",
)
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
    return {"better": "wins", "worse": "**LOSES**", "": no_difference(row, row["metric"])}[row["verdict"]]


def no_difference(row: Row, metric: str) -> str:
    """Of a ratio whose interval holds 1, or of too few repetitions."""
    ratio = row["ratios"][metric]
    if ratio["ratio"] is None or not ratio["low"] <= 1 <= ratio["high"]:
        return "no difference shown"
    within = undecided_within(Ratio(ratio["ratio"], ratio["low"], ratio["high"]))
    return f"no difference found within {100 * within:.2g} %"


def repetitions(record: dict[str, Any]) -> str:
    """ "10", or "10 to 40" where the intervals decided; "0" where nothing could be compared."""
    counts = {row.get("repetitions", record["params"]["repetitions"]) for row in record["results"]["rows"]}
    found = sorted(counts) or [0]
    return f"{found[0]} to {found[-1]}" if len(found) > 1 else str(found[0])


def where(record: dict[str, Any]) -> str:
    """What ran the model, and what the host where that is another: a simulated device takes no part of this machine."""
    own = record["machine"].get("gpu") or record["machine"]["cpu"]
    config = next((row["configs"]["b"] for row in record["results"]["rows"] if "configs" in row), {})
    if config.get("executor.kind") != "simulated":
        return own
    return f"a simulated {config['executor.device'] or DEFAULT_DEVICE}, host {own}"


def markdown(record: dict[str, Any]) -> str:
    results, params = record["results"], record["params"]
    head = ["switch", "", "workload", *TABLE, *SHARES, *COUNTS, "its metric says"]
    lines = [
        f"B / A, {repetitions(record)} repetitions of A and B in turns, 95 % bootstrap interval; {params['model']} "
        f"in {params['dtype']}, {where(record)}, {record['machine']['num_cores']} cores, commit {record['commit']}, "
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
    return "\n".join(
        [*whole, ("; ".join(parts) or "no switch makes a difference that was found") + ", each by its own metric"]
    )


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
        return f"{what}: {no_difference(row, row['metric'])}"
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
    is_path = {row["kind"] for row in rows} <= {"whole", "path"} and len({row["workload"] for row in rows}) == 1
    figure = plot_one(rows[0]) if len(rows) == 1 else plot_path(rows) if is_path else plot_own(rows)
    figure.suptitle(conclusion(record), x=0.01, ha="left", fontsize=11, fontweight="bold")
    legend(figure, ring=is_path and len(rows) > 1, title=measured(record))
    return figure


def measured(record: dict[str, Any]) -> str:
    params = record["params"]
    return (
        f"{params['model']}, {params['dtype']}, {where(record)}, {repetitions(record)} paired "
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


def plot_own(rows: Sequence[Row]) -> Any:
    """A panel a metric, one above the other, each with the switches that were made for it."""
    from matplotlib.figure import Figure

    names = [name for name in METRICS if any(row["metric"] == name for row in rows)]
    groups = [[row for row in rows if row["metric"] == name] for name in names]
    heights = [0.9 + 0.42 * len(group) for group in groups]
    figure = Figure(figsize=(8.2, 1.2 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(names), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, name, group in zip(panels, names, groups, strict=True):
        forest(axes, [(row, name) for row in group])
        axes.set_title(METRICS[name].what, fontsize=9, loc="left")
        loads = [row["workload"].replace("_", " ") for row in group]
        labels = [f"{change(row)}  ({KINDS[row['kind']]})\n{load}" for row, load in zip(group, loads, strict=True)]
        axes.set_yticks(range(len(group)), labels, fontsize=7.5)
        axes.set_xlabel("times better (log scale; 1 = equal)", fontsize=7.5)
    return figure


def plot_path(rows: Sequence[Row]) -> Any:
    """A panel a metric, side by side, each with all switches: a bar begins where the one above it ended."""
    from matplotlib.figure import Figure

    whole = [row for row in rows if row["kind"] == "whole"]
    steps = [row for row in rows if row["kind"] == "path"]
    own = {row["metric"] for row in steps}
    names = [name for name in METRICS if name in PANELS or (name in own and name not in COUNTS)]
    figure = Figure(figsize=(2.4 + 2.3 * len(names), 1.9 + 0.36 * len(rows)), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True)
    for axes, name in zip(panels, names, strict=True):
        stairs(axes, steps, whole, name)
        axes.set_title(METRICS[name].what.replace(", ", ",\n").replace(" (", "\n("), fontsize=8.5)
        axes.set_xlabel("times better", fontsize=8)
    panels[0].set_yticks(range(len(rows)), [*map(change, steps), *("together" for _ in whole)], fontsize=7.5)
    return figure


def stairs(axes: Any, steps: Sequence[Row], whole: Sequence[Row], metric: str) -> None:
    axes.set_xscale("log")
    axes.axvline(1, color="#333333", linewidth=0.8, zorder=1)
    reached, ends = 1.0, []
    for y, row in enumerate([*steps, *whole]):
        found = gain(row, metric)
        if found is None:
            continue
        middle, low, high = found
        begin = reached if row["kind"] == "path" else 1.0
        colour = COLOURS[row["ratios"][metric]["verdict"]]
        left, right = sorted((begin, begin * middle))
        axes.barh(y, right - left, left=left, height=0.55, color=colour, alpha=0.55, zorder=2)
        axes.plot([begin * low, begin * high], [y, y], color=colour, linewidth=1.6, solid_capstyle="butt", zorder=3)
        if row["kind"] == "path" and row["metric"] == metric:
            ring = {"markersize": 9, "markerfacecolor": "none", "zorder": 4}
            axes.plot(begin * middle, y, "o", color=colour, **ring)
        place = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center", "zorder": 5}
        axes.annotate(f"{middle:.2f}", (begin * middle, y), fontsize=7, color=colour, **place)
        ends += [begin, begin * low, begin * high]
        reached = begin * middle if row["kind"] == "path" else reached
    if whole:
        axes.axhline(len(steps) - 0.5, color="#bbbbbb", linewidth=0.8, linestyle=":")
    settle(axes, ends, len(steps) + len(whole))


def forest(axes: Any, cells: Sequence[tuple[Row, str]]) -> None:
    """A line of (row, metric) each, from above."""
    axes.set_xscale("log")
    axes.axvline(1, color="#333333", linewidth=0.8, zorder=1)
    halo = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    for y, (row, metric) in enumerate(cells):
        if metric not in row["ratios"]:
            continue
        found, colour = gain(row, metric), COLOURS[row["ratios"][metric]["verdict"]]
        middle, low, high = found or (1, 1, 1)
        if found is None:
            text = "{} → {}".format(*map(number, medians(row, metric)))
            axes.text(1, y, text, va="center", ha="center", fontsize=7, color=colour, bbox=halo, zorder=4)
            continue
        axes.plot([low, high], [y, y], color=colour, linewidth=2, solid_capstyle="butt", zorder=3)
        axes.plot(middle, y, "o", color=colour, markersize=5, zorder=4)
        place = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "zorder": 2}
        axes.annotate(f"{middle:.2f}", (middle, y), fontsize=7, color=colour, bbox=halo, **place)
    settle(axes, [value for row, metric in cells for value in gain(row, metric) or ()], len(cells))


def settle(axes: Any, values: Sequence[float], num_lines: int) -> None:
    limits(axes, values)
    axes.set_ylim(num_lines - 0.5, -0.7)
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json", help="of ablate, or of serve")
    for path in parser.parse_args().results:
        for written in write(path):
            print(written)


if __name__ == "__main__":
    main()
