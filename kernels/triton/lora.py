"""Launching LoRA's products on a GPU: the adapters of a layer by slot, and a step's tokens by adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from minivllm.kernels.triton import shrink_expand
from minivllm.kernels.triton.interpreted import INTERPRETED
from minivllm.kernels.triton.tiles import power_of_two
from minivllm.upload import upload

MAX_SPLITS = 8
BLOCK_N = 128


class Tasks:
    """The tokens of each slot in a step: [(slot, token rows [n] int64)], every slot at most once. For all layers."""

    def __init__(self, groups: Sequence[tuple[int, np.ndarray]], device: torch.device):
        self.block_m = 64 if max(len(tokens) for _, tokens in groups) > 32 else 16
        tasks, start = [], 0
        for slot, tokens in groups:
            end = start + len(tokens)
            tasks += [(slot, i, min(i + self.block_m, end)) for i in range(start, end, self.block_m)]
            start = end
        self.tasks = upload(np.array(tasks, np.int32), device)
        rows = np.concatenate([tokens for _, tokens in groups])
        self.tokens = upload(rows.astype(np.int32), device)
        self.max_token = int(rows.max())


class Sizes(NamedTuple):
    """What the kernels of one layer are compiled for."""

    n_in: int
    n_out: int
    rank: int
    num_parts: int

    @property
    def splits(self) -> int:
        return min(max(self.n_in // 512, 1), MAX_SPLITS)

    def shrink(self, block_m: int, upcast: bool) -> dict[str, Any]:
        ranks, block_r = self.rank * self.num_parts, min(self.rank, 64)
        fixed = {"N_IN": self.n_in, "RANKS": ranks, "SPLITS": self.splits, "UPCAST": upcast}
        return fixed | {"BLOCK_M": block_m, "BLOCK_R": block_r, "BLOCK_K": 64}

    def expand(self, block_m: int, upcast: bool) -> dict[str, Any]:
        fixed = {"RANK": self.rank, "RANKS": self.rank * self.num_parts, "N_OUT": self.n_out, "SPLITS": self.splits}
        return fixed | {"UPCAST": upcast, "BLOCK_M": block_m, "BLOCK_N": BLOCK_N}


class SlotTable:
    """The adapters of one linear layer, by slot. Slots are copies: zeros where nothing is added."""

    def __init__(
        self,
        num_slots: int,
        n_in: int,
        columns: Sequence[slice],
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """columns: which of the layer's outputs each part has, in order; each begins and ends at a multiple of 16."""
        assert all(part.start % 16 == part.stop % 16 == 0 for part in columns), columns
        self.columns = list(columns)
        self.sizes = Sizes(n_in, max(part.stop for part in columns), power_of_two(max_rank), len(columns))
        self.a = torch.zeros(num_slots, self.sizes.num_parts * self.sizes.rank, n_in, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, self.sizes.rank, self.sizes.n_out, dtype=dtype, device=device)
        bounds = [(part.start, part.stop - part.start) for part in columns]
        self.widest = max(width for _, width in bounds)
        self.bounds = torch.tensor(bounds, dtype=torch.int32, device=device)

    def grown(self, max_rank: int) -> SlotTable:
        """One for adapters of so many ranks, with those that are here."""
        rank, parts = self.sizes.rank, self.sizes.num_parts
        new = SlotTable(len(self.a), self.sizes.n_in, self.columns, max_rank, self.a.dtype, self.a.device)
        new.a.unflatten(1, (parts, -1))[:, :, :rank] = self.a.unflatten(1, (parts, rank))
        new.b[:, :rank] = self.b
        return new

    def clear(self, slot: int) -> None:
        self.a[slot] = 0
        self.b[slot] = 0

    def fill(self, slot: int, a: Tensor, parts: Sequence[tuple[slice, slice, Tensor]]) -> None:
        """a [num_ranks, n_in]; parts: (which ranks, which columns of y, b [ranks, columns])."""
        self.clear(slot)
        for ranks, columns, b in parts:
            first, rank = self.columns.index(columns) * self.sizes.rank, ranks.stop - ranks.start
            assert rank <= self.sizes.rank, (rank, self.sizes)
            self.a[slot, first : first + rank] = a[ranks]
            self.b[slot, :rank, columns] = b

    def add(self, y: Tensor, x: Tensor, tasks: Tasks) -> None:
        """y [T, n_out] += the delta of its slot applied to each row of x [T, n_in] that `tasks` names."""
        sizes, count = self.sizes, len(tasks.tokens)
        assert x.stride(1) == y.stride(1) == 1 and x.dtype == self.a.dtype, (x.stride(), y.stride(), x.dtype)
        assert x.shape[1] == sizes.n_in and y.shape[1] == sizes.n_out and tasks.max_token < len(x) == len(y)
        upcast = INTERPRETED and x.dtype == torch.bfloat16
        hidden = x.new_empty(sizes.splits, count, sizes.num_parts * sizes.rank, dtype=torch.float32)
        constants = sizes.shrink(tasks.block_m, upcast)
        shrink_expand.shrink_kernel[(len(tasks.tasks), constants["RANKS"] // constants["BLOCK_R"], sizes.splits)](
            *(x, self.a, tasks.tasks, tasks.tokens, hidden, x.stride(0), count),
            **constants,
            num_warps=4,
        )
        shrink_expand.expand_kernel[(len(tasks.tasks), triton.cdiv(self.widest, BLOCK_N), sizes.num_parts)](
            *(hidden, self.b, tasks.tasks, tasks.tokens, self.bounds, y, y.stride(0), count),
            **sizes.expand(tasks.block_m, upcast),
            num_warps=4,
        )
