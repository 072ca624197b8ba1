"""How fast could a prompt be on these cores in bfloat16, and how near do the products and the engine come?

1. The instruction that multiplies bfloat16 (AMX's, or AVX-512's), over and over, on all threads: the peak.
2. A prompt's products by themselves, all layers' matrices in turn, by oneDNN and as tiles (kernels/cpu/dense.h).
3. The engine: a prompt to its first token.

The bound is the prompt's floating-point operations, products and attention's, at the peak. It leaves out all else: the
exponentials of the softmax, norms, memory. Each time is the best of rounds in turns: what else runs here only adds.

    python -m bench prefill_bound --tokens 1000 2000
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import emit, note, parser
from linear import Shape, build, seconds, shapes_of

from minivllm import LLM, SamplingParams
from minivllm.config import DEFAULT_MODEL
from minivllm.kernels.cpu import dense
from minivllm.kernels.cpu.build import FLAGS, torch_parallel
from minivllm.layers.linear import Linear, PrepackedCPU, QuantMethod, TiledCPU
from minivllm.machine import num_cores
from minivllm.models.spec import ModelSpec


def peak(threads: int) -> float:
    """Floating-point operations a second of all threads."""
    source = Path(__file__).with_name("bf16_peak.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "bf16_peak.so"
        subprocess.run(["g++", *FLAGS, "-march=native", str(source), "-o", str(library)], check=True)
        run = ctypes.CDLL(str(library)).peak
    run.restype, run.argtypes = ctypes.c_double, [ctypes.c_void_p, ctypes.c_int64]
    return run(torch_parallel(), threads)


def all_layers(method: QuantMethod, shapes: list[Shape]) -> list[Linear]:
    return [layer for layers in build(method, shapes).values() for layer in layers]


def flops_of(shapes: list[Shape], spec: ModelSpec, tokens: int) -> dict[str, float]:
    """Of a prompt. Attention: each query with all keys up to its own, scores and means."""
    pairs = tokens * (tokens + 1) / 2 * spec.num_heads * spec.num_layers
    products = sum(2 * tokens * shape.n_in * shape.n_out * shape.count for shape in shapes)
    return {"products": products, "attention": 2 * 2 * spec.head_size * pairs}


def fastest(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(ways, float("inf"))
    for round_ in range(rounds):
        for name in sorted(ways, reverse=round_ % 2 > 0):
            best[name] = min(best[name], ways[name]())
    return best


def first_token(llm: LLM, tokens: int) -> float:
    ids = torch.randint(0, 40_000, (tokens,)).tolist()  # new ones: no prefix cache answers
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return time.perf_counter() - begin


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--tokens", type=int, nargs="+", default=[256, 1000, 2000], help="of a prompt, below the budget")
    args.add_argument("--rounds", type=int, default=9)
    args.add_argument("--threads", type=int, default=num_cores())
    args = args.parse_args()
    if (why := dense.unsupported_reason()) is not None:
        raise SystemExit(f"There is no bound to look for: {why}")
    overrides = {"executor.num_threads": args.threads, "kv.num_blocks": 400, "kv.prefault": True}
    results = []
    with LLM(DEFAULT_MODEL, overrides=overrides) as llm, torch.inference_mode():
        most = peak(args.threads)
        note(f"{args.threads} threads, {dense.unit()}: {most / 1e12:.2f} TFLOP/s at most")
        spec = llm._core.executor.worker.runner.model.spec
        shapes = [shape for shape in shapes_of(spec) if shape.count > 1]  # no LM head: it sees one token
        models = {"oneDNN": all_layers(PrepackedCPU(), shapes), "tiles": all_layers(TiledCPU(), shapes)}
        for tokens in args.tokens:
            x = {n: torch.randn(tokens, n).bfloat16() for n in {shape.n_in for shape in shapes}}
            ways = {name: functools.partial(seconds, layers, x) for name, layers in models.items()}
            best = fastest({**ways, "engine": functools.partial(first_token, llm, tokens)}, args.rounds)
            flops = flops_of(shapes, spec, tokens)
            bound = {name: 1e3 * count / most for name, count in flops.items()}
            row = {
                "tokens": tokens,
                "bound_ms": {name: round(ms, 2) for name, ms in bound.items()},
                "ms": {name: round(1e3 * found, 2) for name, found in best.items()},
                "tflops": {name: round(flops["products"] / best[name] / 1e12, 3) for name in ways},
                "reached": {name: round(bound["products"] / 1e3 / best[name], 3) for name in ways}
                | {"engine": round(sum(bound.values()) / 1e3 / best["engine"], 3)},
            }
            note(str(row))
            results.append(row)
    params = {
        "model": DEFAULT_MODEL,
        "unit": dense.unit(),
        "threads": args.threads,
        "rounds": args.rounds,
        "peak_tflops": round(most / 1e12, 3),
    }
    emit("prefill_bound", params, results, args.out)


if __name__ == "__main__":
    main()
