"""Chapter 10: why does my neighbour's long prompt freeze my chat? Four chats, a long prompt, two schedulers.

Everything but the rules is the same: the model, the arrivals, the pool, the way inputs are made.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from bench.common import spread
from chapters.crowd import Guest, House, Run, random_tokens
from chapters.harness import in_time, main, note
from minivllm.config import DEFAULT_MODEL

CHATS = [f"chat {i}" for i in range(4)]
LONG = "long"
NUM_PROMPT, NUM_NEW, SMOKE_NEW, NUM_NEW_LONG = 16, 40, 28, 4
ARRIVES = 12  # the long prompt, before this step
NUM_LONG, SMOKE_LONG = 640, 256
BUDGETS, SMOKE_BUDGETS = (32, 64, 128, 256, 512), (32, 256)
SHOWN = 64  # the budget of the first figure
V0 = {"scheduler.kind": "phased", "scheduler.chunked_prefill": False, "kv.prefix": "none"}


def v1(budget: int) -> dict[str, Any]:
    return {"scheduler.kind": "unified", "scheduler.max_num_batched_tokens": budget, "kv.prefix": "none"}


def guests(num_long: int, num_new: int) -> list[Guest]:
    chats = [Guest(name, random_tokens(NUM_PROMPT, seed), num_new) for seed, name in enumerate(CHATS)]
    return [*chats, Guest(LONG, random_tokens(num_long, 99), NUM_NEW_LONG, arrives=ARRIVES)]


def most_steps_missed(run: Run) -> int:
    """The longest run of steps in which a chat that had begun to answer got no token."""
    return max(b - a - 1 for name in CHATS for a, b in pairwise(run.visits[name].steps))


def summary(runs: list[Run]) -> dict[str, Any]:
    """Of one configuration's runs, whose plans are the same."""
    run = runs[0]
    chunks = [plan.num_tokens[LONG] for plan in run.plans if plan.num_tokens.get(LONG, 0) > 1]
    gaps = [sorted(gap for name in CHATS for gap in each.visits[name].gaps) for each in runs]
    return {
        "worst_gap": spread([found[-1] for found in gaps], 1),
        "typical_gap": spread([found[len(found) // 2] for found in gaps], 1),
        "long_first": spread([each.visits[LONG].first for each in runs], 1),
        "all_done": spread([each.ms for each in runs], 1),
        "pieces": len(chunks),
        "largest_piece": max(chunks),
        "largest_step": max(plan.total_tokens for plan in run.plans),
        "num_steps": len(run.plans),
        "most_steps_missed": most_steps_missed(run),
    }


def measure(smoke: bool) -> dict[str, Any]:
    num_long, num_new, budgets = (SMOKE_LONG, SMOKE_NEW, SMOKE_BUDGETS) if smoke else (NUM_LONG, NUM_NEW, BUDGETS)
    rules = {"v0": V0, **{f"v1 {budget}": v1(budget) for budget in budgets}}
    house, runs = House(num_blocks=96), {name: [] for name in rules}
    house.serve(guests(64, 4), rules=V0)  # the first forwards of a process are slower than the others
    for i in range(2):
        for name, how in rules.items():
            note(f"  {name}, run {i + 1} of 2")
            runs[name].append(house.serve(guests(num_long, num_new), rules=how))
    house.close()
    shown = f"v1 {SHOWN if SHOWN in budgets else budgets[0]}"
    mine = {name: runs[name][0].visits[CHATS[0]].gaps for name in ("v0", shown)}
    return {
        "model": DEFAULT_MODEL,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "num_chats": len(CHATS),
        "num_long": num_long,
        "shown_budget": int(shown.split()[1]),
        "equal": all(run.tokens == runs["v0"][0].tokens for found in runs.values() for run in found),
        "gaps": [
            {"token": token, "v0": round(a, 1), "v1": round(b, 1)}
            for token, (a, b) in enumerate(zip(mine["v0"], mine[shown], strict=True), 2)
        ],
        "v0": summary(runs["v0"]),
        "v1": [{"budget": budget, **summary(runs[f"v1 {budget}"])} for budget in budgets],
    }


def check(results: dict[str, Any]) -> None:
    v0, rows, num_chats = results["v0"], results["v1"], results["num_chats"]
    small, large = rows[0], rows[-1]
    assert results["equal"], "a scheduling decision changed the output"
    assert v0["pieces"] == 1 and v0["most_steps_missed"] >= 1, "V0 let somebody decode beside the prompt"
    for row in rows:
        assert row["most_steps_missed"] == 0, "under V1 a chat missed a step"
        assert row["largest_step"] <= row["budget"], "a step exceeded its budget"
        assert row["pieces"] == -(-results["num_long"] // (row["budget"] - num_chats)), "the prompt was cut otherwise"
    in_time(v0["worst_gap"]["min"] > 2 * small["worst_gap"]["min"], "the smallest budget does not help")
    in_time(large["worst_gap"]["min"] > small["worst_gap"]["min"], "a smaller budget gives no smaller gap")
    in_time(small["long_first"]["min"] > large["long_first"]["min"], "small pieces cost nothing")


def tell(results: dict[str, Any]) -> str:
    lines = [
        f"{results['num_chats']} chats, and a prompt of {results['num_long']} tokens that arrives while they answer",
        "",
        "                the prompt's   a chat's gap between tokens   the prompt's   everybody",
        "rules                 pieces   typical             worst    first token     is served",
    ]
    for name, row in [("V0", results["v0"]), *((f"V1, budget {row['budget']}", row) for row in results["v1"])]:
        lines.append(
            f"{name:15} {row['pieces']:12} {row['typical_gap']['min']:7.0f} ms {row['worst_gap']['min']:14.0f} ms "
            f"{row['long_first']['min']:10.0f} ms {row['all_done']['min']:10.0f} ms"
        )
    lines += ["", f"steps that a chat missed: {results['v0']['most_steps_missed']} in a row under V0, none under V1"]
    lines += ["the same tokens under all rules" if results["equal"] else "the tokens differ"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("10", measure, check, tell)
