"""Committed results: where a figure on a page comes from.

A source is `ch02` (chapters/results/ch02.json) or `bench/host` (the last line of bench/results/host.jsonl, or the whole
of host.json); `bench/host[0]` is another line, `bench/gpu/engine` what a part of bench/gpu found. A path below it is
dotted, into lists by number: `rows.-1.ratio`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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
    """The value at a dotted path; "" is the value itself."""
    for part in filter(None, path.split(".")):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            known = list(value) if isinstance(value, dict) else type(value).__name__
            raise RecordError(f"no {part!r} of {path!r}; there is {known}") from None
    return value


def figure(text: str) -> tuple[str, str]:
    """`ch02:rows.0.ratio .1f` -> (source, the number as it is shown)."""
    place, _, form = text.strip().partition(" ")
    source, _, path = place.partition(":")
    value = pick(load(source)["results"], path)
    if isinstance(value, (dict, list)):
        raise RecordError(f"{place} is not one value")
    return source, format(value, form)


def command(source: str) -> str:
    """How to measure it again. Where its results went is no part of that, and may have been cut off."""
    return load(source)["command"].removesuffix(" --record").removesuffix(" --out")


def provenance(source: str) -> str:
    """Where and when it was measured, in a line."""
    record = load(source)
    machine = record["machine"]
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    version = record["versions"].get("torch", "")
    return (
        f"{machine['cpu']}, {machine['num_cores']} cores{gpu}; torch {version}; "
        f"commit {record['commit']}; {record['date'][:10]}"
    )
