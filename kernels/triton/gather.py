"""Launching what gathers a step's inputs, and what brings the state's changes to the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from minivllm.kernels.triton import inputs
from minivllm.upload import upload

BLOCK = 512  # columns, or tokens, of a program

Write = tuple[int, int, Sequence[int], int]  # row, first column, values, clear up to


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


def write_rows(table: Tensor, writes: Sequence[Write]) -> None:
    """Columns `first` and on of a row become `values`, those behind them and before `clear_to` zero. One copy and one
    launch for all writes, no two of which are of one row. table [rows, columns] int32."""
    assert table.dtype == torch.int32 and table.is_contiguous()
    header, values = [], []
    for row, first, new, clear_to in writes:
        header += row, first, len(values), len(new), clear_to
        values += new
    sent = upload(np.array(header + values, np.int32), table.device)
    inputs.write_rows_kernel[(len(writes),)](table, sent, table.stride(0), BLOCK=128, num_warps=1)
