"""Directives that show code, questions and exercises."""

from __future__ import annotations

import re

from docutils import nodes
from docutils.parsers.rst import directives

from bookext import charts, codemap, quotes, records
from bookext.base import Directive, html, picture
from chapters import harness
from minivllm.cli import chapter as book


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


class Predict(Directive):
    """`{predict} question`: choices, then `+++`, then the answer, hidden until it is asked for."""

    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        choices, answer = self.parts()
        question = nodes.paragraph("", "", classes=["question"])
        asked, _ = self.parse_inline(self.arguments[0])
        question += nodes.strong("", "", nodes.Text("Predict. "), *asked)
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
        chapter = re.match(r"chapters/ch(\d\d)_", self.env.docname)
        rows = harness.switches(chapter[1]) if chapter else []
        if not rows:
            raise records.RecordError("no row of minivllm/features.py names this chapter")
        cells = [(f.field, ", ".join(map(str, f.options)), f.default, f.what) for f in rows]
        return [self.box("switch", html(charts.table(("--set", "options", "default", "what it decides"), cells)))]


class Questions(Directive):
    """`{questions}`: the chapters, each with what it asks."""

    has_content = False

    def build(self) -> list[nodes.Node]:
        rows = []
        for folder in book.chapters().values():
            title = (folder / "index.md").read_text().partition("\n")[0].removeprefix("# ")
            rows += [f"[{title}]({folder.name}/index.md)", f": {book.question(folder)}", ""]
            self.env.note_dependency(str(folder / "index.md"))
        return [self.box("questions", *self.parsed(rows))]


class Map(Directive):
    """`{codemap}`: the package's parts, by their real imports."""

    def build(self) -> list[nodes.Node]:
        return [self.box("chart", picture(f'<div class="scroll" tabindex="0">{codemap.draw()}</div>'), self.caption())]
