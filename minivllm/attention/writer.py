"""Who writes new K and V into an HND cache: one Triton launch on a GPU, its reference in torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]  # k, v, K's cache, V's cache, slots


def choose_writer(device: torch.device) -> Write:
    """k, v [T, kv_heads, head_size] to slots [T] of caches [num_blocks, kv_heads, block_size, head_size]."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from minivllm.kernels.triton.elementwise import write
    else:
        from minivllm.kernels.reference import write
    return write
