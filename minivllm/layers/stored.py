"""How a checkpoint keeps a matrix [n_out, n_in], as data: the tensors that a layer's method asks the loader for.

From what a `TensorSpec` says of its axes follows which part of the file's tensor a layer reads that holds some of the
matrix's outputs or inputs only (a `Shard`: tensor parallelism): `cut` of packed words, of a scale for a group of
inputs, of zero points packed along outputs alike. No format needs code of its own for it, and no layer knows a format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minivllm.errors import ModelError

ANY = -1  # in a TensorSpec's shape: of any size


class Axis(NamedTuple):
    """Along which axis of a tensor a matrix's outputs, or inputs, lie: `numbers` of them take `indices`."""

    axis: int
    numbers: int = 1  # 8 inputs of 4 bits in an int32: 8; a scale for 128 inputs: 128
    indices: int = 1  # 32 inputs in a block of 18 bytes: 18

    def size(self, count: int) -> int:
        """Indices that `count` outputs or inputs take; the last may be filled in part."""
        return -(-count // self.numbers) * self.indices


class TensorSpec(NamedTuple):
    """A tensor of the checkpoint, in which a matrix is kept alone or with others."""

    name: str  # behind the module's: "weight", "weight_scale"
    shape: tuple[int, ...]  # of the whole matrix's, as the file has it
    dtype: torch.dtype | None = None  # None: of any float dtype
    outputs: Axis | None = Axis(0)  # None: it is the same whichever outputs are asked for
    inputs: Axis | None = Axis(1)
    optional: bool = False  # the file may lack it


class Shard(NamedTuple):
    """Which of a matrix's outputs, or inputs, a layer holds."""

    along: Literal["outputs", "inputs"]
    start: int
    stop: int
    of: int  # how many there are in all


class Cut(NamedTuple):
    """What of a file's tensor is read: indices start to stop of an axis, all of the others."""

    axis: int
    start: int
    stop: int


class Destination(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    spec: TensorSpec
    put: Callable[[Tensor], object]  # what is read, which may be a view of a mapped file
    cut: Cut | None  # None: all of it is read
    view: Tensor | None  # of the parameter that is filled; None: the layer holds what it gets until it is finished


def cut(spec: TensorSpec, shard: Shard | None) -> Cut | None:
    """What of a tensor a shard reads. Raises ModelError for one that cuts through what is packed or scaled together."""
    lies = None if shard is None else getattr(spec, shard.along)
    if lies is None:
        return None
    start, stop = shard.start, shard.stop
    if start % lies.numbers or (stop % lies.numbers and stop != shard.of):
        raise ModelError(
            f"{shard.along} {start} to {stop} of {shard.of} cannot be read alone: {spec.name} keeps {lies.numbers} "
            "of them together. Use fewer devices for a layer"
        )
    return Cut(lies.axis, lies.size(start), min(lies.size(stop), spec.shape[lies.axis]))


def whole(count: int, along: str, shard: Shard | None) -> int:
    """How many outputs, or inputs, the matrix has of which a layer holds `count`."""
    return shard.of if shard is not None and shard.along == along else count
