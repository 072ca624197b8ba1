"""The reference pages, made of the code: public symbols by their source, options and endpoints by their tables.

Symbols are read as syntax trees and not imported, so that nothing here loads torch.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import io
import os
import re
from collections.abc import Iterator
from html import escape
from importlib import import_module
from typing import Any

from docutils import nodes

from bookext import charts, quotes
from bookext.base import Directive, OfCode, html, picture
from minivllm import features, matrix
from minivllm.cli import COMMANDS
from minivllm.config import PRESETS, VLLM_NAMES, EngineConfig
from minivllm.features import CONFLICTS, FEATURES
from minivllm.terminal import FIELD_HELP

# ---------------------------------------------------------------------------------------- Python


class Api(Directive):
    """`{api} file.py::symbol`: its signature, its docstring, its public members and fields."""

    required_arguments = 1

    def build(self) -> list[nodes.Node]:
        path, _, name = self.arguments[0].partition("::")
        file = quotes.ROOT / path
        if not file.is_file():
            raise quotes.QuoteError(f"{path}: no such file")
        self.env.note_dependency(str(file))
        source = file.read_text()
        found = [node for node in ast.parse(source).body if name in quotes.names(node)]
        if len(found) != 1:
            raise quotes.QuoteError(f"{path}: {len(found)} symbols are called {name}")
        where = nodes.paragraph("", "", nodes.literal(text=path), classes=["quote-from"])
        shown = self.box("api", where, *described(found[0], source.splitlines()))
        shown["support_smartquotes"] = False  # a docstring's quotes are code as often as not
        return [shown]


def described(node: Any, lines: list[str]) -> list[nodes.Node]:
    if isinstance(node, ast.ClassDef):
        members = [child for child in node.body if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))]
        init = [child for child in members if child.name == "__init__"]
        named = ast.unparse(ast.ClassDef(node.name, node.bases, [], [ast.Pass()], [])).partition(":")[0]
        parts = [signature(init[0], node.name)] if init else [literal_python(named)]
        parts += prose(ast.get_docstring(node))
        parts += fields(node, lines)
        for member in members:
            if not member.name.startswith("_"):
                parts.append(nodes.container("", *described(member, lines), classes=["member"]))
        return parts
    return [signature(node, node.name), *prose(ast.get_docstring(node))]


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> nodes.literal_block:
    """As it is called: without self, one argument a line where they do not fit. A property as a field."""
    if any(ast.unparse(d) == "property" for d in node.decorator_list):
        return literal_python(f"{name}: {ast.unparse(node.returns)}" if node.returns else name)
    arguments = copy.deepcopy(node.args)
    arguments.args = [a for a in arguments.args if a.arg not in ("self", "cls")]
    awaited = "async " * isinstance(node, ast.AsyncFunctionDef)
    gives = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    whole = f"{awaited}{name}({ast.unparse(arguments)}){gives}"
    if len(whole) > 88:
        inner = ",\n    ".join(split_arguments(ast.unparse(arguments)))
        whole = f"{awaited}{name}(\n    {inner},\n){gives}"
    return literal_python(whole)


def literal_python(text: str) -> nodes.literal_block:
    return nodes.literal_block(text, text, language="python", classes=["signature"])


def split_arguments(text: str) -> list[str]:
    """At the commas that are in no bracket."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


def fields(node: ast.ClassDef, lines: list[str]) -> list[nodes.Node]:
    """A table of the annotated fields, with the comments above and behind each."""
    rows = []
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            comment = " ".join([*above(child.lineno - 1, lines), lines[child.end_lineno - 1].partition("  # ")[2]])
            default = ast.unparse(child.value) if child.value else ""
            rows.append((child.target.id, ast.unparse(child.annotation), default, comment.strip()))
    head = ("field", "type", "default", "what")
    if not any(comment for *_, comment in rows):
        head, rows = head[:3], [row[:3] for row in rows]
    return [html(code_table(head, rows, code=3))] if rows else []


def above(line: int, lines: list[str]) -> list[str]:
    """The comment that ends right above a line, which is counted from 0."""
    first = line
    while first and lines[first - 1].lstrip().startswith("# "):
        first -= 1
    return [text.strip().removeprefix("# ") for text in lines[first:line]]


def prose(text: str | None) -> list[nodes.Node]:
    """A docstring's paragraphs; what is indented is shown as it is written."""
    parts: list[nodes.Node] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)) if text else []:
        if block.startswith((" ", "|")):
            parts.append(nodes.literal_block(block, block, language="text"))
        else:
            parts += [nodes.paragraph("", "", *inline(" ".join(part.split()))) for part in entries(block)]
    return parts


def entries(block: str) -> list[str]:
    """A paragraph whose lines begin `name: ` is one entry for each of these."""
    return re.split(r"\n(?=[a-z_]+(?:, [a-z_]+)*: )", block)


def inline(text: str) -> Iterator[nodes.Node]:
    for i, part in enumerate(re.split(r"`([^`]+)`", text)):
        if part:
            yield nodes.literal(text=part) if i % 2 else nodes.Text(part)


def code_table(head: tuple[str, ...], rows: Any, code: int) -> str:
    """A table whose first `code` columns are code."""
    cells = [[literal(cell) if i < code else marked(str(cell)) for i, cell in enumerate(row)] for row in rows]
    return charts.markup_table(head, cells)


def literal(cell: Any) -> str:
    return f"<code>{escape(str(cell))}</code>" if cell != "" else ""


def marked(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


# ---------------------------------------------------------------------------------------- options


class Fields(OfCode):
    """`{fields}`: every option that is not in the feature table, by section."""

    def build(self) -> list[nodes.Node]:
        flags = {dotted: f"--{name.replace('_', '-')}" for name, dotted in VLLM_NAMES.items()}
        comments, axes = self.comments(), {feature.field for feature in FEATURES}
        plain = {dotted: value for dotted, value in EngineConfig().flat().items() if dotted not in axes}
        rows = []
        for dotted, value in plain.items():
            default = "automatic" if value is None else value
            rows.append((dotted, flags.get(dotted, ""), default, FIELD_HELP.get(dotted) or comments[dotted]))
        return [html(code_table(("--set", "or", "default", "what"), rows, code=2))]

    def comments(self) -> dict[str, str]:
        """{dotted field: the comment behind it in config.py}"""
        source = (quotes.ROOT / "minivllm" / "config.py").read_text()
        lines = source.splitlines()
        bodies = {n.name: n.body for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
        tree = [node for node in bodies["EngineConfig"] if isinstance(node, ast.AnnAssign)]
        sections = {node.target.id: ast.unparse(node.annotation) for node in tree}
        return {
            f"{section}.{field.target.id}": lines[field.end_lineno - 1].partition("# ")[2]
            for section, kind in sections.items()
            if kind in bodies
            for field in bodies[kind]
            if isinstance(field, ast.AnnAssign)
        }


class Features(OfCode):
    """`{features}`: every axis of features.py, its options, and which options of others it cannot meet."""

    def build(self) -> list[nodes.Node]:
        return [node for feature in FEATURES for node in self.axis(feature)]

    def axis(self, feature: features.Feature) -> list[nodes.Node]:
        title = nodes.paragraph("", "", nodes.literal(text=feature.field), classes=["axis"])
        options = nodes.paragraph("", "options: ")
        for i, option in enumerate(feature.options):
            options += [nodes.Text(", " * (i > 0)), nodes.literal(text=str(option))]
        options += [nodes.Text("; default "), nodes.literal(text=str(feature.default))]
        if feature.chapter:
            options += nodes.Text(f"; chapter {int(feature.chapter)}")
        if feature.workload:
            options += [nodes.Text("; made for "), nodes.literal(text=feature.metric), nodes.Text(" of ")]
            options += nodes.literal(text=feature.workload)
        said = feature.what[0].upper() + feature.what[1:] + "."
        parts = [title, nodes.paragraph("", "", *inline(said)), options]
        if reasons := conflicts_of(feature.name):
            table = html(code_table(("this", "with", "reason"), reasons, code=2))
            parts += self.folded(f"{len(reasons)} pairs that cannot be", [table])
        return [self.box("api", *parts)]


def conflicts_of(name: str) -> list[tuple[str, str, str]]:
    found = []
    for conflict in CONFLICTS:
        first, second = conflict.first, conflict.second
        if name in (first[0], second[0]):
            mine, other = (first, second) if first[0] == name else (second, first)
            found.append((f"{mine[0]}={mine[1]}", f"{other[0]}={other[1]}", conflict.reason))
    return found


class Presets(OfCode):
    """`{presets}`: the named configurations."""

    def build(self) -> list[nodes.Node]:
        rows = []
        for name, preset in PRESETS.items():
            sets = "; ".join(f"`{field}={value}`" for field, value in preset.overrides.items())
            rows.append((name, preset.what, sets or "the defaults"))
        return [html(code_table(("--preset", "what", "sets"), rows, code=1))]


# ---------------------------------------------------------------------------------------- the matrix

WORDS = {
    matrix.WORKS: "works", matrix.CONFLICT: "declared conflict", matrix.FAILS: "fails", matrix.UNTESTED: "not tested",
    matrix.NO_GPU: "needs a GPU",
}  # fmt: skip


class Matrix(OfCode):
    """`{matrix}`: two features at a time, by what the conformance tests found of their options."""

    def build(self) -> list[nodes.Node]:
        outcomes = matrix.outcomes()
        names = [feature.name for feature in FEATURES]
        head = "".join(f'<th scope="col"><span>{name}</span></th>' for name in names)
        rows = "".join(
            f'<tr><th scope="row">{a}</th>{"".join(self.cell(outcomes, a, b) for b in names)}</tr>' for a in names
        )
        table = f'<table class="matrix"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>'
        caption = f"Two features at a time: {len(names)} rows and columns"
        return [picture(f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">{table}</div>')]

    @staticmethod
    def cell(outcomes: dict[Any, str], a: str, b: str) -> str:
        if a == b:
            return '<td class="same"></td>'
        marks = [mark for (first, second), mark in outcomes.items() if first[0] == a and second[0] == b]
        counts = {word: marks.count(mark) for mark, word in WORDS.items() if mark in marks}
        told = "; ".join(f"{count} {word}" for word, count in counts.items())
        return f'<td class="{summary(marks)}" title="{a} and {b}: {told}">{SIGNS[summary(marks)]}</td>'


SIGNS = {"fails": "✗", "untested": "?", "works": "✓", "partly": "◐", "never": "–"}


def summary(marks: list[str]) -> str:
    """The pairs of options of two features in one word: the worst that is not declared comes first."""
    if matrix.FAILS in marks:
        return "fails"
    if matrix.UNTESTED in marks:
        return "untested"
    if matrix.WORKS in marks:
        return "works" if set(marks) == {matrix.WORKS} else "partly"
    return "never"


# ---------------------------------------------------------------------------------------- server and terminal


class Endpoints(OfCode):
    """`{endpoints}`: what the server answers, and the fields of each request."""

    def build(self) -> list[nodes.Node]:
        from minivllm.serve import openapi
        from minivllm.serve.app import ENDPOINTS

        schemas = openapi.document(ENDPOINTS)["components"]["schemas"]
        rows = [(f"{e.method} {e.path}", e.what, e.takes.__name__ if e.takes else "") for e in ENDPOINTS]
        parts = [html(code_table(("endpoint", "what", "request"), rows, code=1))]
        for name in dict.fromkeys(e.takes.__name__ for e in ENDPOINTS if e.takes):
            parts += self.folded(f"The fields of {name}", [html(self.schema(schemas[name]))])
        return parts

    @staticmethod
    def schema(schema: dict[str, Any]) -> str:
        needed = schema.get("required", [])
        rows = [
            (name, kind_of(field), "required" if name in needed else shown(field.get("default")))
            for name, field in schema["properties"].items()
        ]
        return code_table(("field", "type", "default"), rows, code=2)


def kind_of(field: dict[str, Any]) -> str:
    """A JSON Schema in a word or two."""
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(kind_of(option) for option in field["anyOf"]))
    if "enum" in field:
        return " | ".join(map(str, field["enum"]))
    if field.get("type") == "array":
        return f"[{kind_of(field['items'])}]" if field.get("items") else "array"
    return str(field.get("type", "any"))


def shown(default: Any) -> str:
    return "" if default is None else str(default)


class Commands(OfCode):
    """`{commands}`: each command's --help."""

    def build(self) -> list[nodes.Node]:
        parts: list[nodes.Node] = []
        for name, (module, what) in COMMANDS.items():
            if module:
                text = help_of(module)
                parts += self.folded(f"{name}: {what}", [nodes.literal_block(text, text, language="text")])
        return parts


def help_of(module: str) -> str:
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "96"
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            import_module(module).main(["--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return out.getvalue().rstrip()
