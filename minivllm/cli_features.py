"""The `features` command: the feature table, and the plain fields that `--set` takes as well."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from minivllm.cli import FIELD_HELP, Parser, print_table
from minivllm.config import VLLM_NAMES, EngineConfig
from minivllm.features import CONFLICTS, FEATURES


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m minivllm features", description="Every option of the engine. Set one: --set a.b=c")
    parser.add_argument("--json", action="store_true", help="for programs: features, conflicts and all fields")
    if parser.parse_args(argv).json:
        print(json.dumps(as_data(), indent=2))
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


def as_data() -> dict:
    return {
        "features": [dataclasses.asdict(feature) for feature in FEATURES],
        "conflicts": [dataclasses.asdict(conflict) for conflict in CONFLICTS],
        "fields": EngineConfig().flat(),
    }
