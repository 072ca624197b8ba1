"""Directives that show what was measured or recorded: numbers, tables, charts and widgets."""

from __future__ import annotations

import re
import statistics
from html import escape
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxRole

from bookext import batchrows, charts, guesses, records, replay, widgets
from bookext.base import EXPECTED, USED, Directive, html, picture
from chapters import harness

MORE_IS_BETTER = ("throughput", "kv_used", "running")  # of the metrics of bench/latency.py
SPOKEN = {  # the others are called as they are there
    "ttft_p50": "time to the first token, median",
    "itl_p99": "time between two tokens, 99th percentile",
    "host_ms": "host time a step",
    "computed": "tokens computed",
}
WORDS = directives.unchanged_required


class Num(SphinxRole):
    """{num}`source:path format`: a measured number, with where and when it was measured."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            source, shown = records.figure(self.text)
        except EXPECTED as e:
            return [], [self.inliner.reporter.error(f"num: {e}", line=self.lineno)]
        self.env.current_document.setdefault(USED, {})[source] = True
        told = escape(records.provenance(source))
        return [html(f'<span class="num" title="{told}">{shown}</span>')], []


class RunOutput(Directive):
    """`{run-output} ch02`: what the chapter's script printed when its results were committed."""

    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        source = self.arguments[0]
        self.used(source)
        text = f"$ {records.command(source)}\n" + (harness.RESULTS / f"{source}.txt").read_text()
        caption = nodes.paragraph("", records.provenance(source), classes=["caption"])
        return [self.box("run-output", nodes.literal_block(text, text, language="text"), caption)]


class Chart(Directive):
    """`{chart} source:rows`, with the caption (its conclusion) as content. `:y:` has `path = name (meaning)`, split by
    |. A path to a list of runs, or one that ends in .median or .min, has an interval from the lowest to the highest.

    `:log: xy` makes axes logarithmic. `:kind: bars` draws a bar a row, whose name is `:x:` (`key`: the row's own); its
    meaning may be `preset` or `engine`. `:beside: source-relative path` marks a second figure on each bar.
    """

    required_arguments = 1
    option_spec = {name: WORDS for name in ("x", "y", "x-label", "y-label", "kind", "log", "beside")}

    def build(self) -> list[nodes.Node]:
        rows = records.as_rows(self.picked(self.arguments[0]))
        if self.options.get("kind") == "bars":
            return self.bars(rows)
        xs = [records.pick(row, self.options["x"]) for row in rows]
        series = [self.series(rows, text) for text in self.options["y"].split("|")]
        labels = self.options["x-label"], self.options["y-label"]
        drawn = charts.line(xs, series, *labels, log=self.options.get("log", ""))
        head = [self.options["x-label"], *(s.name for s in series)]
        return self.figure(drawn, head, [[x, *(s.values[i] for s in series)] for i, x in enumerate(xs)])

    def bars(self, rows: list[Any]) -> list[nodes.Node]:
        rows = [row for row in rows if spread(row, split(self.options["y"])[0])]
        labels = [str(records.pick(row, self.options["x"])) for row in rows]
        series = self.series(rows, self.options["y"])
        source, unit = self.arguments[0].partition(":")[0], self.options["y-label"]
        found = records.pick(records.load(source), self.options["beside"]) if "beside" in self.options else {}
        beside = [found.get(label) for label in labels]
        head = [self.options.get("x-label", ""), series.name, *(["beside it"] if found else [])]
        cells = [
            [label, value, *(["–" if other is None else other] if found else [])]
            for label, value, other in zip(labels, series.values, beside, strict=True)
        ]
        return self.figure(charts.bars(labels, series, unit, beside if found else ()), head, cells)

    def figure(self, drawn: str, head: list[str], cells: list[list[Any]]) -> list[nodes.Node]:
        table = html(f"<details><summary>The numbers</summary>{charts.table(head, cells)}</details>")
        return [self.box("chart", picture(drawn), self.caption(), table)]

    def series(self, rows: list[Any], text: str) -> charts.Series:
        path, name, meaning = split(text)
        spreads = [spread(row, path) for row in rows]
        return charts.Series(name, meaning, *(list(column) for column in zip(*spreads, strict=True)))


def split(text: str) -> tuple[str, str, str]:
    """`path = name (meaning)`"""
    meanings = (*charts.MEANINGS, *charts.OF_LABEL)
    matched = re.fullmatch(r"\s*(\S+) = (.+?) \((\w+)\)\s*", text)
    if matched is None or matched[3] not in meanings:
        raise records.RecordError(f":y: is `path = name (meaning)`, meaning one of {meanings}; got {text!r}")
    return matched[1], matched[2], matched[3]


def spread(row: Any, path: str) -> tuple[float, float, float] | None:
    """(shown, lowest, highest); None for an empty list of runs."""
    value = records.pick(row, path)
    if isinstance(value, list):
        return (statistics.median(value), min(value), max(value)) if value else None
    stem, _, last = path.rpartition(".")
    around = [f"{stem}.{end}" if last in ("min", "median") else path for end in ("min", "max")]
    return float(value), *(float(records.pick(row, place)) for place in around)


class Ratios(Directive):
    """`{ratios} source:path`, a mapping of names to {ratio, low, high, verdict}: B / A for each. `:only:` names some,
    in their order, as `name = title`, split by |. `:unit:` says what the axis has."""

    required_arguments = 1
    option_spec = {"only": WORDS, "unit": WORDS}

    def build(self) -> list[nodes.Node]:
        found = self.picked(self.arguments[0])
        wanted = [part.strip().split(" = ") for part in self.options["only"].split("|")]
        shown = [ratio_of(found, name, title) for name, title in wanted if name in found]
        return [self.box("chart", picture(charts.waterfall(shown, self.options["unit"])), self.caption())]


class Ablation(Directive):
    """`{ablation} source`: rows of a result of bench/ablate.py, one bar a switch. `:kind:` path or alone; `:metric:`
    by which all are judged, or `own`: each by what it was made for, in a panel for each such metric.

    Bars of a path stand where the one before them ended if all ran the same workload, because then they multiply up.
    """

    required_arguments = 1
    option_spec = {"kind": WORDS, "metric": WORDS}

    def build(self) -> list[nodes.Node]:
        found = self.used(self.arguments[0])["results"]["rows"]
        rows = [row for row in found if row["kind"] == self.options["kind"]]
        if not rows:
            raise records.RecordError(f"no comparison of the kind {self.options['kind']}")
        metric = self.options["metric"]
        wholes = [row for row in found if row["kind"] == "whole"]
        if metric == "own":
            names = list(dict.fromkeys(row["metric"] for row in rows))
            panels = [self.panel([row for row in rows if row["metric"] == name], name) for name in names]
        else:
            panels = [self.panel(rows, metric, wholes)]
        head = ("switch", "from", "to", "ratio", "low", "high", "verdict", "workload", "metric")
        table = html(charts.table(head, [self.cells(row, metric) for row in rows]))
        return [self.box("chart", *panels, self.caption()), table]

    def panel(self, rows: list[Any], metric: str, wholes: list[Any] | None = None) -> nodes.Node:
        """wholes: of the path that the rows are; None: the rows are not all of a path."""
        bars = [ratio_of(row["ratios"], metric, row["switch"]) for row in rows]
        if wholes is not None and self.options["kind"] == "path" and len({row["workload"] for row in rows}) == 1:
            bars = stacked(bars) + [ratio_of(row["ratios"], metric, "together") for row in wholes]
        better = "more" if metric in MORE_IS_BETTER else "less"
        return picture(charts.waterfall(bars, f"{SPOKEN.get(metric, metric)}: times as much ({better} is better)"))

    def cells(self, row: dict[str, Any], metric: str) -> list[str]:
        name = row["metric"] if metric == "own" else metric
        ratio, changes = row["ratios"][name], row["changes"]
        ends = [", ".join(str(change[i]) for change in changes.values()) for i in (0, 1)]
        figures = [f"{ratio[key]:.2f}" for key in ("ratio", "low", "high")]
        return [row["switch"], *ends, *figures, ratio["verdict"] or within(ratio), row["workload"], name]


def within(ratio: dict[str, Any]) -> str:
    """What an interval that holds 1 leaves open."""
    return f"no difference found within {100 * (max(ratio['high'], 1 / ratio['low']) - 1):.2g} %"


def ratio_of(found: dict[str, Any], name: str, title: str) -> charts.Ratio:
    ratio = records.pick(found, name)
    return charts.Ratio(title, ratio["ratio"], ratio["low"], ratio["high"], ratio["verdict"])


def stacked(bars: list[charts.Ratio]) -> list[charts.Ratio]:
    reached, found = 1.0, []
    for bar in bars:
        found.append(bar._replace(starts=reached))
        reached *= bar.ratio
    return found


class Records(Directive):
    """`{records} source:rows`, each line of content `path format = title`: a table from committed results. `name?` is
    a value that only some rows have; `runs.*.name` the median over a row's runs. `:rows:` names the rows to show, of
    those that have names. Without content: every plain value of the rows.

    `:across: path = path format`: a column for each value at the first path, with the second of its row in it; rows
    that agree in the content's columns become one.
    """

    required_arguments = 1
    option_spec = {"rows": WORDS, "across": WORDS}

    def build(self) -> list[nodes.Node]:
        rows = records.as_rows(self.picked(self.arguments[0]))
        if "rows" in self.options:
            named = {row["key"]: row for row in rows}
            rows = [records.pick(named, name) for name in self.options["rows"].split()]
        columns = [line.rsplit(" = ", 1) for line in self.content if line.strip()] or plain(rows)
        cells = [[self.cell(row, column) for column, _ in columns] for row in rows]
        titles = [title for _, title in columns]
        if "across" in self.options:
            titles, cells = self.across(rows, titles, cells)
        return [html(charts.table(titles, cells))]

    def across(self, rows: list[Any], titles: list[str], cells: list[list[str]]) -> tuple[list[str], list[list[str]]]:
        by, shown = self.options["across"].split(" = ")
        names = list(dict.fromkeys(str(records.pick(row, by)) for row in rows))
        found: dict[tuple[str, ...], dict[str, str]] = {}
        for row, head in zip(rows, cells, strict=True):
            found.setdefault(tuple(head), {})[str(records.pick(row, by))] = self.cell(row, shown)
        return [*titles, *names], [[*head, *(line.get(name, "–") for name in names)] for head, line in found.items()]

    @staticmethod
    def cell(row: Any, column: str) -> str:
        place, _, form = column.rpartition(" ") if " " in column else (column, "", "")
        value = row.get(place[:-1]) if place.endswith("?") else records.pick(row, place)
        form = form if not isinstance(value, (str, bool)) else ""
        value = statistics.median(value) if isinstance(value, list) else value  # of a row's runs
        return "–" if value is None else format(value, form)  # a ratio to zero


def plain(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A column for each name under which some row has neither a list nor a mapping."""
    names = {name: value for row in rows for name, value in row.items() if not isinstance(value, (dict, list))}
    return [[f"{name}? {'.4g' if isinstance(value, float) else ''}", name] for name, value in names.items()]


class Measured(Directive):
    """`{measured} source`, over everything that needs these results, headings too. While they are missing, there is
    nothing: a page says what was measured."""

    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        for path in records.files(self.arguments[0]):
            self.env.note_dependency(str(path))
        if not records.exists(self.arguments[0]):
            return []
        return self.parse_text_to_nodes("\n".join(self.content), allow_section_headings=True)


class Rerun(Directive):
    """`{rerun} source`: where and when it was measured, and how to measure it here."""

    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        source = self.arguments[0]
        self.used(source)
        command = f"$ {records.command(source)}"
        block = nodes.literal_block(command, command, language="console")
        return [nodes.paragraph("", records.provenance(source), classes=["caption"]), block]


class Sources(Directive):
    """`{sources}`, at a page's end: where each of its numbers was measured."""

    def build(self) -> list[nodes.Node]:
        items = nodes.bullet_list()
        for source in self.env.current_document.get(USED, {}):
            where = nodes.paragraph("", f"{source}: {records.provenance(source)}; again by ")
            where += nodes.literal(text=records.command(source))
            items += nodes.list_item("", where)
        return [self.box("sources", nodes.paragraph("", "The numbers of this page were measured, not typed:"), items)]


class Widget(Directive):
    """`{widget} timeline stall-v0 stall-v1`: recorded runs of chapters/traces, which the reader steps through. The
    content is the caption, its conclusion. Options: `:start:` the first frame; and by kind

        timeline  runs of the same arrivals; `:names: V0 | V1`, `:seconds:` of playing, `:autoplay:` once, if seen
        blocks    the pool and the block tables of one run
        prefix    the same, with the queue of free blocks
        rows      the rows of the persistent batch, and what is written into them
        tokens    the text of a run that reported log-probabilities
        guesses   the text of a run with speculative decoding
        roofline  `source:rows` instead of a run. `:compute:` and `:memory:` are paths in the results to GFLOP/s and
                  GB/s; `:label:`, `:intensity:` (FLOP for each byte), `:mflops:` and `:ms:` are paths in a row;
                  `:unit:` stands behind a label
    """

    required_arguments = 1
    optional_arguments = 8
    final_argument_whitespace = False
    option_spec = {
        **{name: WORDS for name in ("names", "compute", "memory", "label", "unit", "intensity", "mflops", "ms")},
        "start": directives.nonnegative_int,
        "seconds": float,
        "autoplay": directives.flag,
    }

    def build(self) -> list[nodes.Node]:
        kind, *names = self.arguments
        if kind == "roofline":
            return [self.box("chart", picture(self.roofline(names[0])), self.caption())]
        runs = [replay.load(name) for name in names]
        for name in names:
            self.env.note_dependency(str(replay.TRACES / f"{name}.jsonl"))
        drawn = self.replayed(kind, names, runs)
        told = nodes.paragraph("", f"Recorded on {replay.provenance(runs[-1])}; again by ", classes=["caption"])
        told += nodes.literal(text=f"python -m chapters.record_traces {' '.join(names)}")
        return [self.box("chart", picture(drawn), self.caption(), told)]

    def replayed(self, kind: str, names: list[str], runs: list[Any]) -> str:
        start = self.options.get("start")
        if kind == "timeline":
            titles = [name.strip() for name in self.options.get("names", " | ".join(names)).split("|")]
            return widgets.timeline(runs, titles, self.options.get("seconds", 5.0), "autoplay" in self.options)
        (run,) = runs
        if kind in ("blocks", "prefix"):
            return widgets.blocks(run, start, f"mv-{kind}")
        if kind == "rows":
            return batchrows.draw(run, start)
        if kind == "tokens":
            return widgets.tokens(run, start)
        if kind == "guesses":
            return guesses.draw(run, start)
        names = "timeline, blocks, prefix, rows, tokens, guesses, roofline"
        raise ValueError(f"no widget is called {kind}; there are {names}")

    def roofline(self, place: str) -> str:
        source, rows = place.partition(":")[0], records.as_rows(self.picked(place))
        limits = self.used(source)["results"]
        roof = widgets.Roof(records.pick(limits, self.options["compute"]), records.pick(limits, self.options["memory"]))
        unit = self.options.get("unit", "")
        loads = []
        for row in rows:
            label, intensity, mflops, ms = (
                records.pick(row, self.options[name]) for name in ("label", "intensity", "mflops", "ms")
            )
            name = f"{label} {unit.removesuffix('s') if label == 1 else unit}".strip()
            loads.append(widgets.Load(name, intensity, mflops / ms))
        return widgets.roofline(roof, loads, self.options.get("start"))
