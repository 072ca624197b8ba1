"""The feature-by-feature matrix: read from what the conformance tests wrote (`make matrix`), never kept by hand.

matrix.json lists configurations, the options of each and whether its tests passed. A pair of options works if it met in
a configuration that passed and in none that failed.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from minivllm.features import CONFLICTS, FEATURES, NEEDS_GPU

WORKS, FAILS, CONFLICT, UNTESTED, NO_GPU = "+", "!", "x", ".", "g"
LEGEND = (
    f"{WORKS} works   {CONFLICT} declared conflict   {FAILS} fails   {UNTESTED} not tested   "
    f"{NO_GPU} needs a GPU, and none has run it"
)

Option = tuple[str, Any]  # (feature name, option)


def outcomes() -> dict[tuple[Option, Option], str]:
    """One of the five marks for every pair of options of two different axes, in both orders."""
    runs = json.loads((files("minivllm") / "matrix.json").read_text())["runs"]
    options = [(feature.name, option) for feature in FEATURES for option in feature.options]
    return {(a, b): outcome(a, b, runs) for a in options for b in options if a[0] != b[0]}


def outcome(a: Option, b: Option, runs: list[dict[str, Any]]) -> str:
    if any({a, b} == {conflict.first, conflict.second} for conflict in CONFLICTS):
        return CONFLICT
    met = [run["passed"] for run in runs if run["options"].get(a[0]) == a[1] and run["options"].get(b[0]) == b[1]]
    if not met:
        return NO_GPU if NEEDS_GPU & {a, b} else UNTESTED
    return WORKS if all(met) else FAILS
