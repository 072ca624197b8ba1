"""What every benchmark shares: one JSON line a run, saying what was measured, where, with what and from which commit.

A figure that compares is a ratio of runs that alternate (A B A B) on one machine, with its spread, because a shared
machine is noisy. Results that a text quotes are appended to bench/results/ by `--out`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm import machine

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
SCHEMA = "minivllm.bench/1"


def parser(what: str, name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    default = RESULTS / f"{name}.jsonl"
    parser.add_argument("--out", nargs="?", const=default, type=Path, help=f"also append the line to OUT ({default})")
    return parser


def emit(name: str, params: dict[str, Any], results: Any, out: Path | None) -> None:
    """Print the run as one JSON line, and append it to `out`, which is no parameter of a measurement."""
    line = json.dumps(record(name, {name: value for name, value in params.items() if name != "out"}, results))
    print(line)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "a") as file:
            file.write(line + "\n")


def _program() -> list[str]:
    """What was run, from the project's root: a script, or with -m a package, whose name in argv is a path."""
    path = Path(sys.argv[0]).resolve()
    if path.name == "__main__.py" and path.is_relative_to(ROOT):
        return ["-m", ".".join(path.parent.relative_to(ROOT).parts)]
    return [sys.argv[0]]


def record(name: str, params: dict[str, Any], results: Any) -> dict[str, Any]:
    """What was measured, with all that made the number."""
    return {
        "schema": SCHEMA,
        "bench": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", *_program(), *sys.argv[1:]]),
        "machine": machine.describe(),
        "env": {
            name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))
        },
        "versions": machine.versions(),
        "params": params,
        "results": results,
    }


def commit() -> str:
    """The commit, with "+" if the tree differs from it; "" outside a repository."""
    found = _git("rev-parse", "--short=12", "HEAD")
    return found + "+" if found and _git("status", "--porcelain", "--untracked-files=no") else found


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # a bare machine has none
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float | int]:
    """Median with the lowest and the highest."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return {
        "median": round(middle, digits),
        "min": round(low, digits),
        "max": round(high, digits),
        "num_runs": len(values),
    }


def percent(ours: float, theirs: float) -> float | None:
    """How far ours is off; None where theirs is 0."""
    return round(100 * (ours / theirs - 1), 2) if theirs > 0 else None


def note(text: str) -> None:
    """Progress, for people: standard output holds the JSON line alone."""
    print(text, file=sys.stderr, flush=True)
