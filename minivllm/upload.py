"""From the host to a device, without waiting for it.

A copy from ordinary memory to a GPU waits for all that the GPU still has to do, so one in each step would undo any
overlap. One from pinned memory is queued like a kernel; torch gives such memory out again only behind the copy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """On a CPU the array's own memory; on a GPU a copy, after which the array may change. A tensor is there already."""
    if isinstance(array, Tensor):
        return array
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def select(column: np.ndarray | Tensor, index: slice | np.ndarray) -> np.ndarray | Tensor:
    """column[index], where the column lies. index: a slice, or numbers that rise."""
    if isinstance(column, np.ndarray) or isinstance(index, slice):
        return column[index]
    return column if len(index) == len(column) else column.index_select(0, upload(index, column.device))
