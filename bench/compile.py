"""What do compiled pieces and fused C++ make of a decode step's forward, and what does building them cost?

Eager, compiled and fused, in one process and in turns. R requests of one length decode one token each, through the
attention backend that the engine chose; the step ends with the hidden states (LM head and sampling are not in it).
`--profile` shows which operations a step spends its time in, under torch's profiler, whose own cost is in the figures;
a compiled piece's products are not seen by it. `--cold` builds the pieces again, into an empty folder.

    python -m bench compile --num-reqs 1 8 32 --profile
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention import block_tables, make_batch
from common import emit, note, parser, spread

from minivllm import LLM
from minivllm.batch import InputBatch
from minivllm.compile.forms import form_for
from minivllm.compile.program import Bound
from minivllm.compile.store import Store
from minivllm.compile.trace import tensors_of
from minivllm.config import DEFAULT_MODEL
from minivllm.loading.cache import Cache
from minivllm.machine import num_cores
from minivllm.runner.compile_job import Build, job_for
from minivllm.runner.forward_fused import FusedModel, unavailable
from minivllm.runner.runner import ModelRunner


def decode_batch(num_reqs: int, length: int, block_size: int, vocab: int) -> InputBatch:
    tables = block_tables("served", num_reqs, -(-length // block_size))
    batch = make_batch(tables, np.full(num_reqs, length), 1, block_size)
    batch.token_ids = np.random.default_rng(0).integers(0, vocab, num_reqs)
    return batch


@torch.inference_mode()
def alternate(
    runner: ModelRunner, forwards: dict[str, Any], batch: InputBatch, seconds: float
) -> dict[str, list[float]]:
    """{name: milliseconds of each step}"""
    times: dict[str, list[float]] = {name: [] for name in forwards}
    end = time.perf_counter() + seconds
    for round_ in range(1_000_000):
        for name in sorted(forwards, reverse=round_ % 2 > 0):
            runner.forward._forward = forwards[name]
            begin = time.perf_counter()
            runner.run_model(batch)
            times[name].append(1e3 * (time.perf_counter() - begin))
        if time.perf_counter() > end and round_ >= 5:
            return {name: ms[2:] for name, ms in times.items()}


@torch.inference_mode()
def profile(runner: ModelRunner, forward: Any, batch: InputBatch, num_steps: int = 20) -> list[dict[str, Any]]:
    """The operations of a step by their own time, in microseconds a step."""
    runner.forward._forward = forward
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps):
            runner.run_model(batch)
    averages = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)
    return [
        {
            "op": e.key,
            "us": round(e.self_cpu_time_total / num_steps, 1),
            "calls": round(e.count / num_steps, 1),
        }
        for e in averages[:15]
    ]


CPU = torch.device("cpu")


def build_cold(model: torch.nn.Module, num_threads: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        job = job_for(model, form_for(CPU), CPU, Path(folder), num_threads, nice=0)
        begin = time.perf_counter()
        failure = Build(job).wait()
        if failure:
            raise SystemExit(failure)
        return time.perf_counter() - begin


def load_warm(model: torch.nn.Module, num_threads: int, cache: Path) -> float:
    begin = time.perf_counter()
    store = Store(Cache(cache), form_for(CPU))
    program = store.program(job_for(model, store.form, CPU, cache, num_threads, nice=0).key)
    Bound(program, store.pieces(program), tensors_of(model), dict(model.named_modules()))
    return time.perf_counter() - begin


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--model", default=DEFAULT_MODEL)
    args.add_argument("--dtype", default="bfloat16")
    args.add_argument("--quantization", default="auto")
    args.add_argument("--num-reqs", type=int, nargs="+", default=[1, 8, 32])
    args.add_argument("--length", type=int, default=200, help="tokens of each request")
    args.add_argument("--threads", type=int, default=num_cores())
    args.add_argument("--seconds", type=float, default=5.0, help="of each case")
    args.add_argument("--profile", action="store_true")
    args.add_argument("--cold", action="store_true")
    args = args.parse_args()
    blocks = max(args.num_reqs) * -(-args.length // 16) + 1
    llm = LLM(
        args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        compile="wait",
        max_model_len=max(512, args.length),
        overrides={"executor.num_threads": args.threads, "kv.num_blocks": max(64, blocks)},
    )
    how = next(d for d in llm.decisions if d.field == "runner.forward")
    note(f"{how.value}: {how.reason}")
    if how.value != "piecewise":
        raise SystemExit(how.reason)
    runner: ModelRunner = llm._core.executor.worker.runner
    forwards = {"eager": runner.model, "compiled": runner.forward._forward}
    if (why := unavailable(runner.model, CPU)) is None:
        forwards["fused"] = FusedModel(runner.model)
    else:
        note(f"fused: {why}")
    rows = []
    for num_reqs in args.num_reqs:
        batch = decode_batch(num_reqs, args.length, 16, llm.info["vocab_size"])
        times = alternate(runner, forwards, batch, args.seconds)
        ratios = {n: [a / b for a, b in zip(times["eager"], ms, strict=True)] for n, ms in times.items()}
        row = {
            "num_reqs": num_reqs,
            "step_ms": {name: spread(ms) for name, ms in times.items()},
            "ratio": {name: spread(found) for name, found in ratios.items() if name != "eager"},
        }
        note(
            f"{num_reqs:4} requests: "
            + ", ".join(f"{name} best {min(ms):.2f}, median {np.median(ms):.2f} ms" for name, ms in times.items())
            + "".join(f"; eager/{n} {np.median(found):.2f}" for n, found in ratios.items() if n != "eager")
        )
        if args.profile:
            row["profile"] = {name: profile(runner, forward, batch) for name, forward in forwards.items()}
            for name, ops in row["profile"].items():
                note(
                    f"  {name}: " + ", ".join(f"{op['op']} {op['us']:.0f} us ({op['calls']:g} calls)" for op in ops[:8])
                )
        rows.append(row)
    cache = Cache().root / "compiled"
    results: dict[str, Any] = {"decode": rows}
    results["load_seconds"] = spread([load_warm(runner.model, args.threads, cache) for _ in range(5)], 4)
    note(f"loading the pieces: {1e3 * results['load_seconds']['median']:.1f} ms")
    if args.cold:
        results["build_seconds"] = round(build_cold(runner.model, args.threads), 1)
        note(f"building them in a new process: {results['build_seconds']} s")
    emit("compile", vars(args), results, args.out)


if __name__ == "__main__":
    sys.exit(main())
