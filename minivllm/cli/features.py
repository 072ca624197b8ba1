"""The `features` command: the feature table, and the plain fields that `--set` takes as well."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from minivllm import matrix
from minivllm.config import VLLM_NAMES, EngineConfig
from minivllm.features import CONFLICTS, FEATURES
from minivllm.terminal import FIELD_HELP, Parser, print_table


def main(argv: Sequence[str], prog: str = "python -m minivllm features") -> int:
    parser = Parser(prog=prog, description="Every option of the engine. Set one: --set a.b=c")
    parser.add_argument("--json", action="store_true", help="for programs: features, conflicts and all fields")
    parser.add_argument("--matrix", action="store_true", help="which options were tested together, and how that ended")
    args = parser.parse_args(argv)
    if args.json:
        print(json.dumps(as_data(), indent=2))
        return 0
    if args.matrix:
        print_matrix()
        return 0
    rows = [(f.field, ", ".join(map(str, f.options)), f.default, f.what) for f in FEATURES]
    print_table("features", ("--set", "options", "default", "what"), rows)
    print()
    flags = {dotted: f"--{name.replace('_', '-')}" for name, dotted in VLLM_NAMES.items()}
    axes = {feature.field for feature in FEATURES}
    plain = ((dotted, value) for dotted, value in EngineConfig().flat().items() if dotted not in axes)
    rows = [
        (dotted, flags.get(dotted, ""), "automatic" if value is None else value, FIELD_HELP.get(dotted, ""))
        for dotted, value in plain
    ]
    print_table("other options", ("--set", "or", "default", "what"), rows)
    return 0


def print_matrix() -> None:
    """Every pair of options: one row and one column an option."""
    outcomes = matrix.outcomes()
    options = [(feature.name, option) for feature in FEATURES for option in feature.options]
    print("Each pair of options in the conformance tests: equal tokens in every configuration that holds both.")
    print(f"{matrix.LEGEND}\n")
    width = max(len(f"{name}={option}") for name, option in options)
    print(" " * (width + 5) + " ".join(f"{i:>2}" for i in range(1, len(options) + 1)))
    for i, (name, option) in enumerate(options, 1):
        marks = (" " if first[0] == name else outcomes[first, (name, option)] for first in options)
        print(f"{i:>2}  {f'{name}={option}':<{width}} " + " ".join(f"{mark:>2}" for mark in marks))


def as_data() -> dict:
    return {
        "features": [dataclasses.asdict(feature) for feature in FEATURES],
        "conflicts": [dataclasses.asdict(conflict) for conflict in CONFLICTS],
        "fields": EngineConfig().flat(),
    }
