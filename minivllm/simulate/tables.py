"""What a step takes by measured layer times, in the place of formulas: tables that LLMServingSim's profiler makes of
vLLM on a device (casys-kaist/LLMServingSim 5daddb2, docs/profiler/output-bundle.md). One folder a tensor-parallel size:

    dense.csv          layer, tokens: once in each layer of the model, but for those of PER_STEP and layernorm (twice)
    per_sequence.csv   layer, sequences: once in a step, by the rows of logits
    attention.csv      prefill_chunk, kv_prefill, n_decode, kv_decode: once in each layer
    moe.csv            tokens, activated_experts: once in each layer, of a mixture of experts

All of one device, in microseconds. Between two points a time is linear, never logarithmic: that cost LLMServingSim 12 %
(its CHANGELOG), since decodes take a + b * (sum of their contexts). Beyond the last point the last two say how it goes
on, with a warning.

attention.csv has one prompt's chunk in a step. Several take what each takes alone, less the launches that they share.
Decodes beside them are charged by the longest chunk, not by all: FlashAttention's grid has as many rows for every
sequence as the longest needs (flash_fwd_launch_template.h). In no table is what devices tell each other (Links), nor
to which sizes captured forwards pad a step.
"""

from __future__ import annotations

import csv
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minivllm.errors import ModelError
from minivllm.simulate.cost import Cost, Numbers, Step
from minivllm.simulate.devices import Device, several
from minivllm.simulate.shape import Experts, Shape

PER_STEP = ("embedding", "final_layernorm")
PER_LAYER = {
    "layernorm": 2,
    **dict.fromkeys(("qkv_proj", "qk_norm", "rotary_emb", "o_proj"), 1),
}
MLP = ("gate_up_proj", "act_fn", "down_proj")  # once in each layer that has no experts
NEEDED = ("qkv_proj", "o_proj")  # in dense.csv, or it is of something else
COLUMNS = {
    "dense": ("layer", "tokens", "time_us"),
    "per_sequence": ("layer", "sequences", "time_us"),
    "attention": ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
    "moe": ("tokens", "activated_experts", "time_us"),
}

OUTSIDE = "%s: %g lies outside of the table, which ends at %g: extended"

logger = logging.getLogger("minivllm")


class Line:
    """Times by one number, linear between those that were measured."""

    def __init__(self, what: str, points: Mapping[float, float]):
        self.what = what
        self._x = sorted(points)
        self._y = [points[x] for x in self._x]
        self._is_told = False

    @classmethod
    def sum(cls, what: str, parts: Sequence[tuple[int, Line]]) -> Line:
        """Of (how often, line)."""
        knots = sorted({x for _, line in parts for x in line._x})
        return cls(what, {x: sum(count * line(x) for count, line in parts) for x in knots})

    def __call__(self, x: float) -> float:
        if x > self._x[-1] and not self._is_told:
            self._is_told = True
            logger.warning(OUTSIDE, self.what, x, self._x[-1])
        return _between(self._x, x, self._y.__getitem__)


class Grid:
    """Times by several numbers, one axis after the other: points that are missing somewhere are missing there alone."""

    def __init__(self, what: str, axes: Sequence[str], points: Sequence[tuple[tuple[float, ...], float]]):
        """axes: what the numbers are, for the warning."""
        self.what = what
        self._axes = axes
        self._tree = _tree(points)
        self._ends = [max(at[i] for at, _ in points) for i in range(len(axes))]
        self._told: set[str] = set()

    @property
    def first_axis(self) -> list[float]:
        return self._tree[0]

    def __call__(self, *at: float) -> float:
        for axis, x, end in zip(self._axes, at, self._ends, strict=True):
            if x > end and axis not in self._told:
                self._told.add(axis)
                logger.warning(OUTSIDE, f"{self.what}: {axis}", x, end)
        return _descend(self._tree, at)


Tree = tuple[list[float], list]  # an axis's points, and what each has: a time, or the next axis


def _tree(points: Sequence[tuple[tuple[float, ...], float]]) -> Tree:
    below: dict[float, list] = {}
    for (first, *others), value in points:
        below.setdefault(first, []).append((tuple(others), value))
    keys = sorted(below)
    return keys, [below[key][0][1] if not below[key][0][0] else _tree(below[key]) for key in keys]


def _descend(tree: Tree, at: Sequence[float]) -> float:
    keys, values = tree
    if len(at) == 1:
        return _between(keys, at[0], values.__getitem__)
    return _between(keys, at[0], lambda i: _descend(values[i], at[1:]))


def _between(keys: Sequence[float], x: float, value: Callable[[int], float]) -> float:
    """Linear between its neighbours; above the last key on from the last two, below the first as at the first."""
    i = bisect_left(keys, x)
    if i == 0 or (i < len(keys) and keys[i] == x):
        return value(i)
    if len(keys) == 1:
        return value(0)
    i = min(i, len(keys) - 1)
    share = (x - keys[i - 1]) / (keys[i] - keys[i - 1])
    low = value(i - 1)
    return max(0.0, low + share * (value(i) - low))


# ------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class Tables:
    tp: int
    per_layer: Line  # by tokens; all in seconds
    mlp: Line | None
    per_step: Line | None
    per_sequence: Line
    attention: Grid
    experts: Grid | None


def tp_of(folder: Path) -> int:
    """By its name's end: "..._tp2", "tp2". Raises ModelError."""
    if (found := re.search(r"tp(\d+)$", folder.resolve().name)) is None:
        raise ModelError(f"{folder}: tables of which tensor-parallel size? The folder's name must end in tp1, tp2 ...")
    return int(found[1])


def choose_tables(folders: Sequence[Path], tp: int) -> Path:
    """Raises ModelError if none is of this size."""
    sizes = {tp_of(folder): folder for folder in folders}
    if tp not in sizes:
        have = ", ".join(f"tp{size}" for size in sorted(sizes))
        raise ModelError(f"no tables for tensor_parallel_size={tp}: those given are of {have}")
    return sizes[tp]


def read_tables(folder: Path) -> Tables:
    """Raises ModelError, naming file and line."""
    dense, attention = _lines(folder / "dense.csv", "dense"), _points(folder / "attention.csv", "attention")
    for name in NEEDED:
        if name not in dense:
            raise ModelError(f"{folder / 'dense.csv'}: no layer {name}, which every decoder has")
    for name in sorted(dense.keys() - PER_LAYER.keys() - {*PER_STEP, *MLP}):
        logger.warning("%s: %s is not known: taken once in each layer", folder / "dense.csv", name)
    others = [(PER_LAYER.get(name, 1), line) for name, line in dense.items() if name not in (*PER_STEP, *MLP)]
    mlp, per_step = ([(1, dense[name]) for name in names if name in dense] for names in (MLP, PER_STEP))
    sequences = _lines(folder / "per_sequence.csv", "per_sequence")
    moe, tokens = folder / "moe.csv", f"{folder / 'dense.csv'}: tokens"
    return Tables(
        tp_of(folder),
        Line.sum(tokens, others),
        Line.sum(tokens, mlp) if mlp else None,
        Line.sum(tokens, per_step) if per_step else None,
        Line.sum(f"{folder / 'per_sequence.csv'}: sequences", [(1, line) for line in sequences.values()]),
        # chunk and decodes first: which points of the others there are depends on them
        Grid(
            str(folder / "attention.csv"),
            ("prefill_chunk", "n_decode", "kv_prefill", "kv_decode"),
            [((chunk, count, before, context), time) for (chunk, before, count, context), time in attention],
        ),
        Grid(str(moe), COLUMNS["moe"][:2], _points(moe, "moe")) if moe.is_file() else None,
    )


def _lines(path: Path, kind: str) -> dict[str, Line]:
    points: dict[str, dict[float, float]] = {}
    for number, row in _rows(path, kind):
        layer, at, time = row
        points.setdefault(layer, {})[_number(path, number, at)] = _number(path, number, time) * 1e-6
    return {layer: Line(f"{path}: {layer}", of) for layer, of in points.items()}


def _points(path: Path, kind: str) -> list[tuple[tuple[float, ...], float]]:
    """[(axes, seconds)]"""
    found = {}
    for number, row in _rows(path, kind):
        *at, time = (_number(path, number, value) for value in row)
        found[tuple(at)] = time * 1e-6
    return list(found.items())


def _rows(path: Path, kind: str) -> list[tuple[int, list[str]]]:
    """[(line number, the columns of this kind)]"""
    columns = COLUMNS[kind]
    try:
        with open(path, newline="") as file:
            rows = list(csv.reader(file))
    except OSError as error:
        raise ModelError(
            f"{path}: {error.strerror}; tables are dense.csv, attention.csv and per_sequence.csv"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ModelError(f"{path}: no table: {error}") from None
    head = rows[0] if rows else []
    if missing := [name for name in columns if name not in head]:
        raise ModelError(f"{path}:1: no column {missing[0]} (needed: {', '.join(columns)})")
    places = [head.index(name) for name in columns]
    found = []
    for number, row in enumerate(rows[1:], 2):
        if len(row) > max(places):
            found.append((number, [row[place] for place in places]))
        elif row:
            raise ModelError(f"{path}:{number}: {len(row)} columns, where line 1 names {len(head)}")
    if not found:
        raise ModelError(f"{path}: the table is empty")
    return found


def _number(path: Path, number: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ModelError(f"{path}:{number}: {text!r} is no time and no count")
    return value


# -------------------------------------------------------------------------------------------------------------- cost


class Links(NamedTuple):
    """Between the devices of one model. A ring: each piece crosses it in as many hops as there are other devices."""

    bandwidth: float  # bytes a second, one way
    latency: float  # seconds a hop

    def all_reduce(self, num_bytes: float, size: int) -> float:
        return 2 * self.all_gather(num_bytes, size)

    def all_gather(self, num_bytes: float, size: int) -> float:
        """num_bytes: of what all have in the end. Likewise reduce_scatter of as much."""
        return (size - 1) * (self.latency + num_bytes / size / self.bandwidth)


class TableCost:
    """A StepCost by tables; of one of tp devices that are alike. Memory and moves are the formulas' of so many."""

    def __init__(
        self,
        tables: Tables,
        links: Links | None,
        pads: Sequence[int],
        device: Device,
        shape: Shape,
        numbers: Numbers,
        num_expert_ranks: int = 1,
    ):
        """links: None for one device. num_expert_ranks: devices that share a mixture's experts. pads: the sizes of
        captured forwards, ascending; a step of no more tokens than the largest takes as long as the next one. Raises
        ModelError if a part of the model is in no table, ConfigError if tp devices cannot have equal parts of it."""
        if shape.states is not None:
            raise ModelError("the model's layers keep recurrent states, and no table has what these take")
        if shape.experts is not None and tables.experts is None:
            raise ModelError("the model is a mixture of experts, and its tables have no moe.csv")
        if shape.num_dense_layers and tables.mlp is None:
            raise ModelError(f"the model has MLPs, and its dense.csv none of {', '.join(MLP)}")
        assert links is not None or tables.tp == 1
        self.shape, self.numbers, self.tables = shape, numbers, tables
        self._links, self._pads = links, pads
        self._num_expert_ranks = num_expert_ranks
        self._formulas = Cost(several(device, tables.tp), shape, numbers)
        self.kv_bytes_per_token = self._formulas.kv_bytes_per_token
        chunks = tables.attention.first_axis
        self._least_chunk = next((chunk for chunk in chunks if chunk), 1)
        self._most_chunk = chunks[-1]

    @property
    def weight_bytes(self) -> int:
        cut, held = self._formulas.weight_bytes, self._formulas.expert_bytes
        if (ranks := self._num_expert_ranks) <= (tp := self.tables.tp):
            return cut
        return cut - held + held * tp // ranks

    def block_size(self, asked: int) -> int:
        return asked

    def forward_bytes(self, num_tokens: int, num_samples: int) -> int:
        return self._formulas.forward_bytes(num_tokens, num_samples)

    def move_seconds(self, num_tokens: float, across: bool) -> float:
        return self._formulas.move_seconds(num_tokens, across)

    def step_seconds(self, step: Step) -> float:
        return self.group_seconds([step])

    def group_seconds(self, steps: Sequence[Step | None]) -> float:
        """Of data-parallel ranks that share their experts, one step each (None: none, so a token of no use): they meet
        at each layer's experts, and so the slowest is waited for. Captured forwards are as large for all."""
        tokens = [int(step.num_new.sum()) if step is not None else 1 for step in steps]
        most = self._padded(max(tokens))
        padded = [most] * len(steps) if most in self._pads else tokens
        own = [self._own_seconds(step, count) for step, count in zip(steps, padded, strict=True)]
        shape, total = self.shape, sum(padded)
        if shape.experts is None:
            return max(own)
        shared = self._experts(total, shape.experts)
        if self._num_expert_ranks > 1 and self._links is not None:
            shared += 2 * self._links.all_gather(total * shape.hidden_size * self.numbers.size, len(steps))
        return max(own) + shape.experts.num_layers * shared

    def _own_seconds(self, step: Step | None, num_tokens: int) -> float:
        """Of all but experts."""
        tables, shape = self.tables, self.shape
        step = step or Step.of(1)
        seconds = shape.num_layers * (tables.per_layer(num_tokens) + self._attention(step.num_new, step.start))
        if shape.num_dense_layers and tables.mlp is not None:
            seconds += shape.num_dense_layers * tables.mlp(num_tokens)
        if tables.per_step is not None:
            seconds += tables.per_step(num_tokens)
        if step.num_samples:
            seconds += tables.per_sequence(step.num_samples)
        return seconds + self._collectives(num_tokens, step.num_samples)

    def _padded(self, num_tokens: int) -> int:
        i = bisect_left(self._pads, num_tokens)
        return self._pads[i] if i < len(self._pads) else num_tokens

    def _attention(self, num_new: np.ndarray, start: np.ndarray) -> float:
        """num_new, start [R] int64. Of one layer."""
        is_decode = num_new == 1
        num_decodes = int(is_decode.sum())
        context = float(start[is_decode].mean()) if num_decodes else 0.0
        if num_decodes == len(num_new):
            return self.tables.attention(0, num_decodes, 0, context)
        chunks, before = num_new[~is_decode].astype(float), start[~is_decode].astype(float)
        seconds = self._chunks(chunks.tolist(), before.tolist())
        if num_decodes:
            longest = min(max(float(chunks.max()), self._least_chunk), self._most_chunk)
            mean = float((chunks * before).sum() / chunks.sum())
            beside, alone = ((count, mean, at) for count, at in ((num_decodes, context), (0, 0)))
            seconds += max(0.0, self.tables.attention(longest, *beside) - self.tables.attention(longest, *alone))
        return seconds

    def _chunks(self, chunks: Sequence[float], before: Sequence[float]) -> float:
        """Of prompts' pieces alone: one launch, and what each adds to it."""
        attention, least = self.tables.attention, self._least_chunk
        launch = attention(least, 0, 0, 0)
        pairs = zip(chunks, before, strict=True)
        return launch + sum(max(0.0, attention(max(chunk, least), 0, at, 0) - launch) for chunk, at in pairs)

    def _experts(self, num_tokens: int, of: Experts) -> float:
        """Of even use: an expert is read if any of the tokens has drawn it. Each rank has its share of the experts, and
        of what is computed with them."""
        assert self.tables.experts is not None
        num_read = of.number * (1 - (1 - of.per_token / of.number) ** num_tokens)
        ranks = self._num_expert_ranks
        return self.tables.experts(num_tokens / ranks, max(num_read / ranks, min(of.per_token, num_read)))

    def _collectives(self, num_tokens: int, num_samples: int) -> float:
        """Of tensor parallelism: a sum after the embedding, after each layer's attention and MLP; and the logits, of
        which each device has a part of the vocabulary."""
        size, shape = self.tables.tp, self.shape
        if size == 1 or self._links is None:
            return 0.0
        one = self._links.all_reduce(num_tokens * shape.hidden_size * self.numbers.size, size)
        logits = self._links.all_gather(num_samples * shape.vocab_size * self.numbers.size, size)
        return (1 + 2 * shape.num_layers) * one + (logits if num_samples else 0.0)
