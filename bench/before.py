"""Has a change cost anything? A benchmark of this checkout and of another, in turns, each run in a process of its own.

Each checkout runs its own script and its own engine with the same options; a first run of each, which may compile, does
not count. Who goes first takes turns, A B B A, and a ratio is taken within a turn (latency.bootstrap_ratio): this
checkout's figure over the other's, with its 95 % interval. All figures are times, or given as such: below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, emit, note, spread
from latency import bootstrap_ratio, shown

TURNS = 8
Figures = Callable[[Any], Mapping[str, float]]  # of a record's results, by name


def add_options(options: argparse.ArgumentParser) -> None:
    """Which are no parameters of a measurement without them."""
    help, absent = "a checkout of this project, whose same benchmark takes turns with this one's", argparse.SUPPRESS
    options.add_argument("--before", type=Path, metavar="FOLDER", default=absent, help=help)
    options.add_argument("--turns", type=int, default=absent, help=f"of --before: runs of each that count ({TURNS})")


def is_asked(args: argparse.Namespace) -> bool:
    return "before" in args


def compare(name: str, figures: Figures, args: argparse.Namespace, argv: Sequence[str]) -> None:
    """argv: all options; those of the comparison are not passed on. Exits with a message where a checkout cannot."""
    folders, turns = {"now": ROOT, "before": args.before.resolve()}, getattr(args, "turns", TURNS)
    if not (script := folders["before"] / "bench" / f"{name}.py").is_file():
        raise SystemExit(f"error: --before {args.before}: there is no {script}")
    found: dict[str, list[Mapping[str, float]]] = {side: [] for side in folders}
    passed = _own(argv)
    for turn in range(-1, turns):
        for side in ("now", "before") if turn % 2 else ("before", "now"):
            seen = figures(_run(folders[side], name, passed))
            if turn >= 0:
                found[side].append(seen)
        note(f"turn {turn + 1} of {turns}" + ("" if turn >= 0 else ", which does not count"))
        rows = _rows(found) if turn >= 0 else []
    name, usual = f"{name}_before", RESULTS / f"{name}.jsonl"
    out = RESULTS / f"{name}.jsonl" if args.out == usual else args.out
    emit(name, {"before": _commit(folders["before"]), "turns": turns, "options": passed}, rows, out)


def _own(argv: Sequence[str]) -> list[str]:
    """What both are run with."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(options)
    options.add_argument("--out", nargs="?")
    return options.parse_known_args(argv)[1]


def _run(folder: Path, name: str, options: Sequence[str]) -> Any:
    command = [sys.executable, str(folder / "bench" / f"{name}.py"), *options]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stderr}error: {command[1]} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])["results"]


def _rows(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """So far, each told, too: a run that is cut short has said something."""
    rows = [_row(figure, found) for figure in found["now"][0] if figure in found["before"][0]]
    if not rows:
        raise SystemExit("error: the two checkouts have no figure in common")
    for row in rows:
        ratio = row["ratio"]
        text = f"{ratio['ratio']} ({ratio['low']} to {ratio['high']})" if "low" in ratio else "none"
        note(f"{row['figure']:40} {text}")
    return rows


def _row(figure: str, found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    sides = {side: [run[figure] for run in runs] for side, runs in found.items()}
    ratio = shown(bootstrap_ratio(sides["before"], sides["now"]))
    return {"figure": figure, **{side: spread(values, 4) for side, values in sides.items()}, "ratio": ratio}


def _commit(folder: Path) -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip()
