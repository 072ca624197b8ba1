"""Chapter 6: why is a mostly empty cache called full? The real scheduler and KV managers, over a queue of chats.

No model runs: each step's tokens are made up. So the result is exact, and the same on every machine.
"""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

from chapters.harness import main, note
from minivllm.config import EngineConfig
from minivllm.engine.build import build_kv, build_scheduler
from minivllm.kv.contiguous import ContiguousKVManager
from minivllm.kv.waste import Waste, paged_waste
from minivllm.plan import StepOutput
from minivllm.request import Request, SamplingParams
from minivllm.scheduler.base import Limits, SchedulerBase

NUM_SLOTS, LONGEST = 4096, 1024  # of the pool, and of one request: prompt and output
MEAN_PROMPT, MEAN_OUTPUT = 80, 170  # half of what the vLLM paper says of ShareGPT
BLOCK_SIZE = 16
PRESETS = ("orca-max", "orca-pow2", "orca-oracle", "v0")
SIZES = (1, 4, 16, 64, 256)
NUM_REQUESTS, SMOKE_REQUESTS = 200, 60
EVERY = 4  # steps: the pool is looked at


def length(rng: random.Random, mean: float) -> int:
    """Log-normal: most texts are short, and a few are long."""
    return max(4, min(LONGEST // 2, round(rng.lognormvariate(math.log(mean) - 0.5, 1.0))))


def queue(num_requests: int) -> tuple[list[Request], dict[str, int]]:
    """The requests, all there from the start, and how long each will be in the end."""
    rng, requests, final_lengths = random.Random(6), [], {}
    for i in range(num_requests):
        num_prompt, num_output = length(rng, MEAN_PROMPT), length(rng, MEAN_OUTPUT)
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        requests.append(Request(str(i), params, [i] * num_prompt, num_prompt))
        final_lengths[str(i)] = num_prompt + num_output
    return requests, final_lengths


def emptiest(kv: Any, requests: dict[str, Request]) -> int:
    """The most slots that one request holds and does not fill."""
    held = {r: len(table.blocks) * kv.block_size for r, table in kv.tables.items()}
    return max((slots - requests[r].num_computed_tokens for r, slots in held.items()), default=0)


def serve(preset: str, block_size: int, num_requests: int) -> dict[str, Any]:
    """Shares of the pool in percent: means over the steps in which somebody waits, since the pool is called full."""
    overrides = {"kv.block_size": block_size, "kv.preemption": "recompute", "kv.prefix": "none"}
    config = EngineConfig.build(preset, overrides)
    kv = build_kv(config, NUM_SLOTS // block_size, LONGEST)
    scheduler: SchedulerBase = build_scheduler(config, kv, Limits(256, 2048, LONGEST, kv.capacity)).base
    requests, final_lengths = queue(num_requests)
    for req in requests:
        scheduler.add(req)
    contiguous = isinstance(kv, ContiguousKVManager)
    measure_waste = kv.waste if contiguous else partial(paged_waste, kv)
    seen: list[Waste] = []
    at_once, blocks, num_steps, num_preempted, most_empty = [], [], 0, 0, 0
    while scheduler.requests:
        plan = scheduler.schedule(0.0)
        live = scheduler.requests
        ready = [r for r, n in plan.num_tokens.items() if plan.start[r] + n == live[r].num_tokens]
        scheduler.update(plan, StepOutput({r: [0] for r in ready}))
        num_steps += 1
        num_preempted += plan.stats.num_preempted
        if scheduler.waiting and num_steps % EVERY == 0:
            seen.append(measure_waste(live, final_lengths, scheduler.waiting[-1]))
            at_once.append(len(scheduler.running))
            if not contiguous:
                most_empty = max(most_empty, emptiest(kv, live))
                blocks += [len(table.blocks) for table in kv.tables.values()]
    shares = {part: round(100 * sum(getattr(w, part) for w in seen) / len(seen), 1) for part in Waste._fields}
    return {
        **shares,
        "wasted": round(100 - shares["tokens"], 1),
        "at_once": round(sum(at_once) / len(at_once), 1),
        "steps": num_steps,
        "preemptions": num_preempted,
        "most_empty": most_empty,
        "table": round(sum(blocks) / len(blocks), 1) if blocks else 1.0,
    }


def measure(smoke: bool) -> dict[str, Any]:
    num_requests = SMOKE_REQUESTS if smoke else NUM_REQUESTS
    presets, sizes = {}, []
    for preset in PRESETS:
        note(f"  {preset}")
        presets[preset] = serve(preset, BLOCK_SIZE, num_requests)
    for size in SIZES:
        note(f"  blocks of {size}")
        sizes.append({"block_size": size, **serve("v0", size, num_requests)})
    _, final_lengths = queue(num_requests)
    mean = sum(final_lengths.values()) / len(final_lengths)
    scene = {"slots": NUM_SLOTS, "longest": LONGEST, "block_size": BLOCK_SIZE, "num_requests": num_requests}
    return {**scene, "mean_length": round(mean), "presets": presets, "sizes": sizes}


def check(results: dict[str, Any]) -> None:
    presets, sizes = results["presets"], results["sizes"]
    used = [presets[name]["tokens"] for name in PRESETS]
    assert used == sorted(used) and len(set(used)) == len(used), "knowing more does not waste less"
    worst, best = presets["orca-max"], presets["v0"]
    assert max(used[:-1]) < 50 < best["tokens"], "the pool was not mostly empty, or not mostly full"
    assert best["at_once"] > 2 * worst["at_once"] and best["steps"] < worst["steps"]
    for name in PRESETS[:-1]:
        assert presets[name]["preemptions"] == 0, "a contiguous run ran out"
    assert best["preemptions"] > 0, "blocks on demand never ran out"
    for row in sizes:
        assert row["most_empty"] < row["block_size"], "a request left a whole block empty"
    tables, wasted = [row["table"] for row in sizes], [row["internal"] + row["reserved"] for row in sizes]
    assert tables == sorted(tables, reverse=True) and tables[0] > tables[-1], "larger blocks make no shorter tables"
    assert wasted == sorted(wasted) and wasted[0] < wasted[-1], "larger blocks waste no more"


def tell(results: dict[str, Any]) -> str:
    lines = [
        f"a pool of {results['slots']:,} slots; requests of {results['mean_length']} tokens on average, "
        f"{results['longest']:,} at most",
        "percent of the slots, while somebody waits for room:",
        "",
        "              hold a  for tokens   never   lost by the   requests            pre-",
        "              token     to come     used     allocator    at once   steps   empted",
    ]
    for name, row in results["presets"].items():
        lines.append(
            f"{name:12} {row['tokens']:7.1f} {row['reserved']:11.1f} {row['internal']:7.1f} {row['external']:13.1f} "
            f"{row['at_once']:10.1f} {row['steps']:7,} {row['preemptions']:8}"
        )
    lines += ["", "block size   hold a token   entries in a table   most empty slots of one request"]
    for row in results["sizes"]:
        lines.append(f"{row['block_size']:10} {row['tokens']:14.1f} {row['table']:20.1f} {row['most_empty']:33}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("06", measure, check, tell)
