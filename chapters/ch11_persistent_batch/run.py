"""Chapter 11: where do the other milliseconds go? A step without its model, prepared in three ways; then with it.

First the real scheduler and the real input builders run around a model that answers at once: what is left is the host's
work. Then that model reads some memory, as a real one does. And then it is a real one, with a stopwatch on the builder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import spread
from chapters.crowd import Guest, House, Run, random_tokens
from chapters.harness import in_time, main, note
from minivllm.batch import BatchKey, InputSizes
from minivllm.config import DEFAULT_MODEL, EngineConfig
from minivllm.engine.build import build_kv, build_scheduler
from minivllm.features import INPUT_BUILDERS
from minivllm.plan import StepOutput
from minivllm.request import EngineRequest, Request, SamplingParams
from minivllm.runner.inputs import Rows
from minivllm.scheduler.base import Limits

BUILDERS = ("rebuild", "persistent", "gather")
BLOCK_SIZE = 16
NUM_REQS, SMOKE_NUM_REQS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 256)
LENGTHS, SMOKE_LENGTHS = (128, 512, 2048), (128, 2048)  # tokens of a request
LENGTH, AT_LENGTHS = 128, 64  # of the first figure's requests; how many there are when it is their length that grows
COLD_REQS, SMOKE_COLD_REQS = (1, 8, 32, 64, 128, 256), (1, 256)
WARMUP, STEPS, SMOKE_STEPS = 4, 32, 16  # steps that are not measured, and that are
ROUNDS, SMOKE_ROUNDS = 5, 3
COLD_STEPS, COLD_ROUNDS = 16, 3
ENGINE_REQS, SMOKE_ENGINE_REQS = (1, 8, 32), (1, 4)
NUM_PROMPT, NUM_NEW, SMOKE_NEW = 16, 24, 12  # in the engine with its model
SWEPT = 64 << 20  # bytes that are read in the model's place, as a model reads its weights
MODEL_MS = (1, 2, 5, 10, 20, 50, 100)


class Stopwatch:
    """Around an input builder: ms of each step, which begins with apply()."""

    def __init__(self, inputs: Any):
        self.inputs, self.sizes = inputs, inputs.sizes
        self.steps: list[float] = []

    def apply(self, *args: Any) -> None:
        self.steps.append(0.0)
        self._timed(self.inputs.apply, *args)

    def build(self, *args: Any) -> Any:
        return self._timed(self.inputs.build, *args)

    def append(self, *args: Any) -> None:
        self._timed(self.inputs.append, *args)

    def _timed(self, run: Callable[..., Any], *args: Any) -> Any:
        begin = time.perf_counter()
        made = run(*args)
        self.steps[-1] += 1e3 * (time.perf_counter() - begin)
        return made


class Host:
    """An engine without a model: requests of about `length` tokens that decode, and 5 is always the next token.

    Their lengths differ, as those of strangers do: in each step every sixteenth needs a new block. `model` is run in
    the model's place.
    """

    def __init__(self, num_reqs: int, length: int, num_steps: int, builder: str, model: Callable[[], Any]):
        longest = length + BLOCK_SIZE + WARMUP + num_steps
        num_blocks = num_reqs * -(-longest // BLOCK_SIZE)
        config = EngineConfig.build("v1", {"kv.block_size": BLOCK_SIZE})
        limits = Limits(num_reqs, num_reqs * longest, longest, num_blocks * BLOCK_SIZE)  # all prompts in one step
        self.scheduler = build_scheduler(config, build_kv(config, num_blocks, longest), limits).base
        self.inputs = Stopwatch(INPUT_BUILDERS.get(builder)(InputSizes(num_reqs, longest, BLOCK_SIZE, num_blocks)))
        self.rows, self.model = Rows(num_reqs), model
        params = SamplingParams(temperature=0.0, max_tokens=longest - length, ignore_eos=True)
        for i in range(num_reqs):
            prompt = random_tokens(length + i % BLOCK_SIZE, i)
            self.scheduler.add(Request.make(EngineRequest(f"request-{i}", prompt, params)))

    def step(self) -> dict[str, float]:
        """ms of each phase"""
        begin = time.perf_counter()
        plan = self.scheduler.schedule(begin)
        planned = time.perf_counter()
        self.inputs.apply(plan, [self.rows.join(join.req_id) for join in plan.joins])
        batch = self.inputs.build(plan, BatchKey(plan.total_tokens))
        self.model()
        requests = batch.sample_requests
        self.inputs.append(batch, requests, np.full(len(requests), 5))
        out = StepOutput({batch.req_ids[i]: [5] for i in requests.tolist()})
        executed = time.perf_counter()
        self.scheduler.update(plan, out)
        updated = time.perf_counter()
        return {
            "schedule": 1e3 * (planned - begin),
            "prepare": self.inputs.steps[-1],
            "update": 1e3 * (updated - executed),
        }


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Of each phase: a step that met another program would weigh for many."""
    return {phase: float(np.median([step[phase] for step in steps])) for phase in steps[0]}


def no_model() -> None:
    """It answers at once."""


def host_times(
    num_reqs: int, builder: str, num_steps: int, length: int = LENGTH, model: Callable[[], Any] = no_model
) -> dict[str, float]:
    host = Host(num_reqs, length, num_steps, builder, model)
    return medians([host.step() for _ in range(WARMUP + num_steps)][WARMUP:])


def compare(rounds: int, **runs: Callable[[], dict[str, float]]) -> dict[str, list[dict[str, float]]]:
    """Each in its turn, so that what disturbs the machine disturbs all of them alike."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    return found


def phase(runs: list[dict[str, float]], name: str) -> dict[str, Any]:
    return spread([run[name] for run in runs], 4)


def lines_of_python(num_reqs: int, builder: str) -> int:
    """Executed in the input builder's file during one step. No clock is asked."""
    host, count, before = Host(num_reqs, LENGTH, 1, builder, no_model), 0, sys.gettrace()

    def watch(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        if not Path(frame.f_code.co_filename).stem.startswith("inputs"):
            return None
        count += event == "line"
        return watch

    for _ in range(WARMUP):
        host.step()
    sys.settrace(watch)
    try:
        host.step()
    finally:
        sys.settrace(before)
    return count


def by_number(num_reqs: int, num_steps: int, rounds: int) -> dict[str, Any]:
    runs = {name: partial(host_times, num_reqs, name, num_steps) for name in BUILDERS}
    found = compare(rounds, **runs)
    everything = [run for runs in found.values() for run in runs]
    return {
        "num_reqs": num_reqs,
        **{name: phase(runs, "prepare") for name, runs in found.items()},
        "schedule": phase(everything, "schedule"),
        "update": phase(everything, "update"),
        "lines": {name: lines_of_python(num_reqs, name) for name in BUILDERS},
    }


def by_length(length: int, num_steps: int, rounds: int) -> dict[str, Any]:
    runs = {name: partial(host_times, AT_LENGTHS, name, num_steps, length) for name in BUILDERS}
    return {"length": length, **{name: phase(runs, "prepare") for name, runs in compare(rounds, **runs).items()}}


def with_cold_caches(num_reqs: int, memory: np.ndarray) -> dict[str, Any]:
    """A model that does nothing but read: what the host had in the caches is not there for the next step."""
    runs = {name: partial(host_times, num_reqs, name, COLD_STEPS, model=memory.sum) for name in BUILDERS[:2]}
    found = compare(COLD_ROUNDS, **runs)
    everything = [run for runs in found.values() for run in runs]
    return {
        "num_reqs": num_reqs,
        **{name: phase(runs, "prepare") for name, runs in found.items()},
        "schedule": phase(everything, "schedule"),
        "update": phase(everything, "update"),
    }


# ---------------------------------------------------------------------------------------- with the model


def serve(house: House, num_reqs: int, num_new: int, builder: str) -> tuple[dict[str, float], Run]:
    """(ms of each phase of a decode step, the run)"""
    runner = house.executor.worker.runner
    watch = Stopwatch(INPUT_BUILDERS.get(builder)(runner.inputs.sizes))
    runner.inputs = runner.head.inputs = watch
    guests = [Guest(str(i), random_tokens(NUM_PROMPT, i), num_new) for i in range(num_reqs)]
    run = house.serve(guests, rules={"kv.prefix": "none"})
    steps = []
    for plan, times, prepare in zip(run.plans, run.times, watch.steps, strict=False):  # later ones: the rows are left
        if plan.total_tokens == num_reqs:
            host = times["schedule"] + prepare + times["update"]
            model = times["execute"] - prepare
            steps.append({"model": model, "prepare": prepare, "host": host, "percent": 100 * host / (host + model)})
    return medians(steps[WARMUP:]), run


def with_model(sizes: tuple[int, ...], num_new: int, rounds: int) -> tuple[list[dict[str, Any]], bool]:
    house = House(num_blocks=sizes[-1] * 4, model__dtype="auto", model__quantization="auto")
    serve(house, 1, num_new, "rebuild")  # the first forwards of a process are slower than the others
    rows, equal = [], True
    for num_reqs in sizes:
        note(f"  {num_reqs} requests with the model")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in BUILDERS}
        tokens = []
        for _ in range(rounds):
            for name, runs in found.items():
                times, run = serve(house, num_reqs, num_new, name)
                runs.append(times)
                tokens.append(run.tokens)
        equal = equal and all(got == tokens[0] for got in tokens)
        rows.append(
            {
                "num_reqs": num_reqs,
                "model": phase([run for runs in found.values() for run in runs], "model"),
                **{
                    name: {part: phase(runs, part) for part in ("prepare", "host", "percent")}
                    for name, runs in found.items()
                },
            }
        )
    house.close()
    return rows, equal


# ---------------------------------------------------------------------------------------- the results


def crossing(rows: list[dict[str, Any]]) -> int:
    """The fewest requests for which a batch that stays is prepared faster."""
    return next(row["num_reqs"] for row in rows if row["persistent"]["min"] < row["rebuild"]["min"])


def shares(row: dict[str, Any]) -> list[dict[str, float]]:
    """What part of a step this host's work would be beside a model of so many ms. Arithmetic, no run."""
    beside = row["schedule"]["min"] + row["update"]["min"]
    host = {name: beside + row[name]["min"] for name in BUILDERS[:2]}
    return [{"model": ms, **{name: round(100 * own / (own + ms), 1) for name, own in host.items()}} for ms in MODEL_MS]


def measure(smoke: bool) -> dict[str, Any]:
    num_steps, rounds = (SMOKE_STEPS, SMOKE_ROUNDS) if smoke else (STEPS, ROUNDS)
    rows = []
    for num_reqs in SMOKE_NUM_REQS if smoke else NUM_REQS:
        note(f"  {num_reqs} requests without a model")
        rows.append(by_number(num_reqs, num_steps, rounds))
    note("  longer requests")
    lengths = [by_length(length, num_steps, rounds) for length in (SMOKE_LENGTHS if smoke else LENGTHS)]
    engine, equal = with_model(SMOKE_ENGINE_REQS if smoke else ENGINE_REQS, SMOKE_NEW if smoke else NUM_NEW, 2)
    note("  with cold caches")
    memory = np.ones(SWEPT // 8)
    cold = [with_cold_caches(num_reqs, memory) for num_reqs in (SMOKE_COLD_REQS if smoke else COLD_REQS)]
    first, last = rows[0], rows[-1]
    return {
        "model": DEFAULT_MODEL,
        "threads": torch.get_num_threads(),
        "length": LENGTH,
        "block_size": BLOCK_SIZE,
        "rows": rows,
        "crossing": crossing(rows),
        "ratio_first": round(first["persistent"]["min"] / first["rebuild"]["min"], 2),
        "ratio_last": round(last["rebuild"]["min"] / last["persistent"]["min"], 1),
        "lengths": lengths,
        "at_lengths": AT_LENGTHS,
        "engine": engine,
        "equal": equal,
        "mib": SWEPT >> 20,
        "cold": cold,
        "cold_crossing": crossing(cold),
        "shares": shares(cold[-1]),
    }


def check(results: dict[str, Any]) -> None:
    rows, lengths = results["rows"], results["lengths"]
    first, last = rows[0], rows[-1]
    assert results["equal"], "another way to make the inputs changed the output"
    in_time(first["rebuild"]["min"] < first["gather"]["min"], "arrays are no dearer than lists for one request")
    in_time(first["persistent"]["min"] < first["rebuild"]["min"], "one request is dearer to keep than to begin anew")
    for name in BUILDERS[1:]:
        in_time(2 * last[name]["min"] < last["rebuild"]["min"], "many requests are not prepared faster")
        grown = last["lines"][name] - first["lines"][name]
        assert 8 * grown < last["lines"]["rebuild"] - first["lines"]["rebuild"], "its Python grows with the batch"
    assert last["lines"]["rebuild"] > 5 * last["num_reqs"], "the rebuild has no loop over requests"
    grown = {name: lengths[-1][name]["min"] - lengths[0][name]["min"] for name in BUILDERS}
    in_time(grown["rebuild"] > 2 * grown["persistent"], "long requests are no dearer to start over with")
    cold = results["cold"]
    for name in BUILDERS[:2]:
        in_time(cold[0][name]["min"] > first[name]["min"], "caches do not matter to the host")
    in_time(cold[-1]["persistent"]["min"] < cold[-1]["rebuild"]["min"], "with cold caches nothing is gained")
    in_time(results["cold_crossing"] >= results["crossing"], "warm caches flatter nobody")
    in_time(last["persistent"]["min"] < last["gather"]["min"], "to gather all costs no more than to add what is new")
    in_time(last["persistent"]["min"] < last["schedule"]["min"] + last["update"]["min"], "preparing is the larger part")
    alone = {row["num_reqs"]: row for row in rows}
    for row in results["engine"]:
        for name in BUILDERS[:2] if row["num_reqs"] in alone else ():
            in_time(row[name]["prepare"]["min"] > alone[row["num_reqs"]][name]["min"], "the model leaves caches warm")
        in_time(row["persistent"]["host"]["min"] < row["model"]["min"], "the model is not what takes the time here")
    in_time(
        all(row["rebuild"] > row["persistent"] for row in results["shares"]), "the rebuild is no larger part of a step"
    )


def tell(results: dict[str, Any]) -> str:
    lines = [
        f"a step in which requests of about {results['length']} tokens decode, without the model",
        "",
        "           ms to prepare its inputs       ms beside it   lines of Python to prepare",
        "requests  rebuild  persistent  gather  schedule  update  rebuild  persistent  gather",
    ]
    for row in results["rows"]:
        prepare = [row[name]["min"] for name in BUILDERS]
        count = [row["lines"][name] for name in BUILDERS]
        lines.append(
            f"{row['num_reqs']:8} {prepare[0]:8.3f} {prepare[1]:11.3f} {prepare[2]:7.3f} "
            f"{row['schedule']['min']:9.3f} {row['update']['min']:7.3f} {count[0]:8,} {count[1]:11} {count[2]:7}"
        )
    lines += ["", f"{results['at_lengths']} requests of other lengths, ms to prepare", ""]
    lines.append("  tokens  rebuild  persistent  gather")
    for row in results["lengths"]:
        prepare = [row[name]["min"] for name in BUILDERS]
        lines.append(f"{row['length']:8} {prepare[0]:8.3f} {prepare[1]:11.3f} {prepare[2]:7.3f}")
    lines += [
        "",
        "a decode step of the whole engine",
        "",
        "                 ms to prepare      all but the model, percent of a step",
        "requests  model ms  rebuild  persistent  rebuild  persistent",
    ]
    for row in results["engine"]:
        v0, v1 = row["rebuild"], row["persistent"]
        lines.append(
            f"{row['num_reqs']:8} {row['model']['min']:9.1f} {v0['prepare']['min']:8.3f} {v1['prepare']['min']:11.3f} "
            f"{v0['percent']['min']:7.1f}% {v1['percent']['min']:10.1f}%"
        )
    lines += ["", f"without the model, but {results['mib']} MiB are read in its place", ""]
    lines += ["           ms to prepare", "requests  rebuild  persistent"]
    for row in results["cold"]:
        lines.append(f"{row['num_reqs']:8} {row['rebuild']['min']:8.3f} {row['persistent']['min']:11.3f}")
    lines.append("")
    lines.append("the same tokens, whoever prepared" if results["equal"] else "the tokens differ")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("11", measure, check, tell)
