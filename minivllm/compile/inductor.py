"""What Inductor must be told before it compiles a piece, in whichever form.

This module is imported by a builder's process alone.
"""

from __future__ import annotations

import torch
from torch._inductor import ir, lowering, mkldnn_ir
from torch._inductor.graph import GraphLowering
from torch._inductor.sizevars import SizeVarAllocator


def prepare() -> None:
    _allow_packed_weights_as_inputs()
    if not hasattr(SizeVarAllocator, "all_unbacked_explicitly_hinted"):
        GraphLowering.get_dep_size_hint = _size_hint


def _linear(x, weight, bias, attr, scalars, algorithm):
    return ir.TensorBox.create(mkldnn_ir.LinearUnary.create(x, weight, bias, attr, scalars, algorithm))


def _linear_binary(x, other, weight, bias, attr):
    return ir.TensorBox.create(mkldnn_ir.LinearBinary.create(x, other, weight, bias, attr))


def _allow_packed_weights_as_inputs() -> None:
    """Inductor's lowering of oneDNN's packed product asserts that the weight is a constant of the graph, for the sake
    of autotuning. Ours is an input, so that equal layers share code."""
    operation = torch.ops.mkldnn._linear_pointwise
    lowering.lowerings[operation] = lowering.lowerings[operation.default] = _linear
    lowering.lowerings[operation.binary] = _linear_binary


def _size_hint(graph: GraphLowering, dep, count_bytes: bool = True) -> int:
    """torch 2.11 holds any data with an unbacked size for empty, so that no two kernels share any and nothing is fused.
    Newer ones take the hint of such a size, if it has one, as this does for all."""
    try:
        count = graph.sizevars.optimization_hint(dep.get_numel(), fallback=0)
        return count * graph.get_dtype(dep.name).itemsize if count_bytes else count
    except (KeyError, NotImplementedError):  # no tensor
        return 0
