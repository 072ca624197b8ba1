"""How much of a device's peak rates do kernels reach, and how far off is a simulated device's cost of each?

Fits minivllm/simulate/operations.py to tables of vLLM's kernels that ai-dynamo/aiconfigurator measured:

    seconds = max(FLOPs / (compute * peak), bytes / (memory * bandwidth)) + constant

for each device and kind of operation, on every other row; errors are of the rows between, the mean and the 90th
percentile of |predicted / measured - 1|. It prints what minivllm/simulate/fitted.py holds, and all-reduces for
devices.py. bench/operators.py reads the tables:

    python -m bench fit_devices FOLDER      # with h100_sxm-vllm-*-gemm_perf.parquet and its like
    python -m bench fit_devices --layers FOLDER # LLMServingSim's layer times: rtx4090_llama-3.1-8b_tp1 and its like
    python -m bench fit_devices --steps FILE    # DistServe's profiler-a100-80g.*.json: measured steps, nothing fitted

Step times are of LLMServe/DistServe 82831f1, OPT-13B and 66B over 1 to 8 A100: prefill a + b * tokens + c * sum of
squares, decode a + b * sum of contexts + c * requests (other figures from 95 requests), in ms.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from operators import DISTRIBUTION, read, where

from minivllm.simulate import operations as op
from minivllm.simulate.cost import Cost, Numbers, Step
from minivllm.simulate.devices import DEVICES, find_device
from minivllm.simulate.models import MODELS
from minivllm.simulate.operations import Work
from minivllm.simulate.shape import Shape, read_shape
from minivllm.simulate.weights import FP8

SYSTEMS = {"a100": "a100-80", "h100": "h100", "h200": "h200", "b200": "b200"}  # as their files begin: ours
LAYERS = {"rtx4090_llama-3.1-8b_tp1": ("rtx-4090", "llama-3.1-8b")}  # folder: device, model
LAYERS["rtxpro6000_qwen3-32b_tp1"] = "rtx-pro-6000", "qwen3-32b"
LEAST_WEIGHTS = 2_000_000  # of a product: below it none of a model's layers lies
ROUNDS = 200
LEAST = (1, 1, 0)  # of 1 / compute, 1 / memory, constant: nothing is beyond the peak
HALF = 2  # bytes of a number in 16 bits
PROMPTS, DECODES, CONTEXT = (128, 512, 1024, 2048), (1, 16, 64, 128), 512  # tokens, requests, tokens of each
RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128  # of the tables of latent attention


class Fit(NamedTuple):
    compute: float
    memory: float
    constant: float  # seconds
    error: float
    error_90: float
    num_rows: int


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path, nargs="?", help="with the parquet files")
    arguments.add_argument("--steps", type=Path, nargs="+", default=[], help="compare these steps")
    arguments.add_argument("--layers", type=Path, nargs="+", default=[], help="fit to these folders of layer times")
    asked = arguments.parse_args()
    for folder in asked.layers:
        device, model = LAYERS[folder.name]
        print_device(device, layers(folder, read_shape(MODELS[model])))
    for file in asked.steps:
        print_steps(file)
    if asked.folder is not None:
        print_fits(asked.folder)


def print_fits(folder: Path) -> None:
    for system, name in SYSTEMS.items():
        print_device(name, measured(folder, system))
    for system in SYSTEMS:
        for count, (latency, rate, error) in all_reduces(folder, system).items():
            print(f"# {system}: {count} devices, {latency * 1e6:.2f} us, {rate / 1e9:.1f} GB/s, error {error:.3f}")


def print_device(name: str, kinds: Iterator[tuple[Work, np.ndarray]]) -> None:
    print(f'    "{name}": {{')
    for work, seconds in kinds:
        print_fit(work.kind, fit(*times_at_peak(work, name), seconds))
    print("    },")


def print_fit(kind: str, found: Fit) -> None:
    rates = f"{found.compute:.3g}, {found.memory:.3g}, {found.constant:.3g}, {found.error:.2g}, {found.error_90:.2g}"
    print(f'        "{kind}": Reached({rates}),  # {found.num_rows} rows')


def times_at_peak(work: Work, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Seconds at the peak rates: of computing, of moving."""
    device = DEVICES[name]
    peak = device.flops[FP8 if work.kind in op.IN_FP8 else "bfloat16"]
    return work.flops / peak, work.bytes / device.bandwidth


# -------------------------------------------------------------------------------------------------------------- fits


def fit(computing: np.ndarray, moving: np.ndarray, measured: np.ndarray) -> Fit:
    """By turns: which of the two bounds each row, then least squares of relative errors, in which rows that are far off
    count less (so that about the mean of them, not of their squares, becomes least). The best round counts."""
    learn = np.arange(len(measured)) % 2 == 0
    factors = np.array([1.5, 1.5, 3e-6])  # 1 / compute, 1 / memory, constant
    best, weights = (np.inf, factors), 1 / measured[learn]
    for _ in range(ROUNDS):
        is_computing = factors[0] * computing >= factors[1] * moving
        terms = np.stack([computing * is_computing, moving * ~is_computing, np.ones_like(measured)], 1)
        found = np.linalg.lstsq(terms[learn] * weights[:, None], measured[learn] * weights, rcond=None)[0]
        factors = (factors + np.maximum(found, LEAST)) / 2
        errors = off(factors, computing, moving, measured)
        best = min(best, (errors[learn].mean(), factors), key=lambda one: one[0])
        weights = 1 / measured[learn] / np.sqrt(np.maximum(errors[learn], 0.02))
    errors = off(best[1], computing, moving, measured)[~learn]
    compute, memory, constant = best[1]
    return Fit(1 / compute, 1 / memory, constant, errors.mean(), np.percentile(errors, 90), len(measured))


def off(factors: np.ndarray, computing: np.ndarray, moving: np.ndarray, measured: np.ndarray) -> np.ndarray:
    predicted = np.maximum(factors[0] * computing, factors[1] * moving) + factors[2]
    return np.abs(predicted / measured - 1)


def all_reduces(folder: Path, system: str) -> dict[int, tuple[float, float, float]]:
    """Devices -> seconds of an empty one, bytes a second, mean error: of captured ones, NCCL's where they are long."""
    table = read(folder, system, "custom_allreduce", kernel_source="vLLM_custom_graph")
    assert table is not None, system
    found = {}
    for count in sorted(set(table["num_gpus"].tolist())):
        size, seconds = (column[table["num_gpus"] == count] for column in (table["message_size"], table["seconds"]))
        terms, weights = np.stack([np.ones(len(size)), size], 1), 1 / seconds
        for _ in range(30):
            (latency, each), *_ = np.linalg.lstsq(terms * weights[:, None], seconds * weights, rcond=None)
            errors = np.abs((latency + each * size) / seconds - 1)
            weights = 1 / seconds / np.sqrt(np.maximum(errors, 0.01))
        found[count] = latency, 1 / each, errors.mean()
    return found


# ------------------------------------------------------------------------------------------------------------- steps


def print_steps(file: Path) -> None:
    """Predicted / measured - 1, in the mean over models and devices."""
    off_by: dict[str, list[float]] = {}
    for model, by_count in json.loads(file.read_text()).items():
        shape = read_shape(MODELS[model.rpartition("/")[2]])
        for count, known in by_count.items():
            cost = Cost(find_device(f"{count}xa100-80"), shape, Numbers("float16", 2, 2))
            for what, step, seconds in measured_steps(known):
                off_by.setdefault(what, []).append(cost.step_seconds(step) / seconds - 1)
    for what, errors in off_by.items():
        mean, absolute = np.mean(errors), np.abs(errors).mean()
        print(f"{file.name}: {what}: {mean:+.0%}, absolute {absolute:.0%} ({len(errors)} points)")


def measured_steps(known: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, Step, float]]:
    """(what, step, seconds)"""
    for length in PROMPTS:
        fixed, each, squared = known["prefill"]
        prompt = Step(np.array([length]), np.zeros(1, np.int64), 1)
        yield f"a prompt of {length}", prompt, (fixed + each * length + squared * length**2) / 1e3
    for number in DECODES:
        which = "decoding_smallbs" if number < known["decoding_large_small_bs_threshold"] else "decoding_largebs"
        fixed, each, request = known[which]
        step = Step(np.ones(number, np.int64), np.full(number, CONTEXT - 1), number)
        yield f"{number} decodes", step, (fixed + each * number * CONTEXT + request * number) / 1e3


# ------------------------------------------------------------------------------------------------------------ tables


def measured(folder: Path, system: str) -> Iterator[tuple[Work, np.ndarray]]:
    """(operations, seconds [rows]) of each kind that the folder has."""
    for kind, dtype, size in ((op.PRODUCT, "bfloat16", HALF), (op.PRODUCT_FP8, "fp8", 1)):
        if (table := read(folder, system, "gemm", gemm_dtype=dtype)) is not None:
            large = where(table, table["n"] * table["k"] >= LEAST_WEIGHTS)
            yield op.product(*(large[c] for c in "mkn"), HALF, size, kind), large["seconds"]
    yield from attentions(folder, system)
    for kind, dtype, size in ((op.EXPERTS, "bfloat16", HALF), (op.EXPERTS_FP8, "fp8_block", 1)):
        named = {"moe_dtype": dtype, "moe_ep_size": 1, "distribution": DISTRIBUTION}
        if (table := read(folder, system, "moe", **named)) is not None:
            rows = [table[c] for c in ("num_tokens", "num_experts", "topk", "hidden_size")]
            inner = table["inter_size"] / table["moe_tp_size"]
            yield op.experts(*rows, inner, 3, HALF, size, kind), table["seconds"]


def attentions(folder: Path, system: str) -> Iterator[tuple[Work, np.ndarray]]:
    plain = {"kv_cache_dtype": "bfloat16", "window_size": 0, "head_dim": 128}
    if (table := read(folder, system, "context_attention", **plain)) is not None:
        batch, length = table["batch_size"], table["isl"]
        cached = batch * length * 2 * table["num_key_value_heads"] * 128 * HALF
        pairs = batch * length * (length + 1) / 2
        yield op.attention(pairs, cached, batch * length, table["num_heads"], 128, HALF, op.PREFILL), table["seconds"]
    if (table := read(folder, system, "generation_attention", **plain)) is not None:
        pairs = table["batch_size"] * (table["step"] + 1)
        cached = pairs * 2 * table["num_key_value_heads"] * 128 * HALF
        heads = table["num_heads"]
        yield op.attention(pairs, cached, table["batch_size"], heads, 128, HALF, op.DECODE), table["seconds"]
    sizes = RANK, ROPE, NOPE + VALUE, HALF
    if (table := read(folder, system, "context_mla", kv_cache_dtype="bfloat16")) is not None:
        batch, length = table["batch_size"], table["isl"]
        pairs, new = batch * length * (length + 1) / 2, batch * length
        yield op.expanded(pairs, new, new, table["num_heads"], *sizes), table["seconds"]
    if (table := read(folder, system, "generation_mla", kv_cache_dtype="bfloat16")) is not None:
        pairs = table["batch_size"] * (table["step"] + 1)
        cached = pairs * (RANK + ROPE) * HALF
        yield op.absorbed(pairs, cached, table["batch_size"], table["num_heads"], *sizes), table["seconds"]


def layers(folder: Path, shape: Shape) -> Iterator[tuple[Work, np.ndarray]]:
    """As measured(), of one model's layers."""
    hidden, inner, queries = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_size
    keys = shape.num_kv_heads * shape.head_size
    sizes = {"qkv_proj": (hidden, queries + 2 * keys), "o_proj": (queries, hidden)}
    sizes |= {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
    rows = [row for row in csv.reader((folder / "dense.csv").open()) if row[0] in sizes]
    num_in, num_out = np.array([sizes[row[0]] for row in rows]).T
    tokens, dense = np.array([row[1:] for row in rows], float).T
    yield op.product(tokens, num_in, num_out, HALF, HALF, op.PRODUCT), dense / 1e6
    table = np.loadtxt(folder / "attention.csv", delimiter=",", skiprows=1)
    outside = shape.num_heads, shape.head_size, HALF
    new, before, _, _, seconds = table[(table[:, 0] > 0) & (table[:, 2] == 0)].T
    cached = (new + before) * 2 * keys * HALF
    yield op.attention(new * before + new * (new + 1) / 2, cached, new, *outside, op.PREFILL), seconds / 1e6
    _, _, decodes, context, seconds = table[(table[:, 0] == 0) & (table[:, 2] > 0)].T
    pairs = decodes * context
    yield op.attention(pairs, pairs * 2 * keys * HALF, decodes, *outside, op.DECODE), seconds / 1e6


if __name__ == "__main__":
    main()
