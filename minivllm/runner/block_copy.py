"""Who carries out a batch of block moves: torch, or on a GPU a Triton kernel, in one launch for all layers.

The kernel reads and writes pinned host memory by its address, over the bus, so a swap is a launch as a copy is. It
wants caches that begin with K and V and then count blocks, [2, num_blocks, ...], and blocks of whole 8-byte words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.upload import upload

if TYPE_CHECKING:
    from minivllm.kernels.dispatch import Dispatch
    from minivllm.kernels.triton.elementwise import BlockCopier

Pairs = Sequence[tuple[int, int]]  # (source block, target block)
Caches = Sequence[Tensor]  # one a layer; other models' may have other shapes
Move = Callable[[Caches, Caches, Pairs], None]  # sources, targets: all are read before any is written


class TorchMove:
    """One gather and one scatter a layer. The reference."""

    def __init__(self, block_axis: int):
        self._axis = block_axis

    def __call__(self, source: Caches, target: Caches, pairs: Pairs) -> None:
        where_from, where_to = torch.tensor(pairs, dtype=torch.int64).T
        here, there = where_from.to(source[0].device), where_to.to(target[0].device)
        for a, b in zip(map(_plain, source), map(_plain, target), strict=True):
            b.index_copy_(self._axis, there, a.index_select(self._axis, here).to(b.device))


def _plain(cache: Tensor) -> Tensor:
    """The same memory in a dtype that every operator knows; e4m3 is not one of them."""
    return cache.view(torch.int8) if cache.dtype.itemsize == 1 else cache


class KernelMove:
    """One launch for all caches of a shape. Nothing waits: the list of pairs goes up like any input of a step."""

    def __init__(self, device: torch.device, in_torch: Move):
        self._device, self._in_torch = device, in_torch
        self._copiers: dict[tuple[int, int], tuple[Caches, Caches, list[BlockCopier]]] = {}

    def __call__(self, source: Caches, target: Caches, pairs: Pairs) -> None:
        if source is target and not {a for a, _ in pairs}.isdisjoint(b for _, b in pairs):
            # A shared block may be free by now and given out again as another one's copy: a launch has no order.
            return self._in_torch(source, target, pairs)
        where = upload(np.array(pairs, np.int64), self._device)
        for copier in self._copiers_of(source, target):
            copier(where)

    def _copiers_of(self, source: Caches, target: Caches) -> list[BlockCopier]:
        from minivllm.kernels.triton.elementwise import BlockCopier

        key = id(source), id(target)
        if key not in self._copiers:
            groups: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
            for pair in zip(source, target, strict=True):
                groups.setdefault((pair[0].dtype, *(x.shape for x in pair)), []).append(pair)
            copiers = [BlockCopier(*map(list, zip(*group, strict=True))) for group in groups.values()]
            self._copiers[key] = source, target, copiers  # as long as this lives, nobody else has their ids
        return self._copiers[key][2]


def choose_move(kernels: Dispatch, device: Caches, host: Caches, block_axis: int) -> Move:
    """device, host: the caches between which and within which blocks will be moved."""
    in_torch = TorchMove(block_axis)
    if (why := unsupported_reason(device, host, block_axis)) is not None:
        kernels.refuse("block copy", why)
    return KernelMove(kernels.device, in_torch) if kernels.uses("block copy", _proof) else in_torch


def unsupported_reason(device: Caches, host: Caches, block_axis: int) -> str | None:
    """Why the kernel cannot move blocks of these caches, or None."""
    for cache in (*device, *host):
        if block_axis != 1 or cache.shape[0] != 2 or not cache.is_contiguous():
            return f"a cache lies as {list(cache.shape)}, not as [2, num_blocks, ...]"
        if (size := cache[0, :1].numel() * cache.itemsize) % 8:
            return f"a block of {size} bytes is no number of 8-byte words"
    if any(x.device.type == "cuda" for x in device) and not all(x.is_pinned() for x in host if x.numel()):
        return "the host's caches are not pinned"
    return None


def _proof(device: torch.device) -> bool:
    from minivllm.kernels.triton import proofs

    return proofs.copy_blocks(device)
