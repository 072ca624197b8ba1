"""What the parts of bench/gpu/run.py are held against: the targets of the design, row by row, with what was measured.

Floors on an H200 (4.3 TB/s copied, 788 TFLOP/s in bf16): a decode step of Llama-3.1-8B at 1,024 tokens takes 3.52 ms
for 1 request, 4.49 ms for 32, 11.5 ms for 256; nano-vllm's benchmark 3.70 s. The parts compute the same floors from
the ceilings that they measure, and a fraction is the floor over the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from card import NOT_MEASURED

Row = dict[str, Any]
LARGE = 256 << 20  # bytes of K and V from which decode attention is held against the copy bandwidth


class Target(NamedTuple):
    part: str
    what: str
    wanted: float
    found: Callable[[list[Row]], float | None]  # None: nothing measured it
    at_most: bool = False


def least(rows: Iterable[Row], field: str) -> float | None:
    """The worst of the rows: one that was not measured leaves nothing to say."""
    values = [row.get(field) for row in rows]
    return min(values) if values and all(isinstance(value, (int, float)) for value in values) else None


def _where(field: str, **known: Any) -> Callable[[list[Row]], float | None]:
    return lambda rows: least((row for row in rows if all(row.get(k) == v for k, v in known.items())), field)


def _passes(rows: list[Row]) -> float | None:
    fraction = _where("fraction", kernel="top-k, top-p and min-p")(rows)
    return None if not fraction else round(1 / fraction, 1)


def _w4a16(rows: list[Row]) -> float | None:
    few = (row for row in rows if row.get("kernel") == "w4a16 linear" and int(row["shape"].split()[0]) <= 16)
    return least(few, "times bf16")


def _large_decodes(field: str) -> Callable[[list[Row]], float | None]:
    def found(rows: list[Row]) -> float | None:
        ours = (row for row in rows if row.get("way") == "triton" and row["case"].startswith("decode"))
        return least((row for row in ours if row["kv_bytes"] >= LARGE), field)

    return found


def _prefills(field: str) -> Callable[[list[Row]], float | None]:
    def found(rows: list[Row]) -> float | None:
        ours = (row for row in rows if row.get("way") == "triton" and row["case"].startswith("prefill"))
        return least(ours, field)

    return found


def _times_nano(rows: list[Row]) -> float | None:
    rates = {row.get("engine"): row.get("tokens_per_s") for row in rows}
    ours, theirs = rates.get("minivllm"), rates.get("nano-vllm")
    numbers = isinstance(ours, (int, float)) and isinstance(theirs, (int, float))
    return round(ours / theirs, 2) if numbers else None


def _busy(rows: list[Row]) -> float | None:
    return _where("gpu_busy", case="GPU busy in decodes")(rows)


def _llama(num: int) -> Callable[[list[Row]], float | None]:
    return _where("fraction", model="llama-3.1-8b", requests=num)


TARGETS = (
    Target("engine", "Llama-3.1-8B, 1 request: of the floor", 0.80, _llama(1)),
    Target("engine", "Llama-3.1-8B, 32 requests: of the floor", 0.75, _llama(32)),
    Target("engine", "Llama-3.1-8B, 256 requests: of the floor", 0.70, _llama(256)),
    Target("engine", "nano-vllm's benchmark: of the floor", 0.60, _where("fraction", case="nano-vllm's benchmark")),
    Target("engine", "share of time with the GPU busy in decodes", 0.97, _busy),
    Target("peers", "nano-vllm's benchmark: times nano-vllm", 1.2, _times_nano),
    Target("attention", "decodes over 256 MB of KV: of the copy bandwidth", 0.85, _large_decodes("fraction")),
    Target("attention", "decodes over 256 MB of KV: times FA3", 0.9, _large_decodes("times flash 3")),
    Target("attention", "prefills of 2k to 16k: times FA3", 0.65, _prefills("times flash 3")),
    Target("attention", "prefills of 2k to 16k: times vLLM's Triton", 2.0, _prefills("times vllm triton")),
    Target("kernels", "top-k, top-p: passes over the probabilities", 8, _passes, at_most=True),
    Target("kernels", "top-k, top-p: times a sort", 4.0, _where("times sort", kernel="top-k, top-p and min-p")),
    Target("kernels", "w4a16, up to 16 tokens: times bf16", 2.5, _w4a16),
)


def judge(part: str, rows: list[Row]) -> list[Row]:
    """The part's targets: wanted, measured, and whether it was reached."""
    judged = []
    for target in TARGETS:
        if target.part != part:
            continue
        value = target.found(rows)
        bound = f"{'<=' if target.at_most else '>='} {target.wanted:g}"
        row = {"target": target.what, "wanted": bound, "measured": NOT_MEASURED, "verdict": NOT_MEASURED}
        if value is not None:
            reached = value <= target.wanted if target.at_most else value >= target.wanted
            row |= {"measured": value, "verdict": "reached" if reached else "not reached"}
        judged.append(row)
    return judged
