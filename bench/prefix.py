"""What does prefix caching cost when it never hits, and do its times grow with the pool?

Host time only, no model.

1. 1,000 requests with nothing in common, each computed whole: schedule + update with kv.prefix none against hash and
   radix, alternating. vLLM's claim for V1 is under 1 % of throughput at 0 % hits, so the extra host time is also given
   as a share of the time that the same tokens take in the model (--seconds-per-token, from bench/offline.py).
2. The time of one lookup with eviction, in pools of 1,000 to 1,000,000 blocks.

    python -m bench prefix
"""

from __future__ import annotations

import random
import time

from common import emit, note, parser, spread

from minivllm.config import EngineConfig
from minivllm.engine.build import build_kv, build_scheduler
from minivllm.kv.manager import PagedKVManager
from minivllm.kv.prefix_hash import HashPrefix
from minivllm.plan import StepOutput
from minivllm.request import Request, SamplingParams
from minivllm.scheduler.base import Limits

NUM_PROMPT, NUM_OUTPUT = 161, 64


def host_seconds(prefix: str, num_requests: int, seed: int) -> float:
    """schedule + update for all requests, prompt and output."""
    config = EngineConfig.build("v1", {"kv.prefix": prefix, "scheduler.max_num_seqs": 256})
    kv = build_kv(config, 4000, 2048)
    scheduler = build_scheduler(config, kv, Limits(256, 2048, 2048, kv.capacity)).base
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)
    for i in range(num_requests):
        scheduler.add(Request(str(i), params, [rng.randrange(49_000) for _ in range(NUM_PROMPT)], NUM_PROMPT))
    seconds = 0.0
    while requests := scheduler.requests:
        start = time.perf_counter()
        plan = scheduler.schedule(0.0)
        seconds += time.perf_counter() - start
        ready = [r for r, n in plan.num_tokens.items() if plan.start[r] + n == requests[r].num_tokens]
        out = StepOutput({req_id: [rng.randrange(49_000)] for req_id in ready})
        start = time.perf_counter()
        scheduler.update(plan, out)
        seconds += time.perf_counter() - start
    return seconds


def microseconds_of_lookup_and_eviction(num_blocks: int, num_rounds: int = 300) -> float:
    """A full pool of reusable blocks: look a prompt of 8 blocks up in vain, evict 8 blocks for it, publish, free."""
    kv = PagedKVManager(num_blocks, 16, HashPrefix(seed="bench"))
    params = SamplingParams()
    filler = Request("fill", params, list(range(num_blocks * 16)), num_blocks * 16)
    kv.lookup(filler)
    kv.allocate(filler, filler.num_tokens)
    filler.num_computed_tokens = filler.num_tokens
    kv.commit(filler)
    kv.free(filler)
    requests = [Request(str(i), params, [-1 - i] * 128, 128) for i in range(num_rounds)]
    start = time.perf_counter()
    for req in requests:
        kv.lookup(req)
        kv.allocate(req, 128)
        req.num_computed_tokens = 128
        kv.commit(req)
        kv.free(req)
    return 1e6 * (time.perf_counter() - start) / num_rounds


def main() -> None:
    args = parser(__doc__, "prefix")
    args.add_argument("--num-requests", type=int, default=1000)
    args.add_argument("--rounds", type=int, default=7)
    args.add_argument("--seconds-per-token", type=float, default=1 / 340, help="of the model, at 32 requests")
    args = args.parse_args()
    seconds: dict[str, list[float]] = {"none": [], "hash": [], "radix": []}
    for seed in range(args.rounds):
        for prefix in seconds:
            seconds[prefix].append(host_seconds(prefix, args.num_requests, seed))
    model = args.num_requests * NUM_OUTPUT * args.seconds_per_token
    overhead = {}
    for prefix in ("hash", "radix"):
        extra = [b - a for a, b in zip(seconds["none"], seconds[prefix], strict=True)]
        overhead[prefix] = {
            "host_ratio": spread([b / a for a, b in zip(seconds["none"], seconds[prefix], strict=True)]),
            "extra_ms_per_request": spread([1e3 * e / args.num_requests for e in extra], 4),
            "percent_of_model_time": spread([100 * e / model for e in extra], 4),
        }
        note(f"{prefix}: {overhead[prefix]}")
    pools = {n: round(microseconds_of_lookup_and_eviction(n), 1) for n in (1_000, 10_000, 100_000, 1_000_000)}
    note(f"microseconds of a lookup with eviction, by blocks of the pool: {pools}")
    params = {"num_requests": args.num_requests, "num_prompt": NUM_PROMPT, "num_output": NUM_OUTPUT}
    params |= {"rounds": args.rounds, "seconds_per_token": args.seconds_per_token}
    results = {"host_seconds": {p: spread(s) for p, s in seconds.items()}, "overhead": overhead}
    emit("prefix", params, {**results, "lookup_and_eviction_us": pools}, args.out)


if __name__ == "__main__":
    main()
