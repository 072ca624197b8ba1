"""How does a run of bench.peers look as a table and as a plot?

python -m bench peers.report bench/results/peers.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PARTS = ("interpreter", "import", "load", "compile", "first token")
# Okabe and Ito: told apart by every eye. Ours in one colour and its shades.
COLOURS = {  # by family
    **{"minivllm": "#0072b2", "minivllm-bf16": "#56b4e9"},
    **{"minivllm-8bit": "#cc79a7", "minivllm-compiled": "#009e73"},
}
OTHERS = {"vllm": "#d55e00", "llama.cpp": "#8c8c8c", "transformers": "#e69f00"}


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def middle(values: Sequence[float]) -> str:
    """ "207 (201 to 210)"."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{number(values[0])} (one run)"
    return f"{number(statistics.median(values))} ({number(min(values))} to {number(max(values))})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def markdown(record: Mapping[str, Any]) -> str:
    results, params = record["results"], record["params"]
    engines, workloads = results["engines"], results["workloads"]
    lines = [
        f"Tokens a second, medians of {params['rounds']} rounds in turns (lowest to highest); {params['model']} greedy "
        f"to a fixed length, {params['threads']} threads of {record['machine']['cpu']}, commit {record['commit']}, "
        f"{record['date'][:10]}, load {results['load_before']} when it began"
        + ("; --quick: fewer and shorter requests." if params["quick"] else "."),
        "",
        *table(
            ["engine", "", *(w["what"] for w in workloads.values())],
            [[name, e["what"], *(cell(w, name) for w in workloads.values())] for name, e in engines.items()],
        ),
        "",
        *ratios(results),
        "",
        *starts(results),
        "",
        *memory(results),
    ]
    if results["left_out"]:
        lines += ["", *(f"Left out: {name}, {reason}" for name, reason in results["left_out"].items())]
    return "\n".join(lines) + "\n"


def cell(workload: Mapping[str, Any], name: str) -> str:
    runs = workload["runs"].get(name)
    if runs is None:
        return "left out"
    return middle(runs["rates"]) or runs["why"]


def ratios(results: Mapping[str, Any]) -> list[str]:
    rows = []
    for row in results["ratios"]:
        wanted, found = row["at_least"], row["ratio"]
        verdict = "" if wanted is None or found is None else ("reached" if found >= wanted else "**not reached**")
        shown = f"no ratio: {row['why']}" if found is None else f"× {found:.2f}"
        what = results["workloads"][row["workload"]]["what"]
        rows.append([what, row["ours"], row["theirs"], shown, "" if wanted is None else f"{wanted}", verdict])
    return table(["workload", "ours", "against", "times as fast", "wanted", ""], rows) if rows else ["No ratios."]


def counted_starts(parts: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """The first start of several only warms the file cache."""
    return parts[1:] or parts


def starts(results: Mapping[str, Any]) -> list[str]:
    """Seconds from the command to the first token; medians of each part, so they need not add up to the total's."""
    rows = []
    for name, all_parts in results["start_seconds"].items():
        parts = counted_starts(all_parts)
        cells = [f"{statistics.median(p[part] for p in parts):.2f}" for part in PARTS]
        rows.append([name, middle([sum(p.values()) for p in parts]), *cells])
    return table(["seconds to the first token", "total", *PARTS], rows)


def memory(results: Mapping[str, Any]) -> list[str]:
    workloads = results["workloads"]
    rows = [
        [name, *(middle(w["runs"].get(name, {}).get("peak_mib", [])) for w in workloads.values())]
        for name in results["engines"]
        if name not in results["left_out"]
    ]
    return table(["peak MiB, all its processes", *(w["what"] for w in workloads.values())], rows)


# ------------------------------------------------------------------------------------------ the plot


def plot(record: Mapping[str, Any]) -> Any:
    """A panel a workload: a bar an engine from 0 to its median, with its runs as dots."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "minivllm"})
    from matplotlib.figure import Figure

    results = record["results"]
    engines = [name for name in results["engines"] if any(rates(w, name) for w in results["workloads"].values())]
    workloads = list(results["workloads"].values())
    columns = min(3, len(workloads))
    lines = -(-len(workloads) // columns)
    figure = Figure(figsize=(1.9 + 3.1 * columns, 0.9 + lines * (0.7 + 0.27 * len(engines))), layout="constrained")
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for axes, workload in zip(grid.flat, workloads, strict=False):
        panel(axes, workload, engines, results["engines"])
    for axes in list(grid.flat)[len(workloads) :]:
        axes.set_visible(False)
    figure.suptitle(conclusion(results), x=0.01, ha="left", fontsize=11, fontweight="bold")
    params = record["params"]
    said = (
        f"{params['model']}, {params['threads']} threads, {record['machine']['cpu']}, {params['rounds']} rounds; "
        f"dots: runs, bars: medians; commit {record['commit']}"
    )
    figure.supxlabel(said, x=0.01, ha="left", fontsize=6.5, color="#555555")
    return figure


def rates(workload: Mapping[str, Any], name: str) -> list[float]:
    return workload["runs"].get(name, {}).get("rates", [])


def panel(axes: Any, workload: Mapping[str, Any], engines: Sequence[str], known: Mapping[str, Any]) -> None:
    for y, name in enumerate(engines):
        found = rates(workload, name)
        if not found:
            axes.text(0, y, " -", va="center", fontsize=7, color="#8c8c8c")
            continue
        value = statistics.median(found)
        axes.barh(y, value, height=0.7, color=(COLOURS | OTHERS).get(known[name]["family"], "#8c8c8c"))
        axes.plot(found, [y] * len(found), "o", color="#222222", markersize=2.5)
        axes.annotate(
            number(value), (max(found), y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7
        )
    axes.set_title(workload["what"], fontsize=8.5, loc="left")
    axes.set_xlabel(f"{workload['counts']} tokens a second", fontsize=7.5)
    axes.set_yticks(range(len(engines)), engines, fontsize=7.5)
    axes.set_ylim(max(1, len(engines)) - 0.5, -0.5)
    axes.set_xlim(0, 1.18 * max([1, *(value for name in engines for value in rates(workload, name))]))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def conclusion(results: Mapping[str, Any]) -> str:
    """The title: the range of what the default reaches against each family."""
    families: dict[str, list[float]] = {}
    for row in results["ratios"]:
        if row["ours"] == "minivllm" and row["ratio"] is not None:
            families.setdefault(row["family"], []).append(row["ratio"])
    parts = [
        f"{min(r):.2g}" + (f" to {max(r):.2g}" if len(r) > 1 else "") + f" times as fast as {family}"
        for family, r in families.items()
    ]
    return "minivllm: " + "; ".join(parts) if parts else "runs differ too much for a ratio, or are too few"


def write(record: Mapping[str, Any], path: Path) -> list[Path]:
    """The record as JSON at `path`, and its table and plot beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n")
    path.with_suffix(".md").write_text(markdown(record))
    figure = plot(record)
    for image in (path.with_suffix(".png"), path.with_suffix(".svg")):
        metadata = {"Date": None} if image.suffix == ".svg" else None
        figure.savefig(image, dpi=160, bbox_inches="tight", pad_inches=0.1, metadata=metadata)
    return [path.with_suffix(suffix) for suffix in (".json", ".md", ".png", ".svg")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json", help="of bench.peers")
    for path in parser.parse_args().results:
        for written in write(json.loads(path.read_text()), path):
            print(written)


if __name__ == "__main__":
    main()
