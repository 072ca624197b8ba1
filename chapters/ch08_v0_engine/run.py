"""Chapter 8: how do the parts become a loop? V0's engine in a pool that gets smaller."""

from __future__ import annotations

from typing import Any

import torch

from bench.common import spread
from chapters.crowd import Guest, House, Run, random_tokens
from chapters.harness import in_time, main, note
from minivllm.config import DEFAULT_MODEL
from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix import NoPrefix
from minivllm.request import Request, SamplingParams

BLOCK_SIZE = 16
NUM_REQUESTS, NUM_PROMPT, NUM_NEW = 6, 32, 24
SMOKE_REQUESTS, SMOKE_NEW = 4, 12
POOLS, SMOKE_POOLS = (8, 14, 24), (6, 16)  # blocks; the last holds everybody
WAYS = ("recompute", "swap")


def guests(num_requests: int, num_new: int) -> list[Guest]:
    return [Guest(f"r{i}", random_tokens(NUM_PROMPT, i), num_new) for i in range(num_requests)]


def summary(runs: list[Run]) -> dict[str, Any]:
    plans = runs[0].plans
    needed = sum(NUM_PROMPT + len(visit.tokens) - 1 for visit in runs[0].visits.values())
    return {
        "seconds": spread([run.ms / 1e3 for run in runs], 2),
        "steps": len(plans),
        "preemptions": sum(plan.stats.num_preempted for plan in plans),
        "recomputed": sum(plan.total_tokens for plan in plans) - needed,
        "moved": sum(len(plan.swap_out) + len(plan.swap_in) for plan in plans),
    }


def memory_runs(smoke: bool) -> tuple[list[dict[str, Any]], bool]:
    pools, crowd = (SMOKE_POOLS, (SMOKE_REQUESTS, SMOKE_NEW)) if smoke else (POOLS, (NUM_REQUESTS, NUM_NEW))
    wanted = {"kv__block_size": BLOCK_SIZE, "kv__preemption": "swap", "kv__swap_memory": "64MiB"}
    house = House(num_blocks=pools[-1], runner__inputs="rebuild", **wanted)
    house.serve(guests(1, 4), "v0", {"kv.preemption": "swap"})  # the first forwards of a process are slower
    rows, tokens = [], []
    for pool in pools:
        runs: dict[str, list[Run]] = {way: [] for way in WAYS}
        for i in range(2):
            for way in WAYS:
                note(f"  {pool} blocks, {way}, run {i + 1} of 2")
                rules = {"kv.num_blocks": pool, "kv.preemption": way}
                runs[way].append(house.serve(guests(*crowd), "v0", rules))
        rows.append({"blocks": pool, **{way: summary(found) for way, found in runs.items()}})
        tokens += [run.tokens for found in runs.values() for run in found]
    house.close()
    return rows, all(found == tokens[0] for found in tokens)


def forks() -> dict[str, int]:
    """Four sequences of one prompt: the blocks in use once they were forked, and how many without sharing."""
    kv = PagedKVManager(64, BLOCK_SIZE, NoPrefix())
    prompt = list(range(50))
    parent = Request("parent", SamplingParams(), prompt, len(prompt))
    kv.lookup(parent)
    kv.allocate(parent, len(prompt))
    parent.num_computed_tokens = len(prompt)
    for i in range(3):
        child = Request(f"child {i}", SamplingParams(), list(prompt), len(prompt))
        num_found = kv.fork(parent, child)
        kv.allocate(child, 1)
        child.num_computed_tokens = num_found + 1
    kv.check()
    return {
        "num_prompt": len(prompt),
        "sequences": len(kv.tables),
        "shared": kv.usage.num_total - kv.usage.num_free,
        "alone": sum(len(table.blocks) for table in kv.tables.values()),
        "copies": len(kv.moves.copies),
    }


def measure(smoke: bool) -> dict[str, Any]:
    rows, equal = memory_runs(smoke)
    return {
        "model": DEFAULT_MODEL,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "block_size": BLOCK_SIZE,
        "num_requests": SMOKE_REQUESTS if smoke else NUM_REQUESTS,
        "num_prompt": NUM_PROMPT,
        "num_new": SMOKE_NEW if smoke else NUM_NEW,
        "rows": rows,
        "equal": equal,
        "forks": forks(),
    }


def check(results: dict[str, Any]) -> None:
    rows = results["rows"]
    least, most = rows[0], rows[-1]
    assert results["equal"], "a preemption changed the output"
    for way in WAYS:
        assert most[way]["preemptions"] == 0, "somebody was preempted though all fit"
        assert least[way]["preemptions"] > 0, "nobody was preempted though they do not fit"
        assert least[way]["steps"] > most[way]["steps"], "less memory takes no more steps"
        in_time(least[way]["seconds"]["min"] > most[way]["seconds"]["min"], "less memory takes no longer")
    for row in rows:
        assert row["recompute"]["moved"] == 0 and row["swap"]["recomputed"] == 0, "a way did the other one's work"
    assert least["recompute"]["recomputed"] > 0 and least["swap"]["moved"] > 0
    forked = results["forks"]
    assert forked["shared"] < forked["alone"] / 2 and forked["copies"] == forked["sequences"] - 1


def tell(results: dict[str, Any]) -> str:
    lines = [
        f"{results['num_requests']} requests of {results['num_prompt']} + {results['num_new']} tokens, V0's engine",
        "",
        "                          pre-    tokens         blocks",
        "pool       way        emptions    computed again  moved   steps   seconds",
    ]
    for row in results["rows"]:
        for way in WAYS:
            found = row[way]
            lines.append(
                f"{row['blocks']:2} blocks  {way:10} {found['preemptions']:8} {found['recomputed']:13} "
                f"{found['moved']:10} {found['steps']:7} {found['seconds']['min']:9.1f}"
            )
    forked = results["forks"]
    lines += [
        "",
        f"{forked['sequences']} answers to one prompt of {forked['num_prompt']} tokens: {forked['shared']} blocks, "
        f"{forked['alone']} without sharing ({forked['copies']} copied on write)",
        "the same tokens in every pool, both ways" if results["equal"] else "the tokens differ",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("08", measure, check, tell)
