"""The tables of GatherInputs in a device's memory, where the forward reads them.

    apply      what a plan adds                    a copy and a launch for each table that it changes
    build      rows, where they start, how many    one copy, a launch for the tokens and one for the block tables
    append     the tokens of the step              where they go is copied, and a launch

Nothing here waits for the device: every copy to it is queued (upload.py), every size follows from counts that the host
has, and nothing comes back. So the host may be steps ahead, and three things keep it from harm:

    rows      A row is given to another request, and written for it, while the step that reads it for the one before is
              still running. But that step was launched first, and all launches go through one stream: a write is done
              behind whatever was to read the old content.
    memory    What is staged lies in pinned memory until it has been copied. It is torch's, which gives it out again
              only behind the copy; nobody else writes there.
    columns   A batch's columns are new memory in each step. What is freed here while the device reads it is given out
              again to what the same stream does later.

A row behind the last one belongs to nobody. Its tokens are 0 and all its blocks the spare one: padding requests of a
whole forward have it, and are gathered like any other (batch.py: pad_requests).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.batch import BatchKey, InputSizes
from minivllm.runner.tables import Columns, Step
from minivllm.upload import select, upload

if TYPE_CHECKING:
    from minivllm.kernels.dispatch import Dispatch

Write = tuple[int, int, Sequence[int], int]  # row, first column, values, clear up to
Tokens = Sequence[Tensor]  # token_ids, positions, slots: each [padded tokens] int64


class Launches(NamedTuple):
    """What is done on the device. Tables are [rows, columns] int32."""

    write_rows: Callable[[Tensor, list[Write]], None]
    # tokens, block tables, rows [R], starts [R], query_start [R + 1] int32, padded tokens, block size, spare block
    gather_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, int], Tokens]
    gather_rows: Callable[[Tensor, Tensor, int], Tensor]  # table, rows [R], width -> [R, width]


class StagedRows:
    """A table on the device whose changes are collected on the host, a piece for each row."""

    def __init__(self, table: Tensor, write_rows: Callable[[Tensor, list[Write]], None]):
        self.table = table
        self._write_rows = write_rows
        self._writes: dict[int, Write] = {}  # by row

    def stage(self, row: int, first: int, values: Sequence[int], clear_to: int = 0) -> None:
        """Columns `first` and on become `values`, those behind them and before `clear_to` zero. A second write of a row
        must go on where the first one ended."""
        if row in self._writes:
            _, begin, earlier, clear = self._writes[row]
            assert first == begin + len(earlier), f"row {row}: columns {begin} to {begin + len(earlier)}, then {first}"
            first, values, clear_to = begin, [*earlier, *values], max(clear, clear_to)
        assert 0 <= row < len(self.table) and max(first + len(values), clear_to) <= self.table.shape[1]
        self._writes[row] = row, first, values, clear_to

    def write(self) -> None:
        if self._writes:
            self._write_rows(self.table, list(self._writes.values()))
            self._writes = {}


class DeviceTables:
    on_device: ClassVar[bool] = True

    def __init__(self, sizes: InputSizes, device: torch.device, launches: Launches):
        self.sizes, self.device, self._launches = sizes, device, launches
        self._nobody = sizes.max_rows
        self.token_ids = StagedRows(self._zeros(sizes.max_model_len), launches.write_rows)
        self.stage_tokens = self.token_ids.stage
        # Of each KV group; behind a row's blocks: 0.
        self.block_tables = [StagedRows(self._zeros(sizes.max_blocks), launches.write_rows) for _ in self._groups()]
        for own in self.block_tables:
            own.table[self._nobody] = sizes.spare_block
        self.stage_blocks = self.block_tables[0].stage if sizes.num_groups == 1 else self._stage_by_group

    def _zeros(self, width: int) -> Tensor:
        return torch.zeros(self.sizes.max_rows + 1, width, dtype=torch.int32, device=self.device)

    def _groups(self) -> range:
        return range(self.sizes.num_groups)

    def _stage_by_group(self, row: int, start: int, blocks: Sequence[int], clear_to: int = 0) -> None:
        for group, own in enumerate(self.block_tables):
            count = self.sizes.num_groups
            own.stage(row, start // count, blocks[group::count], clear_to // count)

    def write(self) -> None:
        self.token_ids.write()
        for own in self.block_tables:
            own.write()

    def gather(self, step: Step, key: BatchKey, width: int) -> Columns:
        """Of a whole forward the block tables have rows for its padding requests too."""
        rows, *bounds = self._send(step, key)
        sizes = key.num_tokens, self.sizes.block_size, self.sizes.spare_block
        found = []
        for own in self.block_tables:
            tokens = self._launches.gather_tokens(self.token_ids.table, own.table, rows, *bounds, *sizes)
            found.append(Columns(*tokens, self._launches.gather_rows(own.table, rows, width)))
        if len(found) == 1:
            return found[0]
        stacked = (torch.stack(list(each)) for each in zip(*(columns[2:] for columns in found), strict=True))
        return Columns(*found[0][:2], *stacked)

    def _send(self, step: Step, key: BatchKey) -> tuple[Tensor, Tensor, Tensor]:
        """rows, start [R] int64 and query_start [R + 1] int32, in one copy. Each begins where 16 bytes do: what a
        pointer is aligned to is part of what Triton compiles for, and every step shall find that compiled."""
        num_real = len(step.rows)
        count = key.num_tokens // key.queries if key.whole else num_real
        room = count + count % 2
        sent = np.zeros(2 * room + count // 2 + 1, np.int64)
        rows, start, query_start = sent[:count], sent[room : room + count], sent[2 * room :].view(np.int32)[: count + 1]
        rows[:num_real], start[:num_real], query_start[: num_real + 1] = step.rows, step.start, step.query_start
        rows[num_real:] = self._nobody
        query_start[num_real + 1 :] = query_start[num_real] + key.queries * np.arange(1, count - num_real + 1)
        there = upload(sent, self.device)
        return there[:count], there[room : room + count], there[2 * room :].view(torch.int32)[: count + 1]

    def put(self, rows: np.ndarray, at: np.ndarray, tokens: np.ndarray | Tensor) -> None:
        # A request's very last token is never fed back and may lie past the longest length: it has no place here.
        table = self.token_ids.table
        fits = np.flatnonzero(at < table.shape[1])
        if not len(fits):
            return
        places = rows[fits] * table.shape[1] + at[fits]
        if isinstance(tokens, Tensor):
            places, tokens = upload(places, self.device), select(tokens, fits)
        else:
            places, tokens = upload(np.stack([places, tokens[fits]]), self.device)
        table.view(-1).index_copy_(0, places, tokens.to(torch.int32))


# --- in torch


def write_rows(table: Tensor, writes: list[Write]) -> None:
    """As kernels.triton.gather.write_rows."""
    width = table.shape[1]
    begins = np.array([row * width + first for row, first, _, _ in writes])
    pieces = [[*values, *[0] * (clear_to - first - len(values))] for _, first, values, clear_to in writes]
    lengths = np.array([len(piece) for piece in pieces])
    values = np.array([value for piece in pieces for value in piece], np.int64)
    places = np.arange(len(values)) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    sent = upload(np.stack([places, values]), table.device)
    table.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))


def gather_tokens(
    tokens: Tensor,
    tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    query_start: Tensor,
    num_padded: int,
    block_size: int,
    spare_block: int,
) -> Tokens:
    """As kernels.triton.gather.gather_tokens."""
    at = torch.arange(num_padded, dtype=torch.int32, device=rows.device)
    inside = at < query_start[-1]
    request = torch.searchsorted(query_start[1:], at, right=True).clamp(max=len(rows) - 1)
    position = torch.where(inside, starts[request] + at - query_start[request], 0)
    row = rows[request]
    block = tables[row, position // block_size].long()
    slots = torch.where(inside, block * block_size + position % block_size, spare_block * block_size)
    return torch.where(inside, tokens[row, position].long(), 0), position, slots


def gather_rows(table: Tensor, rows: Tensor, width: int) -> Tensor:
    return table[:, :width].index_select(0, rows)


TORCH = Launches(write_rows, gather_tokens, gather_rows)


# --- in Triton


def kernel_write_rows(table: Tensor, writes: list[Write]) -> None:
    from minivllm.kernels.triton import gather

    gather.write_rows(table, writes)


def kernel_gather_tokens(
    tokens: Tensor,
    tables: Tensor,
    rows: Tensor,
    starts: Tensor,
    query_start: Tensor,
    num_padded: int,
    block_size: int,
    spare_block: int,
) -> Tokens:
    from minivllm.kernels.triton import gather

    # Each column begins where 16 bytes do, as in DeviceTables._send.
    out = torch.empty(3, num_padded + num_padded % 2, dtype=torch.int64, device=rows.device)[:, :num_padded]
    return gather.gather_tokens(tokens, tables, rows, starts, query_start, gather.Inputs(*out), block_size, spare_block)


def kernel_gather_rows(table: Tensor, rows: Tensor, width: int) -> Tensor:
    from minivllm.kernels.triton import gather

    return gather.gather_rows(table, rows, table.new_empty(len(rows), width))


def choose_launches(kernels: Dispatch, block_size: int) -> Launches:
    launches = TORCH
    if kernels.uses("staged writes", lambda device: _proofs().write_rows(device)):
        launches = launches._replace(write_rows=kernel_write_rows)
    if kernels.uses("gather inputs", lambda device: _proofs().gather_tokens(device, block_size)):
        launches = launches._replace(gather_tokens=kernel_gather_tokens)
    if kernels.uses("gather rows", lambda device: _proofs().gather_rows(device)):
        launches = launches._replace(gather_rows=kernel_gather_rows)
    return launches


def _proofs():
    from minivllm.kernels.triton import proofs

    return proofs
