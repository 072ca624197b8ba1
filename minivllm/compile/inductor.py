"""One piece to machine code: Inductor's ahead-of-time form, a shared library that needs no Python and no compiler.

Of the two ways that torch 2.13 offers, the artifact of `standalone_compile` holds source text, so that every process
that loads it imports Inductor and, with an empty Inductor cache, runs the C++ compiler again; what `aot_compile` makes
loads like any library, and was the faster at one token (bench/LOG.md). So it is the second. Building takes longer, but
it is done once, in a process of its own.

This module is imported by that process alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch._inductor
from torch._inductor import ir, lowering, mkldnn_ir

from minivllm.compile.split import PieceGraph
from minivllm.compile.store import LIBRARY


def build(piece: PieceGraph, fake_mode: object, folder: Path, num_threads: int) -> None:
    """Write folder/LIBRARY."""
    options = {
        "aot_inductor.output_path": str(folder / LIBRARY),
        "aot_inductor.precompile_headers": False,  # they take longer than the three pieces that would use them
        "cpp.threads": num_threads,
        "compile_threads": 1,
    }
    with torch.no_grad(), fake_mode:
        torch._inductor.aot_compile(piece.module, tuple(piece.inputs), options=options)
    for path in folder.iterdir():  # sources and objects
        if path.name != LIBRARY:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _remove(inner)
        path.rmdir()
    else:
        path.unlink()


def _linear(x, weight, bias, attr, scalars, algorithm):
    return ir.TensorBox.create(mkldnn_ir.LinearUnary.create(x, weight, bias, attr, scalars, algorithm))


def _linear_binary(x, other, weight, bias, attr):
    return ir.TensorBox.create(mkldnn_ir.LinearBinary.create(x, other, weight, bias, attr))


def allow_packed_weights_as_inputs() -> None:
    """Inductor's lowering of oneDNN's packed product asserts that the weight is a constant of the graph, for the sake
    of autotuning. Ours is an input, so that equal layers share code."""
    operation = torch.ops.mkldnn._linear_pointwise
    lowering.lowerings[operation] = lowering.lowerings[operation.default] = _linear
    lowering.lowerings[operation.binary] = _linear_binary
