"""BlockMoves: the consumer of StepPlan's swap_out, copies and swap_in.

Each column is one batch of blocks, moved before the forward and in the order in which the plan's meaning needs it: what
leaves the device, copies on write, then what comes back. How a batch is moved is block_copy.py's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.plan import StepPlan
from minivllm.runner.block_copy import Move, Pairs


class NoBlockMoves:
    """Where no tensor stands behind a block; the options that would move one are declared conflicts, or refused."""

    def __call__(self, plan: StepPlan) -> None:
        assert not (plan.swap_out or plan.swap_in or plan.copies), "there are no blocks to move"


class BlockMoves:
    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor], block_axis: int, move: Move):
        """device, host: one KV tensor a layer; block_axis: which dimension of it counts blocks."""
        self._device, self._host = device, host
        self._axis = block_axis
        self._move = move

    def __call__(self, plan: StepPlan) -> None:
        for source, target, pairs in (
            (self._device, self._host, plan.swap_out),
            (self._device, self._device, plan.copies),
            (self._host, self._device, plan.swap_in),
        ):
            if pairs:
                self._move(source, target, pairs)

    def measure(self, num_blocks: int = 32) -> float:
        """Seconds to move one block of all layers one way, host to device, the faster of two tries."""
        num_blocks = min(num_blocks, self._host[0].shape[self._axis], self._device[0].shape[self._axis])
        pairs = [(i, i) for i in range(num_blocks)]
        return min(self._timed(pairs), self._timed(pairs)) / num_blocks

    def _timed(self, pairs: Pairs) -> float:
        _synchronize(self._device[0])
        start = time.perf_counter()
        self._move(self._host, self._device, pairs)
        _synchronize(self._device[0])
        return time.perf_counter() - start


def _synchronize(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
