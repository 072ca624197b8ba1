"""What a step takes by operators: tables of vLLM's kernels that ai-dynamo/aiconfigurator timed one by one on a GPU, in
the place of a roofline's formulas. A file of parquet a kind of operator, named <system>-<what>_perf.parquet:

    gemm                        gemm_dtype, m, n, k: [m, k] x [k, n]
    context_attention           batch_size prompts of isl tokens; heads, heads of K and V, their size, window
    generation_attention        batch_size requests, each with step + 1 tokens in the cache
    moe                         num_tokens over all ranks; sizes of the whole mixture, moe_tp_size, moe_ep_size
    custom_allreduce, nccl      num_gpus, message_size: bytes

Latencies are in ms. Between points a time's logarithm is linear in the logarithms of the sizes, and the last two points
say how it goes on. What no table has (elementwise kernels, heads or experts of other sizes, latent attention) is by the
formulas of minivllm/simulate/cost.py, and counted: OperatorCost.by_formulas. pyarrow reads the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minivllm.errors import ConfigError
from minivllm.simulate import operations
from minivllm.simulate.cost import Cost, Numbers, Step
from minivllm.simulate.devices import Device, several
from minivllm.simulate.host import HostCost
from minivllm.simulate.operations import Work
from minivllm.simulate.shape import Experts, Shape

Columns = Mapping[str, np.ndarray]

DISTRIBUTION = "power_law_1.01"  # how tokens choose experts: few are chosen by many; what fit_devices takes too


def read(folder: Path, system: str, what: str, **named: str | int) -> Columns | None:
    """The rows that have these values, seconds among the columns; None: there are none. A column that an older table
    lacks has one value in it."""
    for columns in _files(folder, system, what):
        kept = np.ones(len(columns["seconds"]), bool)
        for name, value in named.items():
            if name in columns:
                kept &= columns[name] == value
        if kept.any():
            return where({name: column for name, column in columns.items() if column.dtype.kind in "if"}, kept)
    return None


@cache
def _files(folder: Path, system: str, what: str) -> list[Columns]:
    import pyarrow.parquet as parquet

    found = []
    for file in sorted(folder.glob(f"{system}[-_]*{what}_perf.parquet")):
        table = parquet.read_table(file)
        columns = {name: np.array(table[name].to_pylist()) for name in table.column_names}
        columns = {name: c.astype(float) if c.dtype.kind in "if" else c for name, c in columns.items()}
        found.append(columns | {"seconds": columns["latency"] / 1e3})
    return found


def where(columns: Columns, kept: np.ndarray) -> Columns:
    return {name: column[kept] for name, column in columns.items()}


# -------------------------------------------------------------------------------------------------------------- grids


class Grid:
    """Seconds by one, two or three sizes. Where a point was measured twice (by two kernels), the faster counts."""

    def __init__(self, sizes: Sequence[np.ndarray], seconds: np.ndarray):
        """sizes: of each axis, [rows] each; seconds [rows]. An axis may have one value: then it does not matter."""
        places = [np.unique(size, return_inverse=True) for size in sizes]
        self._axes = [np.log(values) for values, _ in places]
        found = np.full([len(axis) for axis in self._axes], np.inf)
        np.minimum.at(found, tuple(index for _, index in places), np.log(seconds))
        self._logs = _filled(found, self._axes)

    def __call__(self, *sizes: float) -> float:
        logs = self._logs
        for axis, size in zip(self._axes, sizes, strict=True):
            logs = _between(axis, logs, np.log(size))
        return float(np.exp(logs))

    def line(self, *sizes: float) -> Grid:
        """Over the first axis alone, at these sizes of the others."""
        logs = np.moveaxis(self._logs, 0, -1)
        for axis, size in zip(self._axes[1:], sizes, strict=True):
            logs = _between(axis, logs, np.log(size))
        return Grid([np.exp(self._axes[0])], np.exp(logs))


def _between(axis: np.ndarray, values: np.ndarray, at: float) -> np.ndarray:
    """values [len(axis), ...] -> [...]: linear between the two places around `at`, and beyond the last two."""
    if len(axis) == 1:
        return values[0]
    i = int(np.clip(np.searchsorted(axis, at) - 1, 0, len(axis) - 2))
    share = max(0.0, (at - axis[i]) / (axis[i + 1] - axis[i]))  # below the first: as the first
    return values[i] + share * (values[i + 1] - values[i])


def _filled(logs: np.ndarray, axes: Sequence[np.ndarray]) -> np.ndarray:
    """Points that were not measured (inf): from those before and behind them along one axis, the first that can."""
    for number, axis in enumerate(axes):
        lines = np.moveaxis(logs, number, 0).reshape(len(axis), -1).T  # views of a copy, written back below
        for line in lines:
            known = np.isfinite(line)
            if 2 <= known.sum() < len(line):
                for i in np.flatnonzero(~known):
                    line[i] = _between(axis[known], line[known], axis[i])
        moved = np.moveaxis(logs, number, 0)
        moved[...] = lines.T.reshape(moved.shape)
    return np.where(np.isfinite(logs), logs, np.max(logs[np.isfinite(logs)]))


# ------------------------------------------------------------------------------------------------------------- tables


class Kernels(NamedTuple):
    """In which numbers a server computes, as the tables name them."""

    linear: str  # gemm_dtype of a layer's products
    experts: str | None  # moe_dtype
    cached: str  # kv_cache_dtype


class Fastest(list[Grid]):
    """What the fastest of them takes."""

    def __call__(self, *sizes: float) -> float:
        return min(grid(*sizes) for grid in self)


# Products in blocks of fp8 were timed with what their launches take the host, 60 to 260 us, which a captured forward
# does not have; those with one scale, captured, compute and move the same but for the scales.
ALIKE = {"fp8_block": ("fp8_block", "fp8")}


# Experts that were not measured with inputs in 8 bits: as with 16, or what a formula says of 8 where that is less.
WIDER_INPUTS = {"w4a8_mxfp4_mxfp8": "w4a16_mxfp4"}


class Tables:
    """Of one system. Grids are made when they are first asked for; None: nothing was measured."""

    def __init__(self, folder: Path, system: str):
        self.folder, self.system = folder, system
        self._grids: dict[Any, Grid | None] = {}

    def _kept(self, key: Any, make: Callable[[], Grid | None]) -> Grid | None:
        if key not in self._grids:
            self._grids[key] = make()
        return self._grids[key]

    def _grid(self, what: str, axes: Sequence[str], add: float = 0.0, **named: str | int) -> Grid | None:
        """add: to the last axis."""

        def make() -> Grid | None:
            if (table := read(self.folder, self.system, what, **named)) is None:
                return None
            sizes = [table[name] for name in axes]
            return Grid([*sizes[:-1], sizes[-1] + add], table["seconds"])

        return self._kept((what, *sorted(named.items())), make)

    def product(self, dtype: str, num_in: int, num_out: int) -> Fastest | None:
        """By rows."""
        found = [self._product(one, num_in, num_out) for one in ALIKE.get(dtype, (dtype,))]
        return Fastest([grid for grid in found if grid]) if any(found) else None

    def _product(self, dtype: str, num_in: int, num_out: int) -> Grid | None:
        if (grid := self._grid("gemm", "mnk", gemm_dtype=dtype)) is None:
            return None
        return self._kept((dtype, num_in, num_out), lambda: grid.line(num_out, num_in))

    def attention(
        self, is_decode: bool, heads: int, kv_heads: int, size: int, cached: str, window: int | None
    ) -> Grid | None:
        """By requests and their tokens."""
        named = {"num_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "kv_cache_dtype": cached}
        what, last, add = ("generation", "step", 1) if is_decode else ("context", "isl", 0)
        return self._grid(f"{what}_attention", ("batch_size", last), add, **named, window_size=window or 0)

    def experts(self, dtype: str, sizes: Experts, hidden: int, tp: int, ep: int) -> Grid | None:
        """By tokens of all ranks. sizes: of the whole mixture."""
        named = _mixture(dtype, sizes, hidden)
        return self._grid("moe", ("num_tokens",), **named, moe_tp_size=tp, moe_ep_size=ep)

    def experts_splits(self, dtype: str, sizes: Experts, hidden: int, ep: int) -> list[int]:
        """The tensor-parallel sizes that were measured with so many ranks of experts."""
        table = read(self.folder, self.system, "moe", **_mixture(dtype, sizes, hidden), moe_ep_size=ep)
        return [] if table is None else sorted({int(tp) for tp in table["moe_tp_size"]})

    def all_reduce(self, count: int) -> Grid | None:
        """By bytes, in a captured forward."""
        return self._grid("custom_allreduce", ("message_size",), kernel_source="vLLM_custom_graph", num_gpus=count)

    def nccl(self, what: str, count: int) -> Grid | None:
        return self._grid("nccl", ("message_size",), op_name=what, nccl_dtype="half", num_gpus=count)


def _mixture(dtype: str, sizes: Experts, hidden: int) -> dict[str, str | int]:
    named: dict[str, str | int] = {"moe_dtype": dtype, "hidden_size": hidden, "inter_size": sizes.intermediate_size}
    return named | {"topk": sizes.per_token, "num_experts": sizes.total, "distribution": DISTRIBUTION}


# --------------------------------------------------------------------------------------------------------------- cost


class Split(NamedTuple):
    """How a model lies on devices: each of dp engine cores on tp of them, experts cut in moe_tp and over moe_ep."""

    tp: int = 1
    dp: int = 1
    moe_tp: int = 1
    moe_ep: int = 1

    @property
    def num_devices(self) -> int:
        return self.tp * self.dp


class Measured(NamedTuple):
    """In the place of a Work: what it takes is known."""

    seconds: float


class OperatorCost(Cost):
    """A StepCost: of one of the dp engine cores, the others doing what it does."""

    def __init__(
        self,
        tables: Tables,
        kernels: Kernels,
        split: Split,
        pads: Sequence[int],
        host: HostCost,
        device: Device,
        shape: Shape,
        numbers: Numbers,
    ):
        """pads: tokens of captured forwards, ascending, to which a smaller step is padded. host: for which the device
        waits in each step. Raises ConfigError for a model that so many devices cannot share."""
        spreads = split.moe_ep > 1 and split.dp == 1
        super().__init__(replace(several(device, split.tp), spreads_experts=spreads), shape, numbers)
        self.tables, self.kernels, self.split, self.pads, self.host = tables, kernels, split, pads, host
        self.by_formulas: set[str] = set()  # what no table had
        self._whole = whole = shape.experts
        if split.dp > 1:  # attention and what every token goes through are whole on each, experts spread over all
            if whole is None or split.tp > 1 or split.moe_tp > 1 or split.moe_ep != split.dp:
                raise ConfigError("data-parallel engine cores are modelled on a device each, with its part of experts")
            self._part = shape.rank(split.dp)
        self._products = cache(self._product_line)

    # ---------------------------------------------------------------------------------------------------------- steps

    def step_seconds(self, step: Step) -> float:
        return super().step_seconds(step) + self.host.seconds(len(step.num_new))

    def run_seconds(self, start: np.ndarray, num_steps: int) -> float:
        """Of so many steps in which each request decodes a token, from start [R] int64 on: what they take grows as
        contexts do, evenly."""
        one = np.ones(len(start), np.int64)
        first = self.step_seconds(Step(one, start, len(start)))
        if num_steps == 1:
            return first
        last = self.step_seconds(Step(one, start + num_steps - 1, len(start)))
        return num_steps * (first + last) / 2

    def _fixed_seconds(self, num_tokens: int, num_samples: int) -> float:
        padded = next((size for size in self.pads if size >= num_tokens), num_tokens)
        return super()._fixed_seconds(padded, num_samples)

    def seconds(self, work: Work | Measured) -> float:
        return work.seconds if isinstance(work, Measured) else super().seconds(work)

    # ----------------------------------------------------------------------------------------------------- operations

    def _linear(self, num_rows: int, num_in: int, num_out: int) -> Work | Measured:
        if (line := self._products(self.kernels.linear, num_in, num_out)) is None:
            return super()._linear(num_rows, num_in, num_out)
        return Measured(line(num_rows))

    def _product(self, num_rows: int, num_in: int, num_out: int) -> Work | Measured:
        if not num_rows or (line := self._products("bfloat16", num_in, num_out)) is None:
            return super()._product(num_rows, num_in, num_out)
        return Measured(line(num_rows))

    def _product_line(self, dtype: str, num_in: int, num_out: int) -> Fastest | None:
        if (found := self.tables.product(dtype, num_in, num_out)) is None:
            self.by_formulas.add("products")
        return found

    def _known(self, what: str, grid: Grid | None) -> Grid | None:
        if grid is None:
            self.by_formulas.add(what)
        return grid

    def _attention(self, num_new: np.ndarray, start: np.ndarray, window: int | None, is_decode: bool) -> Any:
        if self._part.latent is not None:
            return self._latent_attention(num_new, start, window, is_decode)
        heads, kv_heads, size = self._part.num_heads, self._part.num_kv_heads, self._part.head_size
        found = self.tables.attention(is_decode, heads, kv_heads, size, self.kernels.cached, window)
        if (grid := self._known("decode attention" if is_decode else "prefill attention", found)) is None:
            return super()._attention(num_new, start, window, is_decode)
        count, ends = len(num_new), start + num_new
        if is_decode:
            return Measured(grid(count, float(ends.mean())))
        # a chunk behind others takes what the prompt up to its end takes, less what it takes up to its start
        before = sum(grid(count, length) for length in start.tolist() if length)
        return Measured((sum(grid(count, length) for length in ends.tolist()) - before) / count)

    def _latent_attention(self, num_new: np.ndarray, start: np.ndarray, window: int | None, is_decode: bool) -> Any:
        """By formulas, at the rates that the tables' kernels reach: their constant is what launches took the host,
        which a captured forward does not have."""
        self.by_formulas.add("latent attention")
        work = super()._attention(num_new, start, window, is_decode)
        plain = self.device.reached_by(operations.DECODE if is_decode else operations.PREFILL)
        latent = self.device.reached_by(work.kind)
        return Measured(self.seconds(work) - work.num_kernels * max(0.0, latent.constant - plain.constant))

    def _experts(self, num_tokens: int, of: Experts) -> Work | Measured:
        num_tokens *= self.split.dp
        formula = super()._experts(num_tokens, of)
        if (dtype := self.kernels.experts) is None:
            return formula
        if (found := self._measured_experts(dtype, num_tokens, of, formula)) is not None:
            return found
        self.by_formulas.add("experts")
        if (wider := WIDER_INPUTS.get(dtype)) is None:
            return formula
        found = self._measured_experts(wider, num_tokens, of, formula)
        return formula if found is None else min(found, Measured(self.seconds(formula)))

    def _measured_experts(self, dtype: str, num_tokens: int, of: Experts, formula: Work) -> Measured | None:
        """Of a split that was not measured: of the most alike that was, in proportion to what the formula says."""
        (tp, ep), hidden, whole = self.split[2:], self.shape.hidden_size, self._whole
        assert whole is not None
        if (grid := self.tables.experts(dtype, whole, hidden, tp, ep)) is not None:
            return Measured(grid(num_tokens))
        if not (others := self.tables.experts_splits(dtype, whole, hidden, ep)):
            return None
        self.by_formulas.add("experts")
        near = min(others, key=lambda other: abs(np.log(other / tp)))
        grid = self.tables.experts(dtype, whole, hidden, near, ep)
        assert grid is not None
        like = super()._experts(num_tokens, replace(of, intermediate_size=whole.intermediate_size // near))
        return Measured(grid(num_tokens) * self.seconds(formula) / self.seconds(like))

    # -------------------------------------------------------------------------------------------------------- joining

    def _joining_seconds(self, num_tokens: int, num_samples: int) -> float:
        if self.split.dp > 1:
            return self._exchange_seconds(num_tokens)
        if self.split.tp == 1:
            return 0.0
        if (line := self._known("all-reduces", self.tables.all_reduce(self.split.tp))) is None:
            return super()._joining_seconds(num_tokens, num_samples)
        return sum(count * line(size) for count, size in self._sums(num_tokens, num_samples) if size)

    def _exchange_seconds(self, num_tokens: int) -> float:
        """Before a mixture each core gets the tokens of all, behind it the sum of its own (vLLM's default,
        allgather_reducescatter)."""
        count = self.split.num_devices
        size = num_tokens * self.split.dp * self.shape.hidden_size * self.numbers.size
        assert self._whole is not None
        ways = [self.tables.nccl(what, count) for what in ("all_gather", "reduce_scatter")]
        if None in ways:
            raise ConfigError(f"{self.tables.system}: no table of NCCL among {count} devices")
        return self._whole.num_layers * sum(grid(size) for grid in ways if grid)
