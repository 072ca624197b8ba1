"""How long do one step's products take, by shape, by tokens and by how weights are kept?

Linear layers alone, without an engine. Each product of a step has a matrix of its own, so that weights come from where
they come from in a step: mostly not from a cache. Rounds run all methods in turns; the best round counts, since
whatever else runs here only adds.

    python -m bench linear --tokens 1 8 32 --rounds 9
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import before
import torch
from common import emit, note, parser

from minivllm.kernels.cpu import dense
from minivllm.kernels.cpu.linear import GROUP, PackedMatrix
from minivllm.layers.linear import Linear, PrepackedCPU, QuantMethod, RowwiseCPU, TiledCPU, Unquantized
from minivllm.loading.dummy import SHAPES, dummy_spec
from minivllm.machine import num_cores
from minivllm.models.spec import ModelSpec
from minivllm.quantization.packed import QuantisedAtLoad


class Shape(NamedTuple):
    name: str
    n_in: int
    n_out: int
    count: int  # in a step


class TorchInt4:
    """torch's own 4-bit product, for comparison: bf16 scales and zeros, groups of 32."""

    def create(self, layer: torch.nn.Module, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        Unquantized().create(layer, n_in, n_out, dtype)

    def finish(self, layer: torch.nn.Module) -> None:
        n_out, n_in = layer.weight.shape
        codes = torch.randint(0, 16, (n_out, n_in), dtype=torch.int32)
        layer.codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        layer.scales, layer.weight = torch.rand(n_in // GROUP, n_out, 2).bfloat16(), None

    def apply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, layer.codes, GROUP, layer.scales)


class TorchInt8:
    """torch's own 8-bit product, for comparison: one scale an output."""

    def create(self, layer: torch.nn.Module, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        Unquantized().create(layer, n_in, n_out, dtype)

    def finish(self, layer: torch.nn.Module) -> None:
        layer.codes = torch.randint(-127, 128, tuple(layer.weight.shape), dtype=torch.int8)
        layer.scales, layer.weight = torch.rand(len(layer.codes)).bfloat16(), None

    def apply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, layer.codes, layer.scales)


class Method(NamedTuple):
    make: Callable[[], QuantMethod]
    dtype: torch.dtype = torch.bfloat16  # of activations
    checkpoint: torch.dtype | None = None  # what the weights were rounded to; None: dtype


METHODS: dict[str, Method] = {
    "bf16": Method(Unquantized),
    "bf16-prepacked": Method(PrepackedCPU),
    "int8": Method(lambda: QuantisedAtLoad(8)),
    "int4": Method(lambda: QuantisedAtLoad(4)),
    "torch-int8": Method(TorchInt8),
    "torch-int4": Method(TorchInt4),
    "fp32-prepacked": Method(PrepackedCPU, torch.float32),
    "fp32-panels": Method(RowwiseCPU, torch.float32),
    "fp32-panels-of-fp16": Method(RowwiseCPU, torch.float32, torch.float16),
    "fp32-panels-of-bf16": Method(RowwiseCPU, torch.float32, torch.bfloat16),
}
if dense.unsupported_reason() is None:
    METHODS["bf16-tiles"] = Method(TiledCPU)


def shapes_of(spec: ModelSpec) -> list[Shape]:
    q, kv, hidden, layers = (
        spec.num_heads * spec.head_size,
        spec.num_kv_heads * spec.head_size,
        spec.hidden_size,
        spec.num_layers,
    )
    return [
        Shape("qkv", hidden, q + 2 * kv, layers),
        Shape("o", q, hidden, layers),
        Shape("gate_up", hidden, 2 * spec.intermediate_size, layers),
        Shape("down", spec.intermediate_size, hidden, layers),
        Shape("lm_head", hidden, spec.vocab_size, 1),
    ]


def build(how: Method, shapes: list[Shape]) -> dict[str, list[Linear]]:
    made: dict[str, list[Linear]] = {}
    method = how.make()
    for shape in shapes:
        for _ in range(shape.count):
            layer = Linear(shape.n_in, {"": shape.n_out}, dtype=how.dtype, method=method)
            layer.weight.data.normal_(0, shape.n_in**-0.5)
            layer.weight.data = layer.weight.data.to(how.checkpoint or how.dtype).to(how.dtype)
            layer.finish()
            made.setdefault(shape.name, []).append(layer)
    return made


def seconds(layers: list[Linear], x: dict[int, torch.Tensor]) -> float:
    start = time.perf_counter()
    for layer in layers:
        layer(x[layer.n_in])
    return time.perf_counter() - start


def measure(models: dict[str, dict[str, list[Linear]]], shapes: list[Shape], args: Any) -> list[dict[str, Any]]:
    rows = []
    for tokens in args.tokens:
        inputs = {n: torch.randn(tokens, n) for n in {shape.n_in for shape in shapes}}
        x_of = {how.dtype: {n: x.to(how.dtype) for n, x in inputs.items()} for how in METHODS.values()}
        best: dict[str, dict[str, float]] = {name: {} for name in models}
        for round_ in range(args.rounds):
            for name in sorted(models, reverse=round_ % 2 > 0):
                parts = models[name] | {"all": [layer for layers in models[name].values() for layer in layers]}
                for part, layers in parts.items():
                    best[name][part] = min(best[name].get(part, 1e9), 1e3 * seconds(layers, x_of[METHODS[name].dtype]))
        shown = {name: round(parts["all"], 2) for name, parts in best.items()}
        note(f"{tokens:4} tokens, ms: " + ", ".join(f"{name} {ms}" for name, ms in shown.items()))
        for name, parts in best.items():
            rows.append({"tokens": tokens, "method": name, "ms": {part: round(ms, 3) for part, ms in parts.items()}})
    return rows


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """For before.compare: milliseconds of all products of a step."""
    return {f"{row['tokens']} tokens, {row['method']}": row["ms"]["all"] for row in rows}


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--shape", default="smollm2-135m", choices=list(SHAPES))
    args.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    args.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    args.add_argument("--rounds", type=int, default=7)
    args.add_argument("--threads", type=int, default=num_cores())
    before.add_options(args)
    args = args.parse_args()
    if before.is_asked(args):
        return before.compare("linear", figures, args, sys.argv[1:])
    torch.set_num_threads(args.threads)
    shapes = shapes_of(dummy_spec(args.shape))
    with torch.inference_mode():
        models = {name: build(METHODS[name], shapes) for name in args.methods}
        rows = measure(models, shapes, args)
    params = {"shape": args.shape, "threads": args.threads, "rounds": args.rounds, "kernel": PackedMatrix.__module__}
    emit("linear", params, rows, args.out)


if __name__ == "__main__":
    main()
