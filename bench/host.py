"""What does a step cost on the host, apart from the model: schedule, prepare, update, trace?

Prepare is measured with each of the input builders, the tokens that it gave included. n requests decode, one token each
a step, over a fake model that answers at once. What is left is the control plane and the input builder, as the engine
runs them. The builders run in turns, in a fresh engine each time; what a repetition says is the median of its steps,
and the ratio of two builders is taken within a repetition, with its 95 % bootstrap interval. Also: how long the control
plane takes to import in a fresh interpreter.

    python -m bench host --num-reqs 1 64 256 1024
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import before
import numpy as np
from common import ROOT, emit, note, parser, spread
from latency import bootstrap_ratio, shown

from minivllm.batch import BatchKey, InputSizes
from minivllm.config import EngineConfig
from minivllm.engine.build import build_kv, build_scheduler
from minivllm.features import INPUT_BUILDERS
from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.request import EngineRequest, Request, SamplingParams
from minivllm.runner.inputs import Rows
from minivllm.scheduler.base import Limits
from minivllm.trace import TraceRecorder

PROMPT, BLOCK_SIZE = 128, 16
WARMUP = 20  # decode steps that are not measured
CONTROL_PLANE = "minivllm.engine.core, minivllm.scheduler.unified, minivllm.kv.manager, minivllm.kv.prefix_hash"


class FakeModel:
    """Prepares the inputs as a worker does, and answers token 5 to everything. Remembers how long preparing took."""

    def __init__(self, sizes: InputSizes, inputs: str):
        self.inputs = INPUT_BUILDERS.get(inputs)(sizes)
        self.rows = Rows(sizes.max_rows)
        self.prepare_seconds = 0.0

    def execute(self, plan: StepPlan) -> StepOutput:
        begin = time.perf_counter()
        for req_id in plan.leaves:
            self.rows.leave(req_id)
        self.inputs.apply(plan, [self.rows.join(join.req_id) for join in plan.joins])
        batch = self.inputs.build(plan, BatchKey(plan.total_tokens))
        self.prepare_seconds = time.perf_counter() - begin
        requests = batch.sample_requests.tolist()
        tokens = np.full(len(requests), 5)
        begin = time.perf_counter()
        self.inputs.append(batch, batch.sample_requests, tokens)
        self.prepare_seconds += time.perf_counter() - begin
        return StepOutput({batch.req_ids[r]: [5] for r in requests})


def measure(num_reqs: int, inputs: str, num_steps: int, prefix: str) -> dict[str, list[float]]:
    """Milliseconds of each phase, one entry a step in which num_reqs requests decode."""
    max_len = PROMPT + WARMUP + num_steps + 64
    num_blocks = num_reqs * -(-max_len // BLOCK_SIZE)
    config = EngineConfig.build(overrides={"kv.block_size": BLOCK_SIZE, "kv.prefix": prefix, "runner.inputs": inputs})
    limits = Limits(num_reqs, num_reqs * PROMPT, max_len, num_blocks * BLOCK_SIZE)  # one step of prefill
    scheduler = build_scheduler(config, build_kv(config, num_blocks, max_len), limits).base
    model = FakeModel(InputSizes(num_reqs, max_len, BLOCK_SIZE, num_blocks), inputs)
    recorder = TraceRecorder(os.devnull)
    params = SamplingParams(temperature=0.0, max_tokens=max_len - PROMPT, ignore_eos=True)
    generator = np.random.default_rng(0)
    for i in range(num_reqs):
        prompt = generator.integers(0, 49_152, PROMPT).tolist()
        scheduler.add(Request.make(EngineRequest(f"cmpl-{i:016x}", prompt, params)))
    times: dict[str, list[float]] = {"schedule": [], "prepare": [], "update": [], "trace": []}
    num_decodes = 0
    while num_decodes < WARMUP + num_steps:
        begin = time.perf_counter()
        plan = scheduler.schedule(begin)
        planned = time.perf_counter()
        out = AsyncOutput.ready(model.execute(plan)).result()
        executed = time.perf_counter()
        deltas = scheduler.update(plan, out)
        updated = time.perf_counter()
        recorder.on_step(plan, out, deltas, {"schedule": 0.0, "execute": 0.0, "update": 0.0})
        traced = time.perf_counter()
        num_decodes += plan.total_tokens == num_reqs == len(plan.num_tokens)
        if num_decodes > WARMUP:
            spent = (planned - begin, model.prepare_seconds, updated - executed, traced - updated)
            for phase, seconds in zip(times, spent, strict=True):
                times[phase].append(1e3 * seconds)
    return times


def import_seconds(num_runs: int = 7) -> list[float]:
    code = f"import time; t = time.perf_counter(); import {CONTROL_PLANE}; print(time.perf_counter() - t)"
    run = [sys.executable, "-c", code]
    return [float(subprocess.run(run, cwd=ROOT, capture_output=True, check=True).stdout) for _ in range(num_runs)]


SUMS = {"schedule_prepare": ("schedule", "prepare"), "schedule_update": ("schedule", "update")}
SUMS["step"] = ("schedule", "prepare", "update")


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds of each phase, and of sums taken within each step."""
    columns = dict(times)
    for name, parts in SUMS.items():
        columns[name] = [sum(step) for step in zip(*(times[part] for part in parts), strict=True)]
    return {phase: float(np.median(ms)) for phase, ms in columns.items()}


def compare(num_reqs: int, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each builder, and one for the ratio of each builder to the first."""
    found: dict[str, list[dict[str, float]]] = {inputs: [] for inputs in args.inputs}
    for i in range(args.repetitions):
        for inputs in args.inputs if i % 2 == 0 else args.inputs[::-1]:
            found[inputs].append(medians(measure(num_reqs, inputs, args.num_steps, args.prefix)))
    rows, ratios = [], []
    first = found[args.inputs[0]]
    for inputs, runs in found.items():
        phases = {phase: spread([run[phase] for run in runs], 4) for phase in runs[0]}
        rows.append({"num_reqs": num_reqs, "inputs": inputs} | phases)
        note(f"{num_reqs:5} requests, {inputs:10}: " + ", ".join(f"{k} {v['median']:.3f}" for k, v in phases.items()))
        if runs is not first:
            ratio = {
                p: shown(bootstrap_ratio([r[p] for r in first], [r[p] for r in runs])) for p in ("prepare", "step")
            }
            ratios.append({"num_reqs": num_reqs, "inputs": f"{inputs} / {args.inputs[0]}"} | ratio)
            note(f"{num_reqs:5} requests, {ratios[-1]}")
    return rows, ratios


def figures(results: dict[str, Any]) -> dict[str, float]:
    """For before.compare: milliseconds."""
    return {
        f"{row['num_reqs']} requests, {row['inputs']}, {phase}": row[phase]["median"]
        for row in results["step_ms"]
        for phase in ("schedule", "prepare", "update", "step")
    }


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--num-reqs", type=int, nargs="+", default=[1, 64, 256, 1024], help="requests that decode")
    args.add_argument("--inputs", nargs="+", default=list(INPUT_BUILDERS.names()), help="input builders")
    args.add_argument("--num-steps", type=int, default=100, help="decode steps measured in a repetition")
    args.add_argument("--repetitions", type=int, default=6)
    args.add_argument("--prefix", default="hash", help="kv.prefix")
    before.add_options(args)
    args = args.parse_args()
    if before.is_asked(args):
        return before.compare("host", figures, args, sys.argv[1:])
    results: dict[str, Any] = {"import_seconds": spread(import_seconds()), "step_ms": [], "ratios": []}
    for num_reqs in args.num_reqs:
        rows, ratios = compare(num_reqs, args)
        results["step_ms"] += rows
        results["ratios"] += ratios
    params = {"num_steps": args.num_steps, "prompt": PROMPT, "block_size": BLOCK_SIZE, "prefix": args.prefix}
    emit("host", params | {"repetitions": args.repetitions}, results, args.out)


if __name__ == "__main__":
    main()
