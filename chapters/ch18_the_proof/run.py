"""Chapter 18: which idea paid? V0 becomes V1 one switch at a time, and in every other order too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise, permutations
from typing import Any

import torch

from bench.common import spread
from chapters.crowd import Guest, House, Run, random_tokens
from chapters.harness import main, note
from minivllm.config import DEFAULT_MODEL

SWITCHES: dict[str, dict[str, tuple[Any, Any]]] = {  # field: (V0, V1)
    "prefix": {"kv.prefix": ("none", "hash")},
    "scheduler": {
        "scheduler.kind": ("phased", "unified"),
        "scheduler.chunked_prefill": (False, True),
        "scheduler.max_num_batched_tokens": (2048, 64),
    },
    "inputs": {"runner.inputs": ("rebuild", "persistent")},
}
ORDER = tuple(SWITCHES)
METRICS = ("all_done", "worst_gap", "long_first")
NUM_CHATS, NUM_SHARED, NUM_OWN, NUM_NEW = 4, 96, 8, 16
NUM_LONG, LONG_ARRIVES, NUM_NEW_LONG = 256, 8, 4
ROUNDS, SMOKE_ROUNDS = 3, 1
LONG = "long"
Set = frozenset[str]


def crowd(shared: bool) -> list[Guest]:
    """Chats that begin with the same instructions, or with as many tokens of their own; and one long prompt."""
    guests = []
    for i in range(NUM_CHATS):
        head = random_tokens(NUM_SHARED, 1 if shared else 100 + i)
        guests.append(Guest(f"chat {i}", head + random_tokens(NUM_OWN, 200 + i), NUM_NEW, arrives=i))
    return [*guests, Guest(LONG, random_tokens(NUM_LONG, 99), NUM_NEW_LONG, arrives=LONG_ARRIVES)]


def rules(on: Set) -> dict[str, Any]:
    """What the scheduler and the KV manager are told when these switches are at V1's side."""
    fields = [(field, values[name in on]) for name in ORDER for field, values in SWITCHES[name].items()]
    return {field: value for field, value in fields if field != "runner.inputs"}


def subsets() -> list[Set]:
    return [frozenset(some) for n in range(len(ORDER) + 1) for some in combinations(ORDER, n)]


def gap_tokens(run: Run) -> int:
    """The most tokens, anybody's, that were computed between a chat's token and its next. No clock is asked."""
    return max(
        sum(plan.total_tokens for plan in run.plans[a + 1 : b + 1])
        for name, visit in run.visits.items()
        if name != LONG
        for a, b in pairwise(visit.steps)
    )


def told(run: Run) -> dict[str, float]:
    chats = [visit for name, visit in run.visits.items() if name != LONG]
    return {
        "all_done": run.ms,
        "worst_gap": max(gap for visit in chats for gap in visit.gaps),
        "long_first": run.visits[LONG].first,
        "computed": sum(plan.total_tokens for plan in run.plans),
        "gap_tokens": gap_tokens(run),
        "long_steps": run.visits[LONG].steps[0] + 1 - LONG_ARRIVES,
    }


def name_of(on: Iterable[str]) -> str:
    return " + ".join(name for name in ORDER if name in on) or "V0"


def ratio(after: Sequence[float], before: Sequence[float], better_below: bool = True) -> dict[str, Any]:
    """After / before by the best of each, and between what it lay in single rounds."""
    rounds = [a / b for a, b in zip(after, before, strict=True)]
    best = min(after) / min(before)
    low, high = min(*rounds, best), max(*rounds, best)
    verdict = "" if low <= 1 <= high else "better" if (best < 1) == better_below else "worse"
    return {"ratio": round(best, 3), "low": round(low, 3), "high": round(high, 3), "verdict": verdict}


def path(values: dict[Set, list[float]], order: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each switch on top of those before it."""
    found, on = {}, frozenset[str]()
    for name in order:
        found[name] = ratio(values[on | {name}], values[on])
        on |= {name}
    return found


def range_of(values: dict[Set, list[float]], name: str) -> dict[str, float]:
    """What one switch is worth in each order in which all could be turned: its best and its worst place."""
    worths = [path(values, order)[name]["ratio"] for order in permutations(ORDER)]
    return {"best": min(worths), "worst": max(worths)}


def measure(smoke: bool) -> dict[str, Any]:
    houses = {False: House(num_blocks=128, runner__inputs="rebuild"), True: House(num_blocks=128)}
    for house in houses.values():
        house.serve(crowd(True), rules=rules(frozenset(ORDER)))  # the first forwards are slower than the others
    runs: dict[Set, list[Run]] = {on: [] for on in subsets()}
    strangers: dict[bool, list[Run]] = {False: [], True: []}
    rounds = SMOKE_ROUNDS if smoke else ROUNDS
    for i in range(rounds):
        note(f"  all {len(runs)} configurations, round {i + 1} of {rounds}")
        for on in runs:
            runs[on].append(houses["inputs" in on].serve(crowd(True), rules=rules(on)))
        for cached in strangers:
            on = frozenset(ORDER) - (frozenset() if cached else {"prefix"})
            strangers[cached].append(houses[True].serve(crowd(False), rules=rules(on)))
    for house in houses.values():
        house.close()
    values = {m: {on: [told(run)[m] for run in found] for on, found in runs.items()} for m in METRICS}
    none, whole = frozenset[str](), frozenset(ORDER)
    rows = [
        {
            "name": name_of(on) if on != whole else "V1 (all three)",
            **{metric: spread(values[metric][on], 1) for metric in METRICS},
            "computed": told(found[0])["computed"],
            "gap_tokens": told(found[0])["gap_tokens"],
            "long_steps": told(found[0])["long_steps"],
        }
        for on, found in runs.items()
    ]
    steps = [frozenset(ORDER[:n]) for n in range(len(ORDER) + 1)]
    everything = [run for found in runs.values() for run in found]
    return {
        "model": DEFAULT_MODEL,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "num_chats": NUM_CHATS,
        "num_shared": NUM_SHARED,
        "num_long": NUM_LONG,
        "rounds": rounds,
        "equal": all(run.tokens == everything[0].tokens for run in everything),
        "rows": rows,
        "path_rows": [
            {
                "name": label,
                "all_done": spread(values["all_done"][on], 1)["min"],
                "worst_gap": spread(values["worst_gap"][on], 1)["min"],
            }
            for label, on in zip(("V0", "+ prefix", "+ scheduler", "+ inputs: V1"), steps, strict=True)
        ],
        "path": {metric: path(values[metric], ORDER) for metric in METRICS},
        "whole": {metric: ratio(values[metric][whole], values[metric][none]) for metric in METRICS},
        "orders": {name: range_of(values["all_done"], name) for name in ORDER},
        "v0": rows[0],
        "v1": rows[-1],
        "strangers": {
            "computed_without": told(strangers[False][0])["computed"],
            "computed_with": told(strangers[True][0])["computed"],
            "all_done": ratio(*([run.ms for run in strangers[cached]] for cached in (True, False))),
        },
    }


def check(results: dict[str, Any]) -> None:
    """What the text claims, true on any machine."""
    v0, v1 = results["v0"], results["v1"]
    assert results["equal"], "a switch changed the output"
    assert v1["gap_tokens"] < 0.7 * v0["gap_tokens"], "V1's longest gap holds no less work"
    assert v1["computed"] < 0.8 * v0["computed"], "the prefix cache saved no work"
    by_name = {row["name"]: row for row in results["rows"]}
    assert by_name["scheduler"]["computed"] == v0["computed"], "a scheduler computes other tokens"
    assert by_name["inputs"]["computed"] == v0["computed"]
    assert by_name["prefix"]["computed"] < v1["computed"], "pieces do not hide a prefix from who comes next"
    both = by_name["prefix + scheduler"]["gap_tokens"] / by_name["prefix"]["gap_tokens"]
    assert both < by_name["prefix"]["gap_tokens"] / v0["gap_tokens"] < 1, "the scheduler's is not the largest step"
    assert by_name["scheduler"]["gap_tokens"] < 0.7 * by_name["prefix"]["gap_tokens"], "the gain is another's"
    assert by_name["inputs"]["gap_tokens"] == v0["gap_tokens"]
    assert by_name["scheduler"]["long_steps"] > v0["long_steps"], "pieces take no more steps"
    strangers = results["strangers"]
    assert strangers["computed_with"] == strangers["computed_without"], "strangers shared something"


def tell(results: dict[str, Any]) -> str:
    lines = [
        f"{results['num_chats']} chats that share {results['num_shared']} tokens of instructions, and a prompt of "
        f"{results['num_long']}",
        "",
        "                                tokens   everybody   a chat's  the long one's",
        "what is switched to V1        computed   is served  worst gap     first token",
    ]
    for row in results["rows"]:
        lines.append(
            f"{row['name']:28} {row['computed']:9,} {row['all_done']['min']:8.0f} ms {row['worst_gap']['min']:7.0f} ms "
            f"{row['long_first']['min']:12.0f} ms"
        )
    lines += ["", "the time until everybody is served, as a multiple of what it was before the switch:"]
    for name, found in results["orders"].items():
        first = results["path"]["all_done"][name]
        lines.append(
            f"    {name:10} {first['ratio']:5.2f} ({first['low']:.2f} to {first['high']:.2f}); in other orders "
            f"{found['best']:.2f} to {found['worst']:.2f}"
        )
    whole, strangers = results["whole"]["all_done"], results["strangers"]
    lines += [
        f"    all three  {whole['ratio']:5.2f} ({whole['low']:.2f} to {whole['high']:.2f})",
        "",
        f"chats that share nothing: {strangers['computed_with']:,} tokens computed with a prefix cache, "
        f"{strangers['computed_without']:,} without;",
        f"    the time with it {strangers['all_done']['ratio']:.2f} of what it was without",
        "the same tokens from all configurations",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("18", measure, check, tell)
