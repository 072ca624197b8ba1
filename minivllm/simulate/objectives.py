"""What a request is to take at most, as users write it: "ttft=500ms"."""

from __future__ import annotations

from collections.abc import Collection, Sequence

UNITS = {"ms": 1e-3, "s": 1.0}


def parse_objectives(texts: Sequence[str], names: Collection[str]) -> dict[str, float]:
    """["ttft=500ms", "tpot=0.05s"] -> seconds. Raises ValueError for anything else."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        unit = next((unit for unit in UNITS if value.endswith(unit)), "")
        number = value.removesuffix(unit)
        if name not in names or not unit or not number.replace(".", "", 1).isdecimal() or float(number) <= 0:
            raise ValueError(f'"{text}" is no objective: one of {", ".join(names)}, "=", and a time such as 500ms')
        found[name] = float(number) * UNITS[unit]
    return found
