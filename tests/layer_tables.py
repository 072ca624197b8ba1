"""Layer tables of a device that nobody has, as minivllm/simulate/tables.py reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

Time = float | Callable[..., float]  # microseconds
COUNTS = (1, 2, 8, 64, 512, 4096)
CHUNKS, CONTEXTS, DECODES = (16, 64, 512), (0, 16, 512, 4096), (1, 8, 64)
DENSE: Mapping[str, Time] = dict.fromkeys(("embedding", "layernorm", "qkv_proj", "o_proj", "down_proj"), 1)
PER_SEQUENCE: Mapping[str, Time] = {"lm_head": 1, "sampler": 1}


def write_tables(
    folder: Path,
    dense: Mapping[str, Time] = DENSE,
    per_sequence: Mapping[str, Time] = PER_SEQUENCE,
    attention: Time = 1,
    experts: Time | None = None,
) -> Path:
    """Each a constant, or a function of its columns."""
    folder.mkdir(parents=True)
    _write(folder / "dense.csv", "layer,tokens", _lines(dense))
    _write(folder / "per_sequence.csv", "layer,sequences", _lines(per_sequence))
    points = [(0, 0, *at) for at in product(DECODES, CONTEXTS)] + [
        (chunk, before, *decodes)
        for chunk, before in product(CHUNKS, CONTEXTS)
        for decodes in ((0, 0), *product(DECODES, CONTEXTS))
    ]
    rows = [(*at, _time(attention, *at)) for at in points]
    _write(folder / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode", rows)
    if experts is not None:
        _write(
            folder / "moe.csv", "tokens,activated_experts", [(*a, _time(experts, *a)) for a in product(COUNTS, (2, 8))]
        )
    return folder


def _lines(of: Mapping[str, Time]) -> list[tuple]:
    return [(name, count, _time(time, count)) for name, time in of.items() for count in COUNTS]


def _time(time: Time, *at: float) -> float:
    return time(*at) if callable(time) else time


def _write(path: Path, columns: str, rows: list[tuple]) -> None:
    lines = [f"{columns},time_us", *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
