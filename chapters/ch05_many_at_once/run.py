"""Chapter 5: what if requests end at different times? Twelve requests on four seats: one by one, in batches, or as
seats become free.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.common import spread
from chapters.crowd import Guest, House, Run, random_tokens
from chapters.harness import in_time, main, note
from minivllm.config import DEFAULT_MODEL

SEATS = 4
NUM_PROMPT = 12
LENGTHS = (40, 6, 10, 24, 8, 36, 5, 12, 30, 7, 16, 9)
SMOKE_LENGTHS = (12, 3, 5, 8, 4, 10, 3, 5)
EQUAL, SMOKE_EQUAL = (16,) * 12, (4,) * 8
PER_MARK = 2  # steps for each character of the printed charts

BATCHES = {"scheduler.kind": "static", "scheduler.chunked_prefill": False, "kv.prefix": "none"}
RULES = {
    "one-by-one": {**BATCHES, "scheduler.max_num_seqs": 1},
    "static": {**BATCHES, "scheduler.max_num_seqs": SEATS},
    "continuous": {"scheduler.kind": "unified", "scheduler.max_num_seqs": SEATS, "kv.prefix": "none"},
}


def guests(lengths: tuple[int, ...]) -> list[Guest]:
    return [Guest(f"{i:2}", random_tokens(NUM_PROMPT, i), num_new) for i, num_new in enumerate(lengths)]


def summary(runs: list[Run]) -> dict[str, Any]:
    run = runs[0]
    busy = sum(len(plan.num_tokens) for plan in run.plans)
    return {
        "steps": len(run.plans),
        "busy": busy,
        "seconds": spread([each.ms / 1e3 for each in runs], 2),
        "mean_latency": spread(
            [sum(v.times[-1] for v in each.visits.values()) / len(each.visits) / 1e3 for each in runs], 2
        ),
        "per_step": [len(plan.num_tokens) for plan in run.plans],
        "stays": {name: [visit.steps[0], visit.steps[-1]] for name, visit in run.visits.items()},
    }


def measure(smoke: bool) -> dict[str, Any]:
    lengths, equal = (SMOKE_LENGTHS, SMOKE_EQUAL) if smoke else (LENGTHS, EQUAL)
    house = House(num_blocks=64)
    house.serve(guests((4, 4)))  # the first forwards of a process are slower than the others
    runs: dict[str, list[Run]] = {name: [] for name in RULES}
    for i in range(2):
        for name, rules in RULES.items():
            note(f"  {name}, run {i + 1} of 2")
            runs[name].append(house.serve(guests(lengths), rules=rules))
    note("  requests of equal lengths")
    same = {name: house.serve(guests(equal), rules=RULES[name]) for name in ("static", "continuous")}
    house.close()
    rules = {name: summary(found) for name, found in runs.items()}
    for row in rules.values():
        row["idle_percent"] = round(100 * (1 - row["busy"] / (SEATS * row["steps"])), 1)
    used = {name: rules[name]["per_step"] for name in ("static", "continuous")}
    return {
        "model": DEFAULT_MODEL,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "seats": SEATS,
        "num_requests": len(lengths),
        "num_tokens": sum(lengths),
        "longest": max(lengths),
        "shortest": min(lengths),
        "equal": all(run.tokens == runs["static"][0].tokens for found in runs.values() for run in found),
        "rules": rules,
        "seats_in_use": [
            {"step": step, **{name: found[step] if step < len(found) else 0 for name, found in used.items()}}
            for step in range(len(used["static"]))
        ],
        "equal_lengths": {name: len(run.plans) for name, run in same.items()},
    }


def check(results: dict[str, Any]) -> None:
    one, static, continuous = (results["rules"][name] for name in RULES)
    assert results["equal"], "who sits beside a request changed its output"
    for row in (one, static, continuous):
        assert row["busy"] == results["num_tokens"], "a step gave a request no token, or two"
    assert one["steps"] == results["num_tokens"], "one at a time is one step a token"
    assert continuous["steps"] < static["steps"] < one["steps"]
    assert continuous["idle_percent"] < static["idle_percent"], "continuous batching leaves no fewer seats idle"
    in_time(continuous["seconds"]["min"] < one["seconds"]["min"], "a batch is no faster than one at a time")
    ends = [sum(last for _, last in row["stays"].values()) for row in (continuous, static)]
    assert ends[0] < ends[1], "nobody gains by leaving early"
    same = results["equal_lengths"]
    assert same["static"] == same["continuous"], "with equal lengths there should be nothing to gain"


def gantt(row: dict[str, Any]) -> list[str]:
    lines = []
    for name, (first, last) in row["stays"].items():
        first, last = first // PER_MARK, last // PER_MARK
        lines.append(f"  {name} {'.' * first}{'#' * (last - first + 1)}")
    return lines


def tell(results: dict[str, Any]) -> str:
    lines = [
        f"{results['num_requests']} requests, {results['seats']} seats, {results['num_tokens']} tokens in all",
        "",
        "                 steps   seats idle   all served in   a request takes",
    ]
    for name, row in results["rules"].items():
        idle = "" if name == "one-by-one" else f"{row['idle_percent']:.0f} %"
        lines.append(
            f"{name:15} {row['steps']:6} {idle:>12} {row['seconds']['min']:13.1f} s "
            f"{row['mean_latency']['min']:15.1f} s"
        )
    for name in ("static", "continuous"):
        lines += ["", f"{name}: . waits, # sits ({PER_MARK} steps each)", *gantt(results["rules"][name])]
    same = results["equal_lengths"]
    lines += ["", f"requests of one length: {same['static']} steps static, {same['continuous']} continuous"]
    lines.append("the same tokens in every way" if results["equal"] else "the tokens differ")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("05", measure, check, tell)
