"""Committed results: where a figure on a page comes from.

A source is `ch02` (chapters/results/ch02.json) or `bench/host` (the last line of bench/results/host.jsonl, or the whole
of host.json); `bench/host[0]` is another line, `bench/gpu/engine` what a part of bench/gpu found. A path below it is
dotted, into lists by number: `rows.-1.ratio`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bookext.quotes import ROOT

BENCH = ROOT / "bench" / "results"
_bench = BENCH


class RecordError(Exception):
    """A figure that no committed result has."""


def read_from(folder: Path) -> None:
    """Take the results of bench/ from another folder (the site's tests)."""
    global _bench
    _bench = folder


def files(source: str) -> tuple[Path, Path]:
    """Where the results of a source would be: one record, or a line for each."""
    matched = _parts(source)
    folder = _bench if matched[1] else ROOT / "chapters" / "results"
    return folder / f"{matched[2]}.json", folder / f"{matched[2]}.jsonl"


def exists(source: str) -> bool:
    return any(path.is_file() for path in files(source))


def load(source: str) -> dict[str, Any]:
    whole, lines = files(source)
    if whole.is_file():
        return json.loads(whole.read_text())
    if lines.is_file():
        return json.loads(lines.read_text().splitlines()[int(_parts(source)[3] or -1)])
    raise RecordError(
        f"{source}: neither {whole.name} nor {lines.name} is committed; `make chapters` makes a chapter's"
    )


class Run(NamedTuple):
    """One committed measurement."""

    source: str  # names this run and no other: bench/host[2]
    record: dict[str, Any]

    @property
    def date(self) -> str:
        return self.record["date"][:10]

    @property
    def machine(self) -> str:
        found = self.record["machine"]
        cpu = f"{found['cpu']} ({found['unit']})" if "unit" in found else found["cpu"]  # none: before 2026-11-23
        return ", ".join([cpu, f"{found['num_cores']} cores", *([found["gpu"]] if "gpu" in found else [])])


def runs(source: str) -> list[Run]:
    """Every run of a source, the newest first."""
    whole, lines = files(source)
    if whole.is_file():
        found = [Run(source, load(source))]
    elif lines.is_file():
        found = [Run(f"{source}[{i}]", json.loads(line)) for i, line in enumerate(lines.read_text().splitlines())]
    else:
        raise RecordError(f"{source}: neither {whole.name} nor {lines.name} is committed")
    return sorted(found, key=lambda run: run.record["date"], reverse=True)


def by_machine(found: Iterable[Run]) -> dict[str, list[Run]]:
    """{machine: its runs}; the machine that measured last comes first."""
    machines: dict[str, list[Run]] = {}
    for run in sorted(found, key=lambda run: run.record["date"], reverse=True):
        machines.setdefault(run.machine, []).append(run)
    return machines


def committed(pattern: str = "*") -> list[str]:
    """The sources of bench/results/ whose names match."""
    return sorted(f"bench/{path.stem}" for path in _bench.glob(pattern) if path.suffix in (".json", ".jsonl"))


def has(run: Run, path: str) -> bool:
    try:
        pick(run.record["results"], path)
    except RecordError:
        return False
    return True


def _parts(source: str) -> re.Match[str]:
    matched = re.fullmatch(r"(bench/)?((?:gpu/)?[\w-]+)(?:\[(-?\d+)\])?", source)
    if matched is None:
        raise RecordError(f"{source!r} names no results")
    return matched


def as_rows(found: Any) -> list[Any]:
    """A list, or a mapping as a list of its values, each with its name as `key`."""
    if not isinstance(found, dict):
        return found
    return [{"key": key, **row} if isinstance(row, dict) else {"key": key, "value": row} for key, row in found.items()]


def pick(value: Any, path: str) -> Any:
    """The value at a dotted path; "" is the value itself, and after `*` comes what to pick of each in a list."""
    listed, star, rest = path.partition(".*.")
    if star:
        return [pick(item, rest) for item in pick(value, listed)]
    for part in filter(None, path.split(".")):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            known = list(value) if isinstance(value, dict) else type(value).__name__
            raise RecordError(f"no {part!r} of {path!r}; there is {known}") from None
    return value


def figure(text: str) -> tuple[str, str]:
    """`ch02:rows.0.ratio .1f` -> (source, the number as it is shown). Paths are in the results, or `params.`"""
    place, _, form = text.strip().partition(" ")
    source, _, path = place.partition(":")
    record = load(source)
    value = pick(record if path.startswith("params.") else record["results"], path)
    if isinstance(value, (dict, list)):
        raise RecordError(f"{place} is not one value")
    return source, "none" if value is None else format(value, form)


def command(source: str) -> str:
    """How to measure it again. Where its results went is no part of that, and may have been cut off."""
    return load(source)["command"].removesuffix(" --record").removesuffix(" --out")


def provenance(source: str) -> str:
    """Where and when it was measured, in a line."""
    run = Run(source, load(source))
    version = run.record["versions"].get("torch", "")
    return f"{run.machine}; torch {version}; commit {run.record['commit']}; {run.date}"
