"""Quotes of real code: found by symbol, locked by the hash of their syntax tree.

A reference is `path/of/file.py::Class.method @lock`. When the quoted code changes, the lock no longer fits and the
build fails, until somebody has read the page again and run `make relock`. Comments and layout are not part of the lock.
"""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("docs", "chapters")  # whose pages the site shows, and beside them:
ALONE = ("ARCHITECTURE.md", "CONTRIBUTING.md")
REFERENCE = re.compile(r"(?P<path>[\w/]+\.py)::(?P<name>[\w.]+) @(?P<lock>\w+)")
MAX_LINES = 25


class QuoteError(Exception):
    """A quote that cannot be shown as it stands."""


class Quote(NamedTuple):
    path: str
    name: str
    line: int
    code: str
    lock: str


def pages() -> dict[str, Path]:
    """{name in the site: file}: the documentation and the book's chapters."""
    found = [ROOT / name for name in ALONE]
    found += [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))]
    return {str(path.relative_to(ROOT).with_suffix("")): path for path in found}


def find(path: str, name: str) -> Quote:
    """The symbol's source, with its decorators. Raises QuoteError if there is none."""
    file = ROOT / path
    if not file.is_file():
        raise QuoteError(f"{path}: no such file")
    source = file.read_text()
    node: Any = ast.parse(source)
    for part in name.split("."):
        named = [child for child in node.body if part in names(child)]
        if len(named) != 1:
            raise QuoteError(f"{path}: {len(named)} symbols are called {name}")
        node = named[0]
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    return Quote(path, name, first, textwrap.dedent("\n".join(lines)), lock_of(node))


def quote(reference: str) -> Quote:
    """The quote of a reference. Raises QuoteError if it changed since it was locked, or is too long for a page."""
    matched = REFERENCE.fullmatch(reference.strip())
    if matched is None:
        raise QuoteError(f"a quote is written `file.py::symbol @lock`, got {reference!r}")
    found = find(matched["path"], matched["name"])
    if found.lock != matched["lock"]:
        raise QuoteError(
            f"{found.path}::{found.name} changed since this page quoted it ({matched['lock']}, now {found.lock}): read "
            "the text again, then `make relock`"
        )
    if (length := found.code.count("\n") + 1) > MAX_LINES:
        raise QuoteError(f"{found.path}::{found.name} has {length} lines, a quote at most {MAX_LINES}")
    return found


def relock(text: str) -> tuple[str, list[str]]:
    """A page's text with every lock renewed, and the references that changed."""
    changed = []

    def renew(matched: re.Match[str]) -> str:
        found = find(matched["path"], matched["name"])
        if found.lock != matched["lock"]:
            changed.append(f"{found.path}::{found.name}")
        return f"{found.path}::{found.name} @{found.lock}"

    return REFERENCE.sub(renew, text), changed


def lock_of(node: ast.AST) -> str:
    """Ten hexadecimal digits of the tree's hash, the same under every Python."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:10]


def _canonical(value: Any) -> str:
    """Fields that are empty are left out: newer Pythons have more of them."""
    if isinstance(value, ast.AST):
        fields = {name: getattr(value, name, None) for name in value._fields}
        shown = [f"{name}={_canonical(field)}" for name, field in fields.items() if field not in (None, [])]
        return f"{type(value).__name__}({','.join(shown)})"
    return f"[{','.join(map(_canonical, value))}]" if isinstance(value, list) else repr(value)


def names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
