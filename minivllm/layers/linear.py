"""The linear layer, and the seam at which a weight may be stored otherwise than it is in the checkpoint.

A layer may hold several matrices of the checkpoint stacked by rows (q, k, v; gate, up): one large product costs less
than three small ones. `rows` says as data which rows belong to which matrix; the loader needs nothing else, and
neither will tensor parallelism or LoRA.

How the rows are kept is a `QuantMethod`: `tensors` declares what the loader brings (stored.py), `create` makes what it
fills, `finish` repacks it once all is loaded, `apply` multiplies. Besides quantisation this is the place for a layout
that a library likes better. oneDNN's blocked layout, packed once, is worth much on a CPU, most of all with few tokens:
without it `F.linear` reorders its weight on every call.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.kernels.cpu import dense, floats
from minivllm.kernels.cpu.dense import DenseMatrix
from minivllm.kernels.cpu.floats import FloatMatrix
from minivllm.layers.stored import Shard, TensorSpec, whole

NO_SHARDS: Mapping[str, Shard] = MappingProxyType({})


class QuantMethod(Protocol):
    """How a linear layer stores its weight. The method owns `layer.weight` and whatever it turns that into."""

    def tensors(self, part: str, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        """What the checkpoint keeps the matrix [n_out, n_in] of a part in. Of a part of which the layer holds some
        outputs or inputs, the whole matrix is meant."""
        ...

    def create(self, layer: nn.Module, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        """Register the parameters that the loader fills, on the default device; or `layer.held`, {part: {name:
        tensor}}, where the loader leaves what it reads."""
        ...

    def finish(self, layer: nn.Module) -> None:
        """Called once, after loading: repack, free what is no longer needed."""
        ...

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """x [T, n_in] -> [T, n_out], the layer's bias added."""
        ...


class Unquantized:
    """The checkpoint's matrix as it is, [n_out, n_in] in the model's dtype. Runs everywhere."""

    def tensors(self, part: str, n_out: int, n_in: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec("weight", (n_out, n_in)),)

    def create(self, layer: nn.Module, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        layer.weight = empty_parameter(n_out, n_in, dtype=dtype)

    def finish(self, layer: nn.Module) -> None:
        pass  # the loader's layout is the one that `apply` reads

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight, layer.bias)


class PrepackedCPU(Unquantized):
    """Unquantized, in oneDNN's blocked layout. `layer.weight` is gone after `finish`."""

    def finish(self, layer: nn.Module) -> None:
        layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.data, None)  # opaque, [n_out, n_in]
        layer.weight = None

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, layer.packed, layer.bias, "none", [], "")


class TiledCPU(PrepackedCPU):
    """Unquantized bf16, as tiles for our own product (kernels/cpu/dense.h). What does not fit is left to oneDNN."""

    traceable = False  # by C++ calls

    def finish(self, layer: nn.Module) -> None:
        layer.tiles = None
        if not DenseMatrix.fits(layer.weight):
            return super().finish(layer)
        parts = [rows.stop - rows.start for rows in getattr(layer, "rows", {}).values()]
        layer.tiles = DenseMatrix(layer.weight.data, layer.bias, halves=len(parts) == 2 and parts[0] == parts[1])
        layer.weight = None

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return super().apply(layer, x) if layer.tiles is None else layer.tiles(x)


class RowwiseCPU(Unquantized):
    """Unquantized, with a product of whose result each row depends on its own row of x alone, in any dtype."""

    traceable = False  # by C++ calls

    def finish(self, layer: nn.Module) -> None:
        keep_in_panels(layer, floats.narrowest(layer.weight.data))

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer.panels(x, layer.output_dtype)


class NarrowCPU(RowwiseCPU):
    """Unquantized, on a CPU that multiplies in fp32 alone: a weight that a 16-bit checkpoint gave stays in 16 bits,
    which hold it exactly, and is widened in registers (kernels/cpu/float_linear.cpp). One that takes all of fp32 is
    left to oneDNN."""

    def finish(self, layer: nn.Module) -> None:
        kept_in = floats.narrowest(layer.weight.data)
        if kept_in is torch.float32 or floats.unsupported_reason() is not None:
            layer.method = PrepackedCPU()  # which a compiler can look into
            return layer.method.finish(layer)
        keep_in_panels(layer, kept_in)


def keep_in_panels(layer: nn.Module, dtype: torch.dtype) -> None:
    layer.panels = FloatMatrix(layer.weight.data, layer.bias, dtype)
    layer.weight = None


class MethodChoice(NamedTuple):
    method: QuantMethod
    reason: str


def choose_method(device: torch.device, dtype: torch.dtype) -> MethodChoice:
    """The fastest for a weight that is not quantised."""
    if device.type != "cpu":
        return MethodChoice(Unquantized(), f"dense weights: the device is {device.type}")
    if not _onednn_packs(dtype):
        return MethodChoice(Unquantized(), f"dense weights: no packed {dtype} product in this torch or CPU")
    if dtype is torch.bfloat16 and dense.unsupported_reason() is None:
        return MethodChoice(TiledCPU(), f"weights as tiles for the CPU's {dense.unit()}")
    if dtype is torch.float32:  # with a compiler or without: compiled pieces are of one model
        return MethodChoice(NarrowCPU(), "weights of 16 bits in panels, widened as they are read; others as oneDNN's")
    return MethodChoice(PrepackedCPU(), "weights packed into oneDNN's blocked layout: an x86 CPU")


def _onednn_packs(dtype: torch.dtype) -> bool:
    """The operations are private to torch (Inductor calls them), so they are looked for. Other CPUs: not measured."""
    ops = torch.ops.mkldnn
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and ops._is_mkldnn_bf16_supported())


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b with W [n_out, n_in]; n_out is the sum of `parts`, stacked in their order."""

    output_dtype: torch.dtype | None = None  # a method that sums in fp32 anyway may give its sums; None: the input's
    shards: Mapping[str, Shard] = NO_SHARDS  # part -> which of its matrix is here; all of it where nothing is said

    def __init__(
        self, n_in: int, parts: Mapping[str, int], *, bias: bool = False, dtype: torch.dtype, method: QuantMethod
    ):
        super().__init__()
        self.n_in = n_in
        self.rows = row_ranges(parts)
        n_out = sum(parts.values())
        self.method = method
        method.create(self, n_in, n_out, dtype)
        self.bias = empty_parameter(n_out, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x)

    def finish(self) -> None:
        self.method.finish(self)

    def declared(self, part: str) -> tuple[TensorSpec, ...]:
        """What of the checkpoint a part is read from."""
        shard, rows = self.shards.get(part), self.rows[part]
        n_out = whole(rows.stop - rows.start, "outputs", shard)
        weights = self.method.tensors(part, n_out, whole(self.n_in, "inputs", shard))
        return weights if self.bias is None else (*weights, TensorSpec("bias", (n_out,), inputs=None))


def row_ranges(parts: Mapping[str, int]) -> dict[str, slice]:
    """{part: its rows}, the parts stacked in order."""
    ranges, start = {}, 0
    for name, size in parts.items():
        ranges[name] = slice(start, start + size)
        start += size
    return ranges
