"""Chapter 3: why do 8 requests cost barely more than one? Steps of the engine, against what this machine can do."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from bench.common import spread
from chapters.ch03_what_a_step_costs.solution import step_cost
from chapters.harness import in_time, main, note, switches
from minivllm import LLM, SamplingParams
from minivllm.config import DEFAULT_MODEL
from minivllm.errors import ConfigError
from minivllm.loading import resolve
from minivllm.models.spec import ModelSpec
from minivllm.plan import StepPlan

SWITCH = next(row for row in switches("03") if row.field == "model.quantization")
OPTIONS = ("none", "int8", "int4")
SIZES, SMOKE_SIZES = (1, 2, 4, 8, 16, 32, 64), (1, 8, 32)
NUM_PROMPT, NUM_NEW, SMOKE_NEW = 8, 8, 4
ROUNDS = 2
CONTEXTS = (16, 512, 2048, 8192)
USERS = 64
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def fastest(run: Callable[[], Any], seconds: float) -> float:
    """The best time of many, in seconds: other programs only ever add time."""
    run()
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def bandwidth(seconds: float) -> float:
    """Bytes a second that come from memory: the sum of numbers that no cache can hold."""
    numbers = torch.ones(64 * 2**20)
    return numbers.numel() * numbers.element_size() / fastest(numbers.sum, seconds)


def arithmetic(dtype: torch.dtype, seconds: float) -> float:
    """FLOPs a second: the product of two matrices, in which each number is used a thousand times."""
    n = 1024
    a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
    return 2 * n**3 / fastest(lambda: a @ b, seconds)


def limit_ms(flops: int, num_bytes: int, machine: dict[str, float]) -> float:
    """No step can be faster than its slower half: the arithmetic, or the way from memory."""
    return 1e3 * max(flops / machine["flops"], num_bytes / machine["bandwidth"])


class StepTimes:
    """An observer of the engine: how long each step took that gave every request one token."""

    def __init__(self) -> None:
        self.execute: dict[int, list[float]] = defaultdict(list)  # requests in the step -> ms

    def on_step(self, plan: StepPlan, out: Any, deltas: Any, times: dict[str, float]) -> None:
        if plan.total_tokens == len(plan.num_tokens) and plan.num_tokens:
            self.execute[plan.total_tokens].append(times["execute"])

    def ignore(self, *_: Any) -> None: ...

    on_start = on_add = on_abort = close = ignore


def steps(option: str, sizes: tuple[int, ...], num_new: int) -> tuple[str, dict[int, dict[str, float]]]:
    """The engine's dtype, and {requests: ms of a step}, with weights kept in this way."""
    watch = StepTimes()
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    overrides = {
        SWITCH.field: option,
        "model.dense_copy": False,  # the same weights in every step,
        "model.huge_pages": False,  # where they are: the first steps are timed, while they would still move
        "kv.memory": "128MiB",
        "kv.prefix": "none",
        "executor.num_threads": torch.get_num_threads(),
    }
    with LLM(overrides=overrides, observers=[watch]) as llm:
        for turn in range(ROUNDS):  # so that whatever else the machine does meets all sizes alike
            note(f"  {SWITCH.field}={option}, round {turn + 1} of {ROUNDS}")
            for n in sizes:
                prompts = [[1000 + 50 * i + j for j in range(NUM_PROMPT)] for i in range(n)]
                llm.generate(prompts, params, use_tqdm=False)
        dtype = llm.info["dtype"]
    return dtype, {n: spread(watch.execute[n], 2) for n in sizes}


def contexts(spec: ModelSpec, size: int) -> list[dict[str, Any]]:
    """What a step of many users reads, by how long their texts are."""
    weights = step_cost(spec, [], size, size).bytes
    rows = []
    for context in CONTEXTS:
        cost = step_cost(spec, [(1, context - 1)] * USERS, size, size)
        rows.append(
            {
                "context": context,
                "weights_mib": round(weights / 2**20),
                "kv_mib": round((cost.bytes - weights) / 2**20),
                "flops_a_byte": round(cost.flops / cost.bytes, 1),
            }
        )
    return rows


def measure(smoke: bool) -> dict[str, Any]:
    spec = resolve(DEFAULT_MODEL).spec
    sizes, num_new = (SMOKE_SIZES, SMOKE_NEW) if smoke else (SIZES, NUM_NEW)
    seconds = 0.3 if smoke else 2.0
    note("  what the machine can do")
    bytes_a_second = bandwidth(seconds)  # now and once more at the end: what else runs may disturb one of the two
    dtype, measured = "", {}
    refused: dict[str, str] = {}
    for option in OPTIONS:
        try:
            dtype, measured[option] = steps(option, sizes, num_new)
        except ConfigError as e:  # packed weights need the C++ kernels
            refused[option] = str(e)
    note("  what the machine can do")
    machine = {"bandwidth": max(bytes_a_second, bandwidth(seconds)), "flops": arithmetic(DTYPES[dtype], seconds)}
    size = DTYPES[dtype].itemsize
    one = measured["none"][1]["min"]
    rows = []
    for n in sizes:
        cost = step_cost(spec, [(1, NUM_PROMPT + num_new // 2)] * n, size, size)
        rows.append(
            {
                "requests": n,
                "together": measured["none"][n],
                "apart": round(n * one, 1),
                "a_token": round(measured["none"][n]["min"] / n, 2),
                "mflops": round(cost.flops / 1e6),
                "mib": round(cost.bytes / 2**20),
                "flops_a_byte": round(cost.flops / cost.bytes, 2),
                "limit": round(limit_ms(*cost, machine), 2),
                "ratio": round(measured["none"][n]["min"] / one, 2),
            }
        )
    single = step_cost(spec, [(1, 0)], size, size)
    return {
        "model": DEFAULT_MODEL,
        "dtype": dtype,
        "bytes_a_weight": size,
        "threads": torch.get_num_threads(),
        "machine": {
            "gb_a_second": round(machine["bandwidth"] / 1e9, 1),
            "gflops": round(machine["flops"] / 1e9),
            "flops_a_byte": round(machine["flops"] / machine["bandwidth"]),
        },
        "one": {"mflops": round(single.flops / 1e6), "mib": round(single.bytes / 2**20)},
        "rows": rows,
        "eight": next(row for row in rows if row["requests"] == 8),
        "contexts": contexts(spec, size),
        "users": USERS,
        "switch": {
            option: {
                "one": times[sizes[0]],
                "many": times[sizes[-1]],
                "gain_one": round(one / times[1]["min"], 2),
                "gain_many": round(measured["none"][sizes[-1]]["min"] / times[sizes[-1]]["min"], 2),
            }
            for option, times in measured.items()
        },
        "refused": refused,
        "field": SWITCH.field,
        "many": sizes[-1],
    }


def check(results: dict[str, Any]) -> None:
    """What the text claims, true on any machine."""
    first, last, eight = results["rows"][0], results["rows"][-1], results["eight"]
    in_time(eight["together"]["min"] < eight["apart"] / 3, "a step of eight costs more than a third of eight steps")
    in_time(last["a_token"] < 0.5 * first["a_token"], "a token does not get cheaper in a larger step")
    in_time(last["together"]["min"] > first["together"]["min"], "more requests cost nothing at all")
    assert last["flops_a_byte"] > 10 * first["flops_a_byte"], "the weights are not shared"
    in_time(results["machine"]["flops_a_byte"] > 2 * first["flops_a_byte"], "this machine has no wide gap to fill")
    kv = [row["kv_mib"] for row in results["contexts"]]
    assert kv[0] < results["contexts"][0]["weights_mib"] < kv[-1], "K and V do not outgrow the weights"
    if "int4" not in results["refused"]:
        gain = results["switch"]["int4"]
        in_time(gain["gain_one"] > 1.1, "fewer bits do not help a step of one")
        in_time(gain["gain_one"] > gain["gain_many"], "they help many as much")


def tell(results: dict[str, Any]) -> str:
    machine = results["machine"]
    lines = [
        f"this machine ({results['threads']} threads, {results['dtype']}): {machine['gb_a_second']} GB/s from memory, "
        f"{machine['gflops']:,} GFLOP/s",
        f"it can do {machine['flops_a_byte']} FLOPs in the time in which one byte arrives",
        "",
        "requests in    a step    a token   FLOPs a byte   no faster than",
        "the step",
    ]
    for row in results["rows"]:
        lines.append(
            f"{row['requests']:8} {row['together']['min']:9.1f} ms {row['a_token']:7.2f} ms "
            f"{row['flops_a_byte']:12.1f} {row['limit']:13.1f} ms"
        )
    lines += ["", f"what a step of {results['users']} requests reads:"]
    lines += [
        f"    {row['context']:5} tokens each: {row['weights_mib']} MiB of weights, {row['kv_mib']:6,} MiB of K and V"
        for row in results["contexts"]
    ]
    lines += [""]
    for option, found in results["switch"].items():
        lines.append(
            f"{results['field']}={option:5} one request {found['one']['min']:7.1f} ms ({found['gain_one']:.1f} x), "
            f"{results['many']} requests {found['many']['min']:7.1f} ms ({found['gain_many']:.1f} x)"
        )
    lines += [f"{results['field']}={option}: not here ({why})" for option, why in results["refused"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("03", measure, check, tell)
