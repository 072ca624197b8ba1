"""Directives that show whatever runs are committed, newest first and by machine: a new file needs no new page."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterator
from functools import cache
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives

from bench.peers import report
from bench.peers.workloads import WORKLOADS
from bookext import charts, quotes, records
from bookext.base import Directive, html


class Runs(Directive):
    """`{runs} bench/host`: the content once for each machine's newest run, the newest machine first; in it the source's
    name stands for that run. Each ends with where it was measured and how to measure it again.

    `:having:` a path in the results, leaves out runs that lack it. `:each:` a path in the record (`params.core`), shows
    the newest run with each value there.
    """

    required_arguments = 1
    option_spec = {"having": directives.unchanged_required, "each": directives.unchanged_required}

    def build(self) -> list[nodes.Node]:
        source = self.arguments[0]
        found = [run for run in records.runs(source) if records.has(run, self.options.get("having", ""))]
        if not found:
            raise records.RecordError(f"{source}: no run has {self.options['having']}")
        machines = records.by_machine(found)
        parts: list[nodes.Node] = []
        for machine, runs in machines.items():
            if len(machines) > 1:
                parts.append(nodes.paragraph("", f"On {machine}:", classes=["machine"]))
            for run in self.wanted(runs):
                parts += self.parsed(self.named(source, run))
        return parts

    def wanted(self, runs: list[records.Run]) -> list[records.Run]:
        """The newest, or the newest with each value."""
        if "each" not in self.options:
            return runs[:1]
        found: dict[str, records.Run] = {}
        for run in runs:
            found.setdefault(json.dumps(records.pick(run.record, self.options["each"])), run)
        return list(found.values())

    def named(self, source: str, run: records.Run) -> list[str]:
        name = re.compile(re.escape(source) + r"(?![\w\[-])")
        lines = [name.sub(lambda _: run.source, line) for line in self.content]
        return [*lines, "", f"```{{rerun}} {run.source}", "```"]


# ---------------------------------------------------------------------------------------- peers


class Peers(Directive):
    """`{peers}`: all runs of bench/peers that are committed, a section for each machine. Pictures are drawn of the
    newest run in which a family of engines met a workload; a machine's newest has its tables too, folded."""

    has_content = False

    def build(self) -> list[nodes.Node]:
        found = [run for source in records.committed("peers*.json") for run in records.runs(source)]
        if not found:
            raise records.RecordError("bench/results/ has no peers*.json")
        parts: list[nodes.Node] = []
        for machine, runs in records.by_machine(found).items():
            parts += self.parse_text_to_nodes("\n".join(on_machine(machine, runs)), allow_section_headings=True)
        return parts


def on_machine(machine: str, runs: list[records.Run]) -> Iterator[str]:
    """The section of one machine, as Markdown. runs: the newest first."""
    best = newest(runs)
    yield from (f"## On {machine}", "", "How many times as fast ours is, each pair by its newest run:", "")
    yield from block(charts.table(*ratios(best)))
    yield from ("**Where it loses** on this machine:", "", *(f"- {loss}" for loss in losses(best, runs)), "")
    drawn: set[tuple[str, str]] = set()
    for run in runs:
        yield from (f"### {run.source.removeprefix('bench/')}, {run.date}", "")
        before = len(drawn)
        for name in run.record["results"]["workloads"]:
            fresh = {(name, family) for family in families(run, name)} - drawn
            drawn |= fresh
            if fresh:
                yield from chart(run, name)
        figures = f"`{run.source.replace('/', '/results/')}.md`"
        if len(drawn) == before:
            yield from (f"All was measured again since; the figures: {figures}.", "")
            continue
        if run is runs[0]:
            yield from block("<details><summary>All figures of this run</summary>")
            yield from (*light(report.markdown(run.record)), "", *block("</details>"))
        else:
            yield from (f"All figures of this run: {figures}.", "")
        yield from (f"```{{rerun}} {run.source}", "```", "")


def light(text: str) -> Iterator[str]:
    """Markdown with its tables as HTML that takes half of the bytes."""
    for is_table, lines in itertools.groupby(text.splitlines(), lambda line: line.startswith("|")):
        if not is_table:
            yield from lines
            continue
        head, _, *rows = ([cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines)
        yield from block(charts.table(head, rows))


def block(markup: str) -> tuple[str, ...]:
    return "```{raw} html", markup, "```", ""


def chart(run: records.Run, name: str) -> Iterator[str]:
    counts = run.record["results"]["workloads"][name]["counts"]
    unit = {"input": "prompt tokens", "decode": "tokens after the first"}.get(counts, "output tokens")
    told = [
        f"`{row['ours']}` {row['ratio']:.2f} times as fast as `{row['theirs']}`"
        for row in run.record["results"]["ratios"]
        if row["workload"] == name and row["ratio"] is not None
    ]
    yield f":::{{chart}} {run.source}:workloads.{name}.runs"
    yield from (":kind: bars", ":x: key", ":y: rates = tokens a second (engine)")
    yield from (f":y-label: {what(run, name)}: {unit} a second", f"{'; '.join(told) or 'No ratio'}.", ":::", "")


def families(run: records.Run, workload: str) -> set[str]:
    """Those that have a figure."""
    results = run.record["results"]
    found = results["workloads"][workload]["runs"]
    return {results["engines"][name]["family"] for name, runs in found.items() if runs["rates"]}


Newest = dict[tuple[str, str, str], tuple[records.Run, dict[str, Any]]]


def newest(runs: list[records.Run]) -> Newest:
    """{(workload, family of ours, family of theirs): the newest run that compared them, and its ratio}"""
    found: Newest = {}
    for run in runs:
        engines = run.record["results"]["engines"]
        for row in run.record["results"]["ratios"]:
            found.setdefault((row["workload"], engines[row["ours"]]["family"], row["family"]), (run, row))
    order = list(WORKLOADS)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:])))


def what(run: records.Run, workload: str) -> str:
    return run.record["results"]["workloads"][workload]["what"].replace("the same", "1 request")


def ratios(best: Newest) -> tuple[list[str], list[list[str]]]:
    """A row a workload and family of ours, a column a family of theirs."""
    last = max(run.date for run, _ in best.values())
    theirs = list(dict.fromkeys(family for *_, family in best))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for (workload, ours, family), (run, row) in best.items():
        cell = f"no ratio: {row['why']}" if row["ratio"] is None else f"{row['ratio']:.2f} ×"
        cell += f", {row['at_least']} wanted" if row["at_least"] else ""
        cell += f" ({whole(run.date)})" if run.date < last else ""
        rows.setdefault((what(run, workload), ours), {})[family] = cell
    cells = [[*names, *(found.get(family, "–") for family in theirs)] for names, found in rows.items()]
    return ["workload", "ours", *(f"beside {family}" for family in theirs)], cells


def whole(date: str) -> str:
    """A date that no line breaks."""
    return date.replace("-", "\N{NON-BREAKING HYPHEN}")


def losses(best: Newest, runs: list[records.Run]) -> list[str]:
    """Where another engine is faster, where less was reached than was wanted, who needs less memory."""
    found = []
    for run, row in best.values():
        ratio, wanted = row["ratio"], row["at_least"] or 0
        if ratio is not None and (ratio < 1 or ratio < wanted):
            told = f"{what(run, row['workload'])}: `{row['ours']}` is {ratio:.2f} times as fast as `{row['theirs']}`"
            found.append(f"{told}, where {wanted} was wanted." if wanted else f"{told}: slower.")
    return [*(found or ["Speed: no ratio of the table is below 1, or below what was wanted."]), *lean(runs)]


def lean(runs: list[records.Run]) -> Iterator[str]:
    """Each family that needed less memory than ours did, by the newest run in which it did."""
    told: set[str] = set()
    for run in runs:
        engines = run.record["results"]["engines"]
        for key, workload in run.record["results"]["workloads"].items():
            peaks = {n: statistics.median(r["peak_mib"]) for n, r in workload["runs"].items() if r.get("peak_mib")}
            ours = {name: mib for name, mib in peaks.items() if name.startswith("minivllm")}
            for name, mib in peaks.items():
                family = engines[name]["family"]
                if name not in ours and family not in told and ours and mib < min(ours.values()):
                    told.add(family)
                    least = min(ours, key=ours.__getitem__)
                    yield f"Memory, {what(run, key)}: `{least}` takes {ours[least]:,.0f} MiB, `{name}` {mib:,.0f} MiB."


# ---------------------------------------------------------------------------------------- all of them


class Results(Directive):
    """`{results}`: every file of bench/results/: how many runs, where, when, and the pages that show it."""

    has_content = False

    def build(self) -> list[nodes.Node]:
        rows = []
        for source in records.committed():
            machines = records.by_machine(records.runs(source))
            newest = next(iter(machines.values()))[0]
            links = ", ".join(f'<a href="{self.link(page)}">{title}</a>' for page, title in shown_on(source))
            where = "; ".join(f"{machine} ({len(runs)})" for machine, runs in machines.items())
            rows.append((f"<code>{source.removeprefix('bench/')}</code>", links, where, whole(newest.date)))
        head = "".join(f'<th scope="col">{name}</th>' for name in ("results", "shown in", "machines (runs)", "newest"))
        body = " ".join("<tr>" + " ".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        table = f'<table class="docutils"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        return [html(f'<div class="scroll" tabindex="0">{table}</div>')]

    def link(self, page: str) -> str:
        return self.env.app.builder.get_relative_uri(self.env.docname, page)


@cache
def pages() -> dict[str, str]:
    """{page, without its suffix: its text}"""
    return {name: path.read_text() for name, path in quotes.pages().items()}


def shown_on(source: str) -> list[tuple[str, str]]:
    """(page, its title) of the pages that show a source."""
    named = re.compile(re.escape(source) + r"(?![\w.-])")  # bench/serve.py is a script
    by_glob = source.startswith("bench/peers")
    return [
        (page, text.partition("\n")[0].removeprefix("# "))
        for page, text in pages().items()
        if named.search(text) or (by_glob and "```{peers}" in text)
    ]
