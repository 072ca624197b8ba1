"""What bench/ablate.py compares: the whole of A and B, the path from one to the other, each switch of B off alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from latency import METRICS
from workloads import WORKLOADS

from minivllm.config import EngineConfig, check_options, fields
from minivllm.errors import ConfigError
from minivllm.features import FEATURES


@dataclass(frozen=True, slots=True)
class Switch:
    """One thing that differs between A and B; several fields only where they cannot change one by one."""

    name: str
    changes: dict[str, tuple[Any, Any]]  # dotted field: (value in A, value in B)
    workload: str
    metric: str

    def __add__(self, other: Switch) -> Switch:
        return replace(other, name=f"{self.name} + {other.name}", changes=self.changes | other.changes)


@dataclass(frozen=True, slots=True)
class Comparison:
    kind: str  # whole | path | alone
    switch: Switch
    a: EngineConfig
    b: EngineConfig
    workload: str


def switches(a: EngineConfig, b: EngineConfig) -> list[Switch]:
    """What differs: features in the order of their table, then other fields in the order of the tree."""
    features = {feature.field: feature for feature in FEATURES}
    found = []
    for field in [*features, *(f for f in fields() if f not in features)]:
        if (before := a.get(field)) != (after := b.get(field)):
            feature = features.get(field)
            workload, metric = (feature.workload, feature.metric) if feature else ("", "")
            name = feature.name if feature else field
            workload = workload if workload in WORKLOADS else "sharegpt"
            metric = metric if metric in METRICS else "throughput"
            found.append(Switch(name, {field: (before, after)}, workload, metric))
    return found


def plan_comparisons(
    a: EngineConfig, b: EngineConfig, metric: str = "throughput"
) -> tuple[list[Comparison], list[str]]:
    """(comparisons, what cannot be compared and why), with each switch's own workload. Raises ConfigError if A is B."""
    found = switches(a, b)
    if not found:
        raise ConfigError("A and B are equal: choose two presets, or let --set-b change something")
    if len(found) == 1:
        return [Comparison("whole", found[0], a, b, found[0].workload)], []
    name = f"{a.preset} → {b.preset}" if a.preset != b.preset else "all switches"
    whole = Switch(name, _merged(found), "sharegpt", metric)
    *path, last = _path(a, found)
    path.append(replace(last, b=b))  # equal but for the preset's name: one engine less to measure
    comparisons = [Comparison("whole", whole, a, b, whole.workload), *path]
    skipped = []
    for switch in found:
        without, why = _without(b, switch, found)
        if without is None:
            skipped.append(f"alone, {switch.name}: {why}")
        else:
            comparisons.append(Comparison("alone", without, b.override(_side(without, 0)), b, switch.workload))
    return comparisons, skipped


def _without(b: EngineConfig, switch: Switch, found: Sequence[Switch]) -> tuple[Switch | None, str]:
    """The switch, with as few others as possible where it cannot be turned alone; or None and the reason."""
    others, why = [one for one in found if one is not switch], ""
    for num in range(len(others)):
        for together in combinations(others, num):
            chosen = replace(sum(together, switch), workload=switch.workload, metric=switch.metric)
            try:
                check_options(b.override(_side(chosen, 0)))
            except ConfigError as e:
                why = why or str(e)
                continue
            return chosen, ""
    return None, why


def _side(switch: Switch, side: int) -> dict[str, Any]:
    """The fields of the switch as A (0) or B (1) has them."""
    return {field: values[side] for field, values in switch.changes.items()}


def _merged(found: Sequence[Switch]) -> dict[str, tuple[Any, Any]]:
    return {field: values for switch in found for field, values in switch.changes.items()}


def _path(a: EngineConfig, found: Sequence[Switch]) -> Iterator[Comparison]:
    """Cumulative. A switch that conflicts with what is not switched yet waits; several go together only if none can go
    alone."""
    here, waiting = a, list(found)
    while waiting:
        switch, there = next(_steps(here, waiting))
        yield Comparison("path", switch, here, there, switch.workload)
        here, waiting = there, [one for one in waiting if not one.changes.keys() <= switch.changes.keys()]


def _steps(here: EngineConfig, waiting: Sequence[Switch]) -> Iterator[tuple[Switch, EngineConfig]]:
    """What could be switched next, the smallest sets first. All together always can."""
    for num in range(1, len(waiting) + 1):
        for first, *others in combinations(waiting, num):
            switch = sum(others, first)
            there = here.override(_side(switch, 1))
            try:
                check_options(there)
            except ConfigError:
                continue
            yield switch, there
