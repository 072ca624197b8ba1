"""Where do a KV pool's slots go under each preset, and what does that cost?

Figure 2 of the vLLM paper (Kwon et al. 2023). The real scheduler and KV manager of each preset run a ShareGPT-shaped
queue; no model does, each step's tokens are made up. So the result is exact and the same on every machine: shares of
the pool while requests wait, requests held at once, and steps until all are done. The pool is the paper's: OPT-13B on
an A100 with 40 GB, 15.7k slots, 2,048 tokens a request.

    python -m bench kv_waste
"""

from __future__ import annotations

import math
import random

from common import emit, note, parser

from minivllm.config import PRESETS, EngineConfig
from minivllm.engine.build import build_kv, build_scheduler
from minivllm.kv.contiguous import ContiguousKVManager
from minivllm.kv.waste import paged_waste
from minivllm.plan import StepOutput
from minivllm.request import Request, SamplingParams
from minivllm.scheduler.base import Limits

NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE = 15_700, 2048, 16
LEFT_OUT = ("naive", "v1-gpu")  # one request at a time: its pool is empty; the pool of v1
PAPER_TOKENS = {"orca-max": 20.4, "orca-pow2": 26.8, "orca-oracle": 38.2, "v0": 96.3}  # percent of the pool


def lengths(rng: random.Random, mean: float, sigma: float = 1.0) -> int:
    """Log-normal with this mean, between 4 and 1,020 tokens."""
    return max(4, min(1020, int(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))


def measure(preset: str, num_requests: int, every: int) -> dict[str, float]:
    """Means over every n-th step in which somebody waits; `steps` is the whole run."""
    overrides = {"kv.block_size": BLOCK_SIZE, "scheduler.max_num_seqs": 256, "scheduler.max_num_batched_tokens": 2560}
    config = EngineConfig.build(preset, {**overrides, "kv.preemption": "recompute"})
    kv = build_kv(config, NUM_SLOTS // BLOCK_SIZE, MAX_MODEL_LEN)
    scheduler = build_scheduler(config, kv, Limits(256, 2560, MAX_MODEL_LEN, kv.capacity)).base
    rng, final_lengths = random.Random(0), {}
    for i in range(num_requests):
        num_prompt, num_output = lengths(rng, 161), lengths(rng, 338)
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        # Prompts share nothing: what a prefix cache would save is another figure.
        scheduler.add(Request(str(i), params, [i] * num_prompt, num_prompt))
        final_lengths[str(i)] = num_prompt + num_output
    seen, num_running, num_steps, num_preempted = [], [], 0, 0
    while scheduler.requests:
        plan = scheduler.schedule(0.0)
        requests = scheduler.requests
        ready = [r for r, n in plan.num_tokens.items() if plan.start[r] + n == requests[r].num_tokens]
        scheduler.update(plan, StepOutput({req_id: [0] for req_id in ready}))
        num_steps += 1
        num_preempted += plan.stats.num_preempted
        if scheduler.waiting and num_steps % every == 0:
            waste = kv.waste if isinstance(kv, ContiguousKVManager) else lambda *args: paged_waste(kv, *args)
            seen.append(waste(requests, final_lengths, scheduler.waiting[-1]))
            num_running.append(len(scheduler.running))
    parts = {name: round(100 * sum(getattr(w, name) for w in seen) / len(seen), 1) for name in seen[0]._fields}
    held = round(sum(num_running) / len(num_running), 1)
    return {**parts, "requests_at_once": held, "steps": num_steps, "preemptions": num_preempted}


def main() -> None:
    args = parser(__doc__, "kv_waste")
    args.add_argument("--num-requests", type=int, default=300)
    args.add_argument("--every", type=int, default=16, help="look at every n-th step")
    args = args.parse_args()
    results = {}
    note(f"{'preset':12} tokens reserved internal external   at once   steps  paper's tokens  (% of the pool)")
    for preset in PRESETS:
        if preset in LEFT_OUT:
            continue
        r = results[preset] = measure(preset, args.num_requests, args.every)
        shares = f"{r['tokens']:6.1f} {r['reserved']:8.1f} {r['internal']:8.1f} {r['external']:8.1f}"
        paper = PAPER_TOKENS.get(preset, "-")
        note(f"{preset:12} {shares} {r['requests_at_once']:9.1f} {r['steps']:7d}  {paper:>14}")
    params = {"num_slots": NUM_SLOTS, "max_model_len": MAX_MODEL_LEN, "block_size": BLOCK_SIZE}
    params |= {"num_requests": args.num_requests, "paper_tokens_percent": PAPER_TOKENS}
    emit("kv_waste", params, results, args.out)


if __name__ == "__main__":
    main()
