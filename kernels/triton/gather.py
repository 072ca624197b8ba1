"""Launching what gathers a step's inputs, and what brings the state's changes to the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from minivllm.kernels.triton import inputs

BLOCK = 512  # columns, or tokens, of a program


class Inputs(NamedTuple):
    token_ids: Tensor  # [padded tokens] int64
    positions: Tensor  # [padded tokens] int64
    slots: Tensor  # [padded tokens] int64


def gather_tokens(
    all_tokens: Tensor,
    all_tables: Tensor,
    rows: Tensor,
    firsts: Tensor,
    query_start: Tensor,
    out: Inputs,
    block_size: int,
    spare_block: int,
) -> Inputs:
    """all_tokens [rows, max_model_len], all_tables [rows, max_blocks] int32: of all requests. rows, firsts [R] int64:
    which take part, and the positions of their first tokens; query_start [R + 1] int32. Tokens past query_start[R]
    become token 0 at position 0, in spare_block."""
    count = len(rows)
    assert all_tokens.dtype == all_tables.dtype == query_start.dtype == torch.int32
    assert all_tokens.stride(1) == all_tables.stride(1) == 1
    assert rows.dtype == firsts.dtype == torch.int64 and firsts.shape == (count,) and query_start.shape == (count + 1,)
    assert all(x.dtype == torch.int64 and x.shape == out.slots.shape and x.is_contiguous() for x in out)
    padded = len(out.slots)
    inputs.gather_tokens_kernel[(triton.cdiv(padded, BLOCK),)](
        *(all_tokens, all_tables, rows, firsts, query_start, *out, count, padded, spare_block * block_size),
        *(all_tokens.stride(0), all_tables.stride(0)),
        PAGE=block_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


def gather_rows(table: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """table [all rows, columns] int32, rows [R] int64 -> the first columns of those rows, in out [R, width]."""
    assert table.dtype == out.dtype == torch.int32 and rows.dtype == torch.int64
    assert table.stride(1) == out.stride(1) == 1 and len(out) == len(rows) and out.shape[1] <= table.shape[1]
    assert table.is_contiguous()  # a row's end is then known from its stride
    width = out.shape[1]
    inputs.gather_rows_kernel[(len(rows), triton.cdiv(width, BLOCK))](
        *(table, rows, out, width, table.stride(0), out.stride(0)), BLOCK=BLOCK, num_warps=4
    )
    return out


class StagedRows:
    """A table [rows, columns] int32 on the device whose changes are collected on the host: one copy, one launch."""

    def __init__(self, table: Tensor):
        assert table.dtype == torch.int32 and table.is_contiguous()
        self.table = table
        self._writes: dict[int, tuple[int, list[int], int]] = {}  # row: (first column, values, clear up to)

    def stage(self, row: int, first: int, values: Sequence[int], clear_to: int = 0) -> None:
        """Columns `first` and on become `values`, those behind them and before `clear_to` zero. A second write of a row
        must go on where the first one ended."""
        if row in self._writes:
            begin, earlier, clear = self._writes[row]
            assert first == begin + len(earlier), f"row {row}: columns {begin} to {begin + len(earlier)}, then {first}"
            first, values, clear_to = begin, [*earlier, *values], max(clear, clear_to)
        assert 0 <= row < len(self.table) and max(first + len(values), clear_to) <= self.table.shape[1]
        self._writes[row] = first, list(values), clear_to

    def apply(self) -> None:
        """To the device, in the order of its stream."""
        if not self._writes:
            return
        header, values = [], []
        for row, (first, new, clear_to) in self._writes.items():
            header += row, first, len(values), len(new), clear_to
            values += new
        self._writes = {}
        both = torch.from_numpy(np.array(header + values, np.int32)).to(self.table.device)
        num_writes = len(header) // 5
        inputs.write_rows_kernel[(num_writes,)](
            *(self.table, both, both[len(header) :], self.table.stride(0)), BLOCK=128, num_warps=1
        )
