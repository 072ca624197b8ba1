"""What every chapter's run.py shares: its command line, its switch, and how its results are kept.

A chapter defines `measure(smoke) -> results` (plain data), `check(results)` (asserts what its text claims) and
`tell(results) -> str` (what the script prints). Text and figures of a page come from the same committed results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import record, spread
from minivllm.features import FEATURES, Feature

CHAPTERS = Path(__file__).parent
RESULTS = CHAPTERS / "results"
MIN_ROUNDS = 3  # of runs whose times are compared
ATTEMPTS = 3  # at a claim about time


class TimeClaim(AssertionError):
    """A claim about time that a run did not bear out. Whoever else works on the machine can do that, so it is measured
    again: what is false here is false every time. A claim about what was computed or counted has one chance."""


def in_time(is_so: bool, otherwise: str) -> None:
    """What a chapter's check says of times. Raises TimeClaim."""
    if not is_so:
        raise TimeClaim(otherwise)


def switches(chapter: str) -> list[Feature]:
    """The rows of the feature table that this chapter ("02") is about."""
    return [feature for feature in FEATURES if feature.chapter == chapter]


def note(text: str) -> None:
    """Progress, on standard error: standard output holds the answer alone."""
    print(text, file=sys.stderr, flush=True)


def milliseconds(runs: dict[str, Callable[[], Any]], seconds: float, digits: int = 2) -> dict[str, dict[str, float]]:
    """Each run's time in ms, over at least three rounds and about so many seconds.

    They take turns, so that whatever else the machine does disturbs all of them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    while len(times[next(iter(runs))]) < MIN_ROUNDS or time.perf_counter() - begin < seconds:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: spread(values, digits) for name, values in times.items()}


def with_three_digits(times: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """`shown` beside each fastest time: what a bar that stands for it says."""
    return {name: {**spent, "shown": float(f"{spent['min']:.3g}")} for name, spent in times.items()}


def checked(
    measure: Callable[[], dict[str, Any]], check: Callable[[dict[str, Any]], None], attempts: int
) -> dict[str, Any]:
    """The first results that bear the claims out. What is recorded gets one attempt: it is not to be the best of some.

    Raises AssertionError of the last attempt, or of the first that was not about time.
    """
    for _ in range(attempts - 1):
        results = measure()
        try:
            check(results)
        except TimeClaim as claim:
            note(f"  not so this time: {claim}; measuring again")
        else:
            return results
    results = measure()
    check(results)
    return results


def main(
    chapter: str,
    measure: Callable[[bool], dict[str, Any]],
    check: Callable[[dict[str, Any]], None],
    tell: Callable[[dict[str, Any]], str],
) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m minivllm chapter {int(chapter)}")
    parser.add_argument("--smoke", action="store_true", help="smaller sizes: are the claims true here?")
    parser.add_argument(
        "--record", action="store_true", help=f"keep the results in {RESULTS.relative_to(CHAPTERS.parent)}/"
    )
    args = parser.parse_args()
    start = time.perf_counter()
    results = checked(lambda: measure(args.smoke), check, attempts=1 if args.record else ATTEMPTS)
    print(tell(results), end="")
    seconds = time.perf_counter() - start
    note(f"chapter {int(chapter)}: every claim of its text held, in {seconds:.0f} s")
    if args.record:
        kept = record(f"chapter {chapter}", {"smoke": args.smoke}, results)
        kept["command"] = f"python -m minivllm chapter {int(chapter)} --record"
        kept["seconds"] = round(seconds, 1)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"ch{chapter}.json").write_text(json.dumps(kept, indent=1) + "\n")
        (RESULTS / f"ch{chapter}.txt").write_text(tell(results))
