"""Is swapping or recomputing the cheaper preemption, at which block size?

Section 7.3 of the vLLM paper (Kwon et al. 2023). For each block size the pool has the same number of slots, two engines
with preset v0 differ in kv.preemption alone, and they run in turns:

    one preemption  milliseconds to move the blocks of one request of --tokens tokens out and in again, or to compute
                    its tokens again
    throughput      of ShareGPT-shaped requests that bring several times what the pool holds

A ratio below 1 for `one preemption`, and above 1 for `throughput`, is in favour of swapping. With small blocks a swap
is many small copies; with large ones it moves slots that hold nothing. A block of 256 holds most of these requests
whole: where `preemptions` is 0, the two engines did the same, and the ratio of throughputs shows the noise.

    python -m bench swap --block-sizes 1 4 16 64 256
"""

from __future__ import annotations

import time
from typing import Any

import torch
from common import emit, note, parser, spread
from drive import Side, in_turns, loaded
from latency import bootstrap_ratio, shown
from tqdm import tqdm
from workloads import Scene, draw

from minivllm.config import DEFAULT_MODEL, EngineConfig, parse_set
from minivllm.plan import StepPlan
from minivllm.runner.calibrate import measure_prefill
from minivllm.runner.dummies import DummyBatches

KINDS = ("recompute", "swap")


def seconds_of_a_swap(side: Side, num_blocks: int) -> float:
    """All blocks out, then in again, each as one batch."""
    move, pairs = side.engine.executor.worker.runner.block_moves, [(i, i) for i in range(num_blocks)]
    begin = time.perf_counter()
    with torch.inference_mode():
        move(StepPlan(0, swap_out=pairs))
        move(StepPlan(0, swap_in=pairs))
    return time.perf_counter() - begin


def seconds_of_a_recomputation(side: Side, num_tokens: int) -> float:
    config = side.engine.config
    with torch.inference_mode():
        dummies = DummyBatches(config.kv.num_blocks, config.kv.block_size, num_tokens)
        return num_tokens * measure_prefill(side.engine.executor.worker.runner, dummies.make(num_tokens))


def measure(block_size: int, scenes: list[Scene], args: Any, bar: tqdm) -> dict[str, Any]:
    overrides = {
        "model.path": args.model,
        "model.dtype": args.dtype,
        "model.max_model_len": max(scene.max_model_len for scene in scenes),
        "kv.block_size": block_size,
        "kv.num_blocks": -(-max(args.pool_tokens, args.tokens) // block_size),
        "kv.swap_memory": "256MiB",
        **parse_set(args.set),
    }
    configs = {kind: EngineConfig.build("v0", {**overrides, "kv.preemption": kind}) for kind in KINDS}
    num_blocks = -(-args.tokens // block_size)
    one: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with loaded(configs) as sides:
        seconds_of_a_swap(sides["swap"], num_blocks)  # warm
        for _ in range(args.repetitions):
            one["recompute"].append(1e3 * seconds_of_a_recomputation(sides["swap"], args.tokens))
            one["swap"].append(1e3 * min(seconds_of_a_swap(sides["swap"], num_blocks) for _ in range(3)))
        runs = in_turns(sides, scenes, bar.update)
    throughput = {kind: [run["throughput"] for run in runs.values[kind]] for kind in KINDS}
    preemptions = {kind: [run["preemptions"] for run in runs.values[kind]] for kind in KINDS}
    return {
        "block_size": block_size,
        "one_preemption_ms": {kind: spread(values) for kind, values in one.items()},
        "one_preemption_swap_to_recompute": shown(bootstrap_ratio(one["recompute"], one["swap"])),
        "throughput": {kind: spread(values, 1) for kind, values in throughput.items()},
        "throughput_swap_to_recompute": shown(bootstrap_ratio(throughput["recompute"], throughput["swap"])),
        "preemptions": {kind: spread(values, 1) for kind, values in preemptions.items()},
        "outputs_that_differ": runs.num_different,
    }


def main() -> None:
    args = parser(__doc__, "swap")
    args.add_argument("--model", default=DEFAULT_MODEL)
    args.add_argument("--dtype", default="float32", help="float32: outputs must be equal")
    args.add_argument("--block-sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    args.add_argument("--tokens", type=int, default=256, help="of the request whose single preemption is timed")
    args.add_argument("--num-requests", type=int, default=16)
    args.add_argument("--scale", type=float, default=0.2, help="of ShareGPT's lengths")
    args.add_argument("--pool-tokens", type=int, default=512, help="KV slots")
    args.add_argument("--repetitions", type=int, default=5)
    args.add_argument("--vocab", type=int, default=49_152, help="prompts are random ids below this")
    args.add_argument("--set", action="append", default=[], metavar="a.b=c", help="an option of both")
    args = args.parse_args()
    shape = {"num_requests": args.num_requests, "scale": args.scale, "vocab": args.vocab}
    scenes = [draw("memory_pressure", seed, **shape) for seed in range(args.repetitions)]
    results = []
    with tqdm(total=2 * args.repetitions * len(args.block_sizes), unit="run", dynamic_ncols=True) as bar:
        for block_size in args.block_sizes:
            bar.set_description(f"blocks of {block_size}")
            results.append(found := measure(block_size, scenes, args, bar))
            note(f"\n{block_size:4}: " + ", ".join(f"{k} {v}" for k, v in found.items() if "_to_" in k))
    emit("swap", vars(args), results, args.out)


if __name__ == "__main__":
    main()
