"""Masks of grammars applied to logits in one call (mask.cpp), for CPUs.

Its references are in minivllm/sampling/grammar_mask.py: `apply_masks_slowly`, and the one that numpy computes.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch
from torch import Tensor

from minivllm.kernels.cpu import build

NAME = "mask"


def unsupported_reason() -> str | None:
    """Why the kernel cannot be used here, or None. The first call may compile."""
    return build.unsupported_reason(NAME)


@functools.cache
def _function():
    function, pointer, number = build.library(NAME).minivllm_mask, ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [*[pointer] * 3, *[number] * 3, pointer, number]
    function.restype = None
    return function


def apply_masks(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> Tensor:
    """logits [S, V] float32, changed in place and returned; rows [N] int64, distinct; masks [N, words] int32."""
    assert logits.dtype is torch.float32 and logits.is_contiguous() and logits.device.type == "cpu"
    assert rows.dtype == np.int64 and rows.flags.c_contiguous and masks.flags.c_contiguous and masks.itemsize == 4
    num_words = masks.shape[1]
    assert len(rows) == len(masks) and 32 * num_words >= logits.shape[1]
    if len(rows):
        assert rows.min() >= 0 and rows.max() < len(logits)
        _function()(
            logits.data_ptr(),
            rows.ctypes.data,
            masks.ctypes.data,
            logits.shape[1],
            num_words,
            len(rows),
            build.torch_parallel(),
            torch.get_num_threads(),
        )
    return logits
