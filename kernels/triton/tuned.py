"""Which tile an attention launch gets: what was measured on this card, or else tiles.py. No triton here.

`kernels/tuned/<card>.json`, written by `bench/gpu/run.py --part tune`, has for a shape (head size, group, dtype of the
cache, window) the fastest tile of decodes by their number of requests, and of other launches by their number of
queries. Both are padded and known on the host before a step, so a launch that is captured for a size has that size's
tile. Every tile in a file is compiled by the gate of tests/kernels, as the others are.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from minivllm.kernels.triton.tiles import Tile, attention_tiles

SCHEMA = "minivllm.tuned/1"
FOLDER = Path(__file__).parent.parent / "tuned"
KINDS = ("decode", "prefill")


class Shape(NamedTuple):
    """What a file tells apart."""

    head_size: int
    group: int  # query heads of a KV head
    dtype: str  # of the cache: bfloat16, int8 ...
    window: bool

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize


class Step(NamedTuple):
    up_to: int | None  # requests or queries of a launch; None: any number
    tile: Tile


class Plan(NamedTuple):
    """A layer's tiles. Steps ascend; the last one has no end."""

    decode: tuple[Step, ...]
    prefill: tuple[Step, ...]

    def decode_tile(self, num_requests: int) -> Tile:
        return _first(self.decode, num_requests)

    def prefill_tile(self, num_queries: int) -> Tile:
        return _first(self.prefill, num_queries)


def _first(steps: tuple[Step, ...], size: int) -> Tile:
    return next(tile for up_to, tile in steps if up_to is None or size <= up_to)


def fixed(decode: Tile, prefill: Tile) -> Plan:
    return Plan((Step(None, decode),), (Step(None, prefill),))


def plan(shape: Shape, major: int, card: str | None = None, folder: Path | None = None) -> Plan:
    """card: as torch names it; None: none is there. major: of its compute capability."""
    if card is not None and (found := load((folder or FOLDER) / file_name(card)).get(shape)) is not None:
        return found
    return fixed(*attention_tiles(shape.group, shape.head_size, shape.itemsize, shape.window, major))


def file_name(card: str) -> str:
    """NVIDIA H200 -> nvidia-h200.json"""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-") + ".json"


@functools.cache
def load(path: Path) -> dict[Shape, Plan]:
    """Of one card's file; nothing if there is none."""
    return plans(json.loads(path.read_text())) if path.exists() else {}


def plans(tree: dict[str, Any]) -> dict[Shape, Plan]:
    """Of a file's content. Raises ValueError for what its writer would not have written."""
    if tree.get("schema") != SCHEMA:
        raise ValueError(f"a file of tuned tiles has the schema {SCHEMA}, not {tree.get('schema')}")
    found = {}
    for row in tree["shapes"]:
        shape = Shape(*(row[name] for name in Shape._fields))
        steps = {kind: tuple(Step(up_to, Tile(*tile)) for up_to, tile in row[kind]) for kind in KINDS}
        for kind, own in steps.items():
            ends = [step.up_to for step in own]
            if not own or ends[-1] is not None or None in ends[:-1] or ends[:-1] != sorted(set(ends[:-1])):
                raise ValueError(f"{kind} of {shape}: sizes must ascend and end with null, not {ends}")
            if any(step.tile.block_m < shape.group for step in own):
                raise ValueError(f"{kind} of {shape}: a tile has too few rows for a group of heads")
        found[shape] = Plan(**steps)
    return found


class Measured(NamedTuple):
    shape: Shape
    kind: str  # decode or prefill
    size: int  # requests, or queries
    tile: Tile
    us: float


def as_tree(
    measured: Iterable[Measured],
    major: int,
    about: dict[str, Any],
    earlier: Mapping[Shape, Plan] = MappingProxyType({}),
) -> dict[str, Any]:
    """A file's content: the tile that took least at a size is for all sizes from above the one measured before it.
    major: of the compute capability; about: the card, its clocks and the versions; earlier: what a file has already of
    shapes that are not measured now."""
    best: dict[tuple[Shape, str, int], Measured] = {}
    for m in measured:
        key = m.shape, m.kind, m.size
        if key not in best or m.us < best[key].us:
            best[key] = m
    shapes: dict[Shape, dict[str, list]] = {}
    for shape, known in earlier.items():
        shapes[shape] = {kind: [[up_to, list(tile)] for up_to, tile in getattr(known, kind)] for kind in KINDS}
    for shape in {shape for shape, _, _ in best}:
        steps = {kind: _steps([m for m in best.values() if (m.shape, m.kind) == (shape, kind)]) for kind in KINDS}
        if all(steps.values()):
            shapes[shape] = steps
    rows = [shape._asdict() | steps for shape, steps in sorted(shapes.items(), key=lambda item: item[0])]
    return {"schema": SCHEMA, "major": major, **about, "shapes": rows}


def _steps(found: list[Measured]) -> list[list[Any]]:
    found = sorted(found, key=lambda m: m.size)
    merged: list[list[Any]] = []
    for m in found:
        if merged and merged[-1][1] == list(m.tile):
            merged[-1][0] = m.size
        else:
            merged.append([m.size, list(m.tile)])
    if merged:
        merged[-1][0] = None
    return merged


def candidates(shape: Shape, kind: str, major: int) -> list[Tile]:
    """What is worth a try, the default first; those that cannot be launched on a card fall out there."""
    default = attention_tiles(shape.group, shape.head_size, shape.itemsize, shape.window, major)[KINDS.index(kind)]
    if kind == "decode":
        sizes = [(n, warps, stages) for n in (32, 64, 128) for warps in (2, 4, 8) for stages in (2, 3)]
        tried = [Tile(default.block_m, *size) for size in sizes]
    else:
        rows = [(64, 4), (128, 8)] if shape.group <= 64 else [(default.block_m, 8)]
        tried = [Tile(m, n, warps, stages) for m, warps in rows for n in (32, 64, 128) for stages in (1, 2, 3)]
    return list(dict.fromkeys([default, *tried]))
