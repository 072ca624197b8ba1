"""The map of the code: the package's parts and who imports whom, read from the real imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path

from bookext.quotes import ROOT

PACKAGE = ROOT / "minivllm"
WHAT = {  # for newcomers
    "serve": "OpenAI's API", "engine": "the step loop", "scheduler": "what runs next", "kv": "where K and V live",
    "runner": "a plan, computed", "models": "the network", "attention": "reads the cache", "sampling": "picks a token",
    "executor": "where it runs", "loading": "files to model", "spec_decode": "guesses tokens", "lora": "adapters",
    "structured": "legal tokens", "compile": "traced pieces", "quantization": "4 and 8 bits", "layers": "linear, norm",
    "kernels": "C++, Triton", "plan": "a step, as data", "request": "a request, as data", "config": "options",
    "features": "every switch", "trace": "record, replay", "cli": "the commands", "pooling": "vectors, scores",
    "child": "a process of ours", "logs": "log lines", "upload": "host to device", "terminal": "flags, tables",
    "batch": "a pass, as arrays", "sandbox": "work to be killed", "simulate": "a device's time",
    "parallel": "a device's part",
}  # fmt: skip
# Everybody's, or nobody's.
HIDDEN = {
    "errors",
    "registry",
    "matrix",
    "machine",
    "files",
    "file_keys",
    "patterns",
    "facts",
    "kv_groups",
    "orphan",
    "waiting",
    "__main__",
    "wanted",
}
HIDDEN |= {"__init__"}
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, WIDTH = 140, 40, 20, 24, 640
PER_ROW = WIDTH // (BOX_WIDTH + GAP_X)


def part_of(module: str) -> str:
    """minivllm.kv.pool -> kv; minivllm.trace_recent -> trace, as there is a trace.py."""
    name = module.split(".")[1]
    stem = name.partition("_")[0]
    return stem if (PACKAGE / f"{stem}.py").is_file() else name


def sources() -> Iterator[tuple[str, Path]]:
    """(part, file) of the package; kernels/ is a part of it, with or without the link."""
    for top in sorted({*PACKAGE.iterdir()} - {PACKAGE / "kernels"}) + [ROOT / "kernels"]:
        part = part_of(f"minivllm.{top.stem}")
        if part not in HIDDEN and (top.suffix == ".py" or top.is_dir()):
            yield from ((part, path) for path in ([top] if top.is_file() else sorted(top.rglob("*.py"))))


@cache
def lines() -> dict[str, int]:
    counted: dict[str, int] = {}
    for part, path in sources():
        counted[part] = counted.get(part, 0) + path.read_text().count("\n")
    return {part: count for part, count in counted.items() if count}


@cache
def imports() -> dict[str, set[str]]:
    """{part: the parts that it imports when it is imported}; imports within functions and for types are left out."""
    known = lines()
    found: dict[str, set[str]] = {part: set() for part in known}
    for part, path in sources():
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module] if "." in node.module else [f"{node.module}.{alias.name}" for alias in node.names]
            found[part] |= {part_of(name) for name in names if name.startswith("minivllm.")}
    return {part: (uses & set(known)) - {part} for part, uses in found.items() if part in known}


def ranks(uses: dict[str, set[str]]) -> dict[str, int]:
    """How far above the ground a part stands: one more than the highest that it imports."""
    height: dict[str, int] = {}

    def rank(part: str, above: frozenset[str]) -> int:
        if part not in height:
            below = [rank(used, above | {part}) for used in sorted(uses[part]) if used not in above]
            height[part] = 1 + max(below, default=-1)
        return height[part]

    for part in sorted(uses):
        rank(part, frozenset())
    return height


def draw() -> str:
    """Parts as boxes; whoever imports stands above whom it imports."""
    uses, size = imports(), lines()
    height = ranks(uses)
    rows: list[list[str]] = []
    for level in range(max(height.values()), -1, -1):
        named = sorted(part for part in height if height[part] == level)
        rows += [named[i : i + PER_ROW] for i in range(0, len(named), PER_ROW)]
    place = {}
    for number, row in enumerate(rows):
        left = (WIDTH - len(row) * (BOX_WIDTH + GAP_X) + GAP_X) / 2
        for i, part in enumerate(row):
            place[part] = (left + i * (BOX_WIDTH + GAP_X), number * (BOX_HEIGHT + GAP_Y) + 2)
    edges = "".join(
        f'<path d="M{place[a][0] + BOX_WIDTH / 2:.0f},{place[a][1] + BOX_HEIGHT:.0f} '
        f'L{place[b][0] + BOX_WIDTH / 2:.0f},{place[b][1]:.0f}"/>'
        for a in sorted(uses)
        for b in sorted(_needed(uses, a))
        if place[b][1] > place[a][1]
    )
    boxes = "".join(_box(part, *place[part], size[part], uses[part]) for part in place)
    total = len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y + 4
    label = "The parts of minivllm; each imports only parts below it"
    return (
        f'<svg class="codemap" viewBox="0 0 {WIDTH} {total}" role="img" aria-label="{label}">'
        f'<g class="edges">{edges}</g>{boxes}</svg>'
    )


def _needed(uses: dict[str, set[str]], part: str) -> set[str]:
    """The imports of a part that no other import of it implies."""
    return {b for b in uses[part] if not any(b in _below(uses, other) for other in uses[part] - {b})}


def _below(uses: dict[str, set[str]], part: str) -> set[str]:
    seen: set[str] = set()
    todo = [part]
    while todo:
        fresh = uses[todo.pop()] - seen
        seen |= fresh
        todo += fresh
    return seen


def _box(part: str, x: float, y: float, size: int, uses: set[str]) -> str:
    imports = escape(f"{part}: {size} lines; imports {', '.join(sorted(uses)) or 'none of these'}")
    middle, what = x + BOX_WIDTH / 2, WHAT.get(part, "")
    return (
        f'<g class="part"><title>{imports}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text class="part-name" x="{middle:.0f}" y="{y + 17:.0f}" text-anchor="middle">{part}</text>'
        f'<text class="part-what" x="{middle:.0f}" y="{y + 32:.0f}" text-anchor="middle">{what}</text></g>'
    )
