"""What LoRA adds to a layer for a few tokens of several adapters, in one call (lora.cpp), for CPUs.

Its reference, slow and obviously right, is `minivllm.lora.layer.add_deltas_naive`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from minivllm.kernels.cpu import build

NAME = "lora"
MAX_PARTS = 3  # of a stacked layer: q, k, v
TASK_TOKENS = 8  # of one adapter, for one thread
RANKS, LINE, PANEL = 4, 64, 64  # lora.cpp's blocks: rows of A, bytes of a row, columns of B
DTYPES = (torch.bfloat16, torch.float32)


class _Part(ctypes.Structure):
    _fields_ = (
        ("b", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("first_rank", "rank", "first_row", "num_rows")),
    )


class _Delta(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("num_ranks", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
        ("parts", _Part * MAX_PARTS),
    )


class _Groups(ctypes.Structure):
    _fields_ = (("num_tasks", ctypes.c_int64), ("tasks", ctypes.c_void_p), ("tokens", ctypes.c_void_p))


def unsupported_reason() -> str | None:
    """Why the kernel cannot be used here, or None. The first call may compile."""
    return build.unsupported_reason(NAME)


@functools.cache
def _function():
    function, pointer, number = build.library(NAME).minivllm_lora, ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [*[pointer] * 4, *[number] * 3, pointer, number]
    function.restype = None
    return function


class Tasks:
    """The tokens of each slot in a step: [(slot, token rows [n] int64)], every slot at most once."""

    def __init__(self, groups: Sequence[tuple[int, np.ndarray]]):
        tasks, start = [], 0
        for slot, tokens in groups:
            end = start + len(tokens)
            tasks += [(slot, i, min(i + TASK_TOKENS, end)) for i in range(start, end, TASK_TOKENS)]
            start = end
        self._tasks = np.array(tasks, np.int64)
        self._tokens = np.concatenate([tokens for _, tokens in groups]).astype(np.int64)
        self.max_token = int(self._tokens.max())
        self._groups = _Groups(len(tasks), self._tasks.ctypes.data, self._tokens.ctypes.data)
        self.address = ctypes.addressof(self._groups)


class SlotTable:
    """The adapters of one linear layer, by slot, packed."""

    def __init__(self, num_slots: int, n_in: int, n_out: int):
        self.n_in, self.n_out, self.num_slots = n_in, n_out, num_slots
        self._slots = (_Delta * num_slots)()
        self._memory: list[Tensor | None] = [None] * num_slots  # that the slots point into
        self.address = ctypes.addressof(self._slots)
        self._function, self._parallel = _function(), build.torch_parallel()

    def clear(self, slot: int) -> None:
        self._slots[slot] = _Delta()
        self._memory[slot] = None

    def fill(self, slot: int, a: Tensor, parts: Sequence[tuple[slice, slice, Tensor]]) -> None:
        """a [num_ranks, n_in]; parts: (which ranks, which columns of y, b [ranks, columns])."""
        assert len(parts) <= MAX_PARTS and a.shape[1] == self.n_in and a.dtype in DTYPES
        packed = [pack_a(a), *(pack_b(b) for _, _, b in parts)]
        memory = torch.cat([x.flatten() for x in packed])  # each begins with a whole line
        address = memory.data_ptr()
        delta = _Delta(address, packed[0].shape[0] * RANKS, len(parts))
        for i, ((ranks, rows, b), before) in enumerate(zip(parts, packed, strict=False)):
            assert b.shape == (ranks.stop - ranks.start, rows.stop - rows.start)
            assert b.dtype is a.dtype and ranks.stop <= len(a) and rows.stop <= self.n_out
            address += before.nbytes
            delta.parts[i] = _Part(address, ranks.start, b.shape[0], rows.start, b.shape[1])
        self._slots[slot], self._memory[slot] = delta, memory

    def add(self, y: Tensor, x: Tensor, tasks: Tasks) -> None:
        """y [T, n_out] += the delta of its slot applied to each row of x [T, n_in] that `tasks` names."""
        x = x.contiguous()
        assert y.is_contiguous() and y.dtype is x.dtype and x.dtype in DTYPES, (y.stride(), y.dtype, x.dtype)
        assert x.shape[1] == self.n_in and y.shape[1] == self.n_out and tasks.max_token < len(x) == len(y)
        self._function(
            self.address,
            tasks.address,
            x.data_ptr(),
            y.data_ptr(),
            self.n_in,
            self.n_out,
            x.dtype is torch.bfloat16,
            self._parallel,
            torch.get_num_threads(),
        )


def pack_a(a: Tensor) -> Tensor:
    """a [ranks, n_in] -> [ranks / RANKS, lines, RANKS, elements of a line], zeros where a block goes beyond `a`."""
    width = LINE // a.itemsize
    whole = pad(a, (0, -a.shape[1] % width, 0, -a.shape[0] % RANKS))
    return whole.view(len(whole) // RANKS, RANKS, -1, width).transpose(1, 2).contiguous()


def pack_b(b: Tensor) -> Tensor:
    """b [rank, columns] -> [panels, rank, PANEL]."""
    return pad(b, (0, -b.shape[1] % PANEL)).view(len(b), -1, PANEL).transpose(0, 1).contiguous()
