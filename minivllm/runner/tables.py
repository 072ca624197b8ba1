"""The tables that GatherInputs gathers from: their seam, and those of a CPU, numpy arrays in the worker's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import numpy as np

from minivllm.batch import BatchKey, InputSizes, by_group

if TYPE_CHECKING:
    from torch import Tensor


class Step(NamedTuple):
    """What the host has to say of a step. Arrays [R], in plan order."""

    rows: np.ndarray  # int64
    start: np.ndarray  # int64: position of the first token to compute
    num_new: np.ndarray  # int64
    query_start: np.ndarray  # [R + 1] int32


class Columns(NamedTuple):
    """As in InputBatch; numpy's, or tensors where the tables are."""

    token_ids: np.ndarray | Tensor  # [padded T] int64
    positions: np.ndarray | Tensor  # [padded T] int64
    slot_mapping: np.ndarray | Tensor  # [padded T] int64; of several KV groups [groups, padded T]
    block_tables: np.ndarray | Tensor  # [R, width] int32; of several [groups, R, width]


class Tables(Protocol):
    """token_ids [max_rows, max_model_len] and block_tables [max_rows, max_blocks], wherever they lie. Of several KV
    groups blocks are staged as a plan has them, one of each group in turn, and counted together."""

    on_device: bool

    def stage_tokens(self, row: int, start: int, tokens: Sequence[int]) -> None: ...

    def stage_blocks(self, row: int, start: int, blocks: Sequence[int], clear_to: int = 0) -> None:
        """Behind the blocks, columns before clear_to become 0."""
        ...

    def write(self) -> None:
        """What was staged, each row's pieces in the order in which they were."""
        ...

    def gather(self, step: Step, key: BatchKey, width: int) -> Columns: ...

    def put(self, rows: np.ndarray, at: np.ndarray, tokens: np.ndarray | Tensor) -> None:
        """tokens [N] int64, at these places [N] of these rows [N]. A place behind a row's end keeps nothing."""
        ...


class StagedWrites:
    """A table [rows, width] that is written piece by piece in Python and all at once in memory: the pieces of a step
    travel as one list of values and one of places. Of two pieces that overlap the later one stays."""

    def __init__(self, rows: int, width: int, dtype: type):
        # Pages are mapped on first touch, so room for the longest request in every row costs nothing by itself.
        self.array = np.zeros((rows, width), dtype)
        self.flat = self.array.reshape(-1)
        self.width = width
        self._starts: list[int] = []  # in `flat`
        self._lengths: list[int] = []
        self._values: list[int] = []

    def stage(self, row: int, start: int, values: Sequence[int]) -> None:
        assert start + len(values) <= self.width, "a piece reaches into the next row"
        self._starts.append(row * self.width + start)
        self._lengths.append(len(values))
        self._values += values

    def write(self) -> None:
        if not self._starts:
            return
        lengths = np.array(self._lengths)
        before = np.cumsum(lengths) - lengths
        places = np.repeat(np.array(self._starts) - before, lengths) + np.arange(len(self._values))
        self.flat[places] = self._values  # numpy keeps the last value of a place that is named twice
        self._starts, self._lengths, self._values = [], [], []


class HostTables:
    on_device: ClassVar[bool] = False

    def __init__(self, sizes: InputSizes):
        self.sizes = sizes
        self.token_ids = StagedWrites(sizes.max_rows, sizes.max_model_len, np.int32)
        width = sizes.max_blocks * sizes.num_groups
        self.block_tables = StagedWrites(sizes.max_rows, width, np.int32)  # behind a row's blocks: 0
        self._tables = self.block_tables.array.reshape(sizes.tables_shape)

    def stage_tokens(self, row: int, start: int, tokens: Sequence[int]) -> None:
        self.token_ids.stage(row, start, tokens)

    def stage_blocks(self, row: int, start: int, blocks: Sequence[int], clear_to: int = 0) -> None:
        self.block_tables.stage(row, start, [*blocks, *[0] * (clear_to - start - len(blocks))])

    def write(self) -> None:
        self.token_ids.write()
        self.block_tables.write()

    def gather(self, step: Step, key: BatchKey, width: int) -> Columns:
        rows, at = step.rows, step.start  # of each token
        block_size, num_tokens = self.sizes.block_size, int(step.query_start[-1])
        if num_tokens > len(rows):
            rows = np.repeat(rows, step.num_new)
            at = np.arange(num_tokens) + np.repeat(step.start - step.query_start[:-1], step.num_new)
        block, offset = np.divmod(at, block_size)
        columns = np.zeros((2 + self.sizes.num_groups, key.num_tokens), np.int64)
        token_ids, positions = columns[:2]
        slot_mapping = columns[2] if self.sizes.num_groups == 1 else columns[2:]
        token_ids[:num_tokens] = self.token_ids.flat[rows * self.token_ids.width + at]
        positions[:num_tokens] = at
        slots = slot_mapping[..., :num_tokens]
        slots[:] = self._tables[rows, block].T
        slots *= block_size
        slots += offset
        slot_mapping[..., num_tokens:] = self.sizes.spare_block * block_size
        return Columns(token_ids, positions, slot_mapping, by_group(self._tables[step.rows, :width]))

    def put(self, rows: np.ndarray, at: np.ndarray, tokens: np.ndarray) -> None:
        # A request's very last token is never fed back and may lie past the longest length: it has no place here.
        fits = at < self.token_ids.width
        self.token_ids.flat[rows[fits] * self.token_ids.width + at[fits]] = tokens[fits]
