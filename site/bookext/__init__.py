"""The directives of the book. What they show comes from real code and committed results, or the build fails."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

from bookext import charts, codemap, quotes, records
from chapters import harness

USED = "book_sources"  # in the environment's temp_data: the sources that this page has shown so far
EXPECTED = (quotes.QuoteError, records.RecordError)


class Directive(SphinxDirective):
    """A directive whose failures name the line of the page."""

    has_content = True
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        try:
            return self.build()
        except (*EXPECTED, ValueError) as e:  # ValueError: a format that does not fit
            raise self.error(str(e)) from None

    def build(self) -> list[nodes.Node]:
        raise NotImplementedError

    def box(self, kind: str, *children: nodes.Node) -> nodes.container:
        return nodes.container("", *children, classes=[kind])

    def parsed(self, lines: list[str]) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(lines))

    def parts(self) -> list[list[str]]:
        """The content, split at lines of `+++`."""
        found: list[list[str]] = [[]]
        for line in self.content:
            if line.strip() == "+++":
                found.append([])
            else:
                found[-1].append(line)
        return found

    def used(self, source: str) -> dict[str, Any]:
        self.env.current_document.setdefault(USED, {})[source] = True
        self.env.note_dependency(str(quotes.ROOT / "chapters" / "results"))
        return records.load(source)

    def quoted(self, reference: str) -> list[nodes.Node]:
        found = quotes.quote(reference)
        self.env.note_dependency(str(quotes.ROOT / found.path))
        where = nodes.paragraph("", "", classes=["quote-from"])
        where += [nodes.literal(text=found.path), nodes.Text(f", line {found.line}")]
        return [where, nodes.literal_block(found.code, found.code, language="python")]

    def folded(self, title: str, children: list[nodes.Node]) -> list[nodes.Node]:
        return [html(f"<details><summary>{title}</summary>"), *children, html("</details>")]


class Snippet(Directive):
    """`{snippet} file.py::symbol @lock`: a symbol of the real package."""

    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        return [self.box("snippet", *self.quoted(self.arguments[0]))]


class Compare(Directive):
    """`{compare} left title | right title` over two references: side by side where there is room."""

    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        titles = [title.strip() for title in self.arguments[0].split("|")]
        references = [line for line in self.content if line.strip()]
        if not len(titles) == len(references) == 2:
            raise quotes.QuoteError("compare takes two titles and two references")
        sides = [
            self.box("side", nodes.paragraph("", title, classes=["side-title"]), *self.quoted(reference))
            for title, reference in zip(titles, references, strict=True)
        ]
        return [self.box("compare", *sides)]


class Num(SphinxRole):
    """{num}`source:path format`: a measured number, with where and when it was measured."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            source, shown = records.figure(self.text)
        except (*EXPECTED, ValueError) as e:
            return [], [self.inliner.reporter.error(f"num: {e}", line=self.lineno)]
        self.env.current_document.setdefault(USED, {})[source] = True
        told = escape(records.provenance(source))
        return [html(f'<span class="num" title="{told}">{shown}</span>')], []


class RunOutput(Directive):
    """`{run-output} ch02`: what the chapter's script printed when its results were committed."""

    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        source = self.arguments[0]
        command = self.used(source)["command"].removesuffix(" --record")
        text = f"$ {command}\n" + (harness.RESULTS / f"{source}.txt").read_text()
        caption = nodes.paragraph("", records.provenance(source), classes=["caption"])
        return [self.box("run-output", nodes.literal_block(text, text, language="text"), caption)]


class Chart(Directive):
    """`{chart} source:rows`, with the caption (its conclusion) as content. `:y:` has `path = name (meaning)`, split by
    |; a path that ends in .median or .min takes the interval from .min and .max beside it."""

    required_arguments = 1
    option_spec = {name: directives.unchanged_required for name in ("x", "y", "x-label", "y-label", "kind")}

    def build(self) -> list[nodes.Node]:
        source, _, path = self.arguments[0].partition(":")
        rows = records.pick(self.used(source)["results"], path)
        rows = [{"": key, **row} for key, row in rows.items()] if isinstance(rows, dict) else rows
        xs = [records.pick(row, self.options["x"]) if self.options["x"] != "key" else row[""] for row in rows]
        series = [self.series(rows, text) for text in self.options["y"].split("|")]
        head = [self.options.get("x-label", ""), *(s.name for s in series)]
        cells = [[a, *(s.values[i] for s in series)] for i, a in enumerate(xs)]
        if self.options.get("kind") == "bars":
            svg = charts.bars([str(a) for a in xs], series[0], self.options["y-label"])
        else:
            svg = charts.line(xs, series, self.options["x-label"], self.options["y-label"])
        table = html(f"<details><summary>The numbers</summary>{charts.table(head, cells)}</details>")
        return [self.box("chart", html(svg), self.box("caption", *self.parsed(list(self.content))), table)]

    def series(self, rows: list[Any], text: str) -> charts.Series:
        matched = re.fullmatch(r"\s*(\S+) = (.+?) \((\w+)\)\s*", text)
        if matched is None or matched[3] not in (*charts.MEANINGS, "preset"):
            raise records.RecordError(f":y: is `path = name (meaning)`, meaning one of {charts.MEANINGS}; got {text!r}")
        path = matched[1]
        stem, _, last = path.rpartition(".")
        around = [f"{stem}.{end}" if last in ("min", "median") else path for end in ("min", "max")]
        values, low, high = ([float(records.pick(row, p)) for row in rows] for p in (path, *around))
        return charts.Series(matched[2], matched[3], values, low, high)


class Predict(Directive):
    """`{predict} question`: choices, then `+++`, then the answer, hidden until it is asked for."""

    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        choices, answer = self.parts()
        question = nodes.paragraph("", "", classes=["question"])
        question += nodes.strong(text=f"Predict. {self.arguments[0]}")
        return [self.box("predict", question, *self.parsed(choices), *self.folded("The answer", self.parsed(answer)))]


class Exercise(Directive):
    """`{exercise} number`: what to do, then hints, each after `+++`. The solution is quoted and hidden."""

    required_arguments = 1
    option_spec = {name: directives.unchanged_required for name in ("stub", "solution")}

    def build(self) -> list[nodes.Node]:
        task, *hints = self.parts()
        command = f"$ python -m minivllm chapter {self.arguments[0]} --exercise"
        folded = [
            node for i, hint in enumerate(hints, 1) for node in self.folded(f"Hint {i}", self.parsed(hint))
        ] + self.folded("A solution", self.quoted(self.options["solution"]))
        stub = self.quoted(self.options["stub"])
        block = nodes.literal_block(command, command, language="console")
        return [self.box("exercise", *self.parsed(task), *stub, block, *folded)]


class Switch(Directive):
    """`{switch}`: the rows of the feature table that this chapter is about."""

    def build(self) -> list[nodes.Node]:
        chapter = re.match(r"ch(\d\d)_", self.env.docname)
        rows = harness.switches(chapter[1]) if chapter else []
        if not rows:
            raise records.RecordError("no row of minivllm/features.py names this chapter")
        cells = [(f.field, ", ".join(map(str, f.options)), f.default, f.what) for f in rows]
        return [html(charts.table(("--set", "options", "default", "what it decides"), cells))]


class Records(Directive):
    """`{records} source:rows`, each line of content `path format = title`: a table from committed results. `name?` is
    a value that only some rows have."""

    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        source, _, path = self.arguments[0].partition(":")
        rows = records.pick(self.used(source)["results"], path)
        rows = [{"key": key, **row} for key, row in rows.items()] if isinstance(rows, dict) else rows
        columns = [line.rsplit(" = ", 1) for line in self.content if line.strip()]
        cells = [[self.cell(row, column) for column, _ in columns] for row in rows]
        return [html(charts.table([title for _, title in columns], cells))]

    @staticmethod
    def cell(row: Any, column: str) -> str:
        place, _, form = column.partition(" ")
        value = row.get(place[:-1]) if place.endswith("?") else records.pick(row, place)
        return "–" if value is None else format(value, form)  # a ratio to zero


class Rerun(Directive):
    """`{rerun} source`: where and when it was measured, and how to measure it here."""

    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        record = self.used(self.arguments[0])
        block = nodes.literal_block(f"$ {record['command']}", f"$ {record['command']}", language="console")
        return [nodes.paragraph("", records.provenance(self.arguments[0]), classes=["caption"]), block]


class Sources(Directive):
    """`{sources}`, at a page's end: where each of its numbers was measured."""

    def build(self) -> list[nodes.Node]:
        items = nodes.bullet_list()
        for source in self.env.current_document.get(USED, {}):
            where = nodes.paragraph("", f"{source}: {records.provenance(source)}; again by ")
            where += nodes.literal(text=records.load(source)["command"])
            items += nodes.list_item("", where)
        return [self.box("sources", nodes.paragraph("", "The numbers of this page were measured, not typed:"), items)]


class Map(Directive):
    """`{codemap}`: the package's parts, by their real imports."""

    def build(self) -> list[nodes.Node]:
        caption = self.box("caption", *self.parsed(list(self.content)))
        return [self.box("chart", html(f'<div class="scroll" tabindex="0">{codemap.draw()}</div>'), caption)]


def html(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_role("num", Num())
    for name, directive in (
        ("snippet", Snippet), ("compare", Compare), ("run-output", RunOutput), ("chart", Chart), ("predict", Predict),
        ("exercise", Exercise), ("switch", Switch), ("records", Records), ("rerun", Rerun), ("sources", Sources),
        ("codemap", Map),
    ):  # fmt: skip
        app.add_directive(name, directive)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
