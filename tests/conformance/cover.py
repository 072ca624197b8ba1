"""All-pairs covers over the feature table: few configurations in which every pair of options of two axes meets."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from minivllm.features import CONFLICTS, FEATURES, Feature

Config = dict[str, Any]  # dotted field -> option


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


def all_pairs(axes: list[Feature]) -> list[Config]:
    """A greedy cover: each configuration takes as many pairs not met yet as it can. Declared conflicts are left out."""
    missing = {
        ((a.name, x), (b.name, y))
        for a, b in combinations(axes, 2)
        for x in a.options
        for y in b.options
        if not in_conflict([(a.name, x), (b.name, y)])
    }
    configs = []
    while missing:
        chosen: dict[str, Any] = {}
        (a, x), (b, y) = min(missing, key=repr)
        chosen[a], chosen[b] = x, y
        for axis in axes:
            if axis.name not in chosen:
                options = [o for o in axis.options if not in_conflict([*chosen.items(), (axis.name, o)])]
                chosen[axis.name] = max(options, key=lambda o: _gain(missing, chosen, axis.name, o))
        missing -= {pair for pair in missing if all(chosen[name] == option for name, option in pair)}
        configs.append({axis.field: chosen[axis.name] for axis in axes})
    return configs


def _gain(missing: set, chosen: dict[str, Any], name: str, option: Any) -> int:
    with_it = {**chosen, name: option}
    return sum(
        all(with_it.get(n, _NOTHING) == o for n, o in pair) and any(n == name for n, _ in pair) for pair in missing
    )


_NOTHING = object()


def in_conflict(chosen: list[tuple[str, Any]]) -> bool:
    return any(conflict.first in chosen and conflict.second in chosen for conflict in CONFLICTS)


def axes(*names: str) -> list[Feature]:
    """The named features, or all."""
    return [f for f in FEATURES if not names or f.name in names]


def label(config: Config) -> str:
    return ",".join(f"{field.rpartition('.')[2]}={option}" for field, option in config.items())
