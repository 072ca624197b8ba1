"""All-pairs covers over the feature table: few configurations in which every pair of options of two axes meets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import Any

from minivllm.features import CONFLICTS, FEATURES, Conflict, Feature

Config = dict[str, Any]  # dotted field -> option
Option = tuple[str, Any]  # an axis and one of its options


def singles(axes: list[Feature]) -> list[Config]:
    """Every option alone, the rest at their defaults or, where that is a declared conflict, at what it allows."""
    configs = []
    for feature in axes:
        for option in feature.options:
            if option != feature.default:
                forced = [_allowed(other, (feature.name, option)) for other in axes if other is not feature]
                configs.append(
                    {feature.field: option} | {field: value for field, value, is_default in forced if not is_default}
                )
    return configs


def _allowed(feature: Feature, chosen: tuple[str, Any]) -> tuple[str, Any, bool]:
    options = [feature.default, *(o for o in feature.options if o != feature.default)]
    option = next(o for o in options if not in_conflict([chosen, (feature.name, o)]))
    return feature.field, option, option == feature.default


def all_pairs(axes: list[Feature], conflicts: tuple[Conflict, ...] = CONFLICTS) -> list[Config]:
    """A greedy cover: each configuration takes as many pairs not met yet as it can. Conflicts are left out."""
    pairs = {
        ((a.name, x), (b.name, y))
        for a, b in combinations(axes, 2)
        for x in a.options
        for y in b.options
        if not in_conflict([(a.name, x), (b.name, y)], conflicts)
    }
    missing: dict[Option, set[Option]] = defaultdict(set)  # what each option has not met yet
    for first, second in pairs:
        missing[first].add(second)
        missing[second].add(first)
    configs = []
    for first, second in sorted(pairs, key=repr):
        if second not in missing[first]:
            continue
        chosen = {first, second}
        for axis in axes:
            if axis.name not in dict(chosen):
                allowed = [
                    (axis.name, o) for o in axis.options if not in_conflict([*chosen, (axis.name, o)], conflicts)
                ]
                chosen.add(max(allowed, key=lambda option: len(missing[option] & chosen)))
        for option in chosen:
            missing[option] -= chosen
        configs.append({axis.field: dict(chosen)[axis.name] for axis in axes})
    return configs


def in_conflict(chosen: Iterable[Option], conflicts: tuple[Conflict, ...] = CONFLICTS) -> bool:
    options = set(chosen)
    return any(conflict.first in options and conflict.second in options for conflict in conflicts)


def axes(*names: str) -> list[Feature]:
    """The named features, or all."""
    return [f for f in FEATURES if not names or f.name in names]


def label(config: Config) -> str:
    return ",".join(f"{field.rpartition('.')[2]}={option}" for field, option in config.items())
