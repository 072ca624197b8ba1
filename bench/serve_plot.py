"""The figure of a sweep by bench/serve.py: what clients wait for and what the server does, over the offered rate.

A point is the median of the repetitions, a bar their range. The dotted line is the knee, a dashed one an objective.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from goodput import median
from plots import number

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8c8c8c"  # Okabe and Ito


class Panel(NamedTuple):
    title: str
    unit: str
    curves: dict[str, str]  # metric -> label
    objective: str = ""  # of the SLO


QUANTILES = {"p50": "median", "p90": "p90", "p99": "p99"}
PANELS = (
    Panel("time to first token", "ms", {f"ttft_{q}": label for q, label in QUANTILES.items()}, "ttft"),
    Panel("time per output token", "ms", {f"tpot_{q}": label for q, label in QUANTILES.items()}, "tpot"),
    Panel("latency", "ms", {f"latency_{q}": label for q, label in QUANTILES.items()}, "latency"),
    Panel("requests answered", "a second", {"request_rate": "all", "goodput": "within the SLO"}),
)


def conclusion(record: dict[str, Any]) -> str:
    """The title: what the figure shows."""
    results = record["results"]
    knee = results["knee"]
    row = next(row for row in results["rows"] if row["rate"] == knee["rate"])
    parts = [f"{knee['says']} ({number(median(row, 'output_rate'))} output tokens/s)"]
    if "best_in_slo" in results:
        best = results["best_in_slo"]
        parts.append("the SLO never holds" if best is None else f"the SLO holds up to {best:g}/s")
    return f"{results['model']['id']}: {', '.join(parts)}"


def plot(record: dict[str, Any]) -> Any:
    """A matplotlib figure."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "minivllm"})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 6.0), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        draw(axes, panel, record)
    figure.suptitle(conclusion(record), x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.supxlabel(described(record), fontsize=6.5, color="#555555")
    return figure


def draw(axes: Any, panel: Panel, record: dict[str, Any]) -> None:
    results, slo = record["results"], record["params"]["objectives"]
    rows = [row for row in results["rows"] if all("latency_p50" in run for run in row["runs"])]
    rates = [row["rate"] for row in rows]
    for (metric, label), colour in zip(panel.curves.items(), (BLUE, GREEN, ORANGE), strict=False):
        if not all(metric in run for row in rows for run in row["runs"]):
            continue
        middle = [median(row, metric) for row in rows]
        spreads = [[run[metric] for run in row["runs"]] for row in rows]
        bars = [[m - min(values) for m, values in zip(middle, spreads, strict=True)]]
        bars.append([max(values) - m for m, values in zip(middle, spreads, strict=True)])
        axes.errorbar(rates, middle, yerr=bars, color=colour, marker="o", markersize=4, capsize=2, label=label)
    if panel.unit == "ms":
        axes.set_yscale("log")
        if panel.objective in slo:
            axes.axhline(1e3 * slo[panel.objective], color="#333333", linewidth=0.8, linestyle="--")
    else:
        axes.plot(rates, rates, color=GREY, linewidth=0.8, label="offered")
        axes.set_ylim(bottom=0)
    axes.axvline(results["knee"]["rate"], color="#333333", linewidth=0.8, linestyle=":")
    axes.set_title(panel.title, fontsize=9.5)
    axes.set_ylabel(panel.unit)
    axes.set_xlabel("requests offered a second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee", zorder=0)
    axes.legend(frameon=False, fontsize=7.5)


def described(record: dict[str, Any]) -> str:
    params, machine, rows = record["params"], record["machine"], record["results"]["rows"]
    return (
        f"{params['workload']} × {params['scale']:g}, {params['endpoint']}, {params['arrivals']} arrivals, "
        f"{rows[0]['num_requests']} to {rows[-1]['num_requests']} requests a rate, "
        f"{params['repetitions']} repetitions; "
        f"{machine.get('gpu') or machine['cpu']}, {machine['num_cores']} cores, commit {record['commit']}"
    )
