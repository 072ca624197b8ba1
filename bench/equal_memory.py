"""How many more requests does a paged pool hold than a contiguous one of its size, and how much faster is it?

Contiguous by max, by pow2 and with an oracle of the lengths. All run V0's scheduler, preempt by recomputing and share
nothing: kv.allocation is all that differs. The requests have ShareGPT's lengths, scaled down, and are all there from
the start, so that memory is what limits the batch. Blocks are scaled down with the lengths: 4 tokens are to requests of
a tenth what 16 are to those of the paper, or a little more.

`at once` is the mean over the steps in which somebody waits. The vLLM paper (Kwon et al. 2023, section 6.2, OPT-13B,
ShareGPT) holds 2.2 times as many requests as Orca (Oracle) and 4.3 times as many as Orca (Max).

    python -m bench equal_memory
    python -m bench equal_memory --against oracle
"""

from __future__ import annotations

from common import emit, note, parser, spread
from drive import in_turns, loaded
from latency import bootstrap_ratio, shown
from tqdm import tqdm
from workloads import draw

from minivllm.config import DEFAULT_MODEL, EngineConfig, parse_set
from minivllm.features import ALLOCATIONS

METRICS = ("running", "throughput", "latency_p50", "kv_used", "preemptions", "num_steps")
PAPER_AT_ONCE = {"oracle": 2.2, "max": 4.3}  # paged / this


def main() -> None:
    args = parser(__doc__, "equal_memory")
    args.add_argument("--model", default=DEFAULT_MODEL)
    args.add_argument("--dtype", default="float32", help="float32: outputs must be equal")
    others = [name for name in ALLOCATIONS.names() if name != "paged"]
    args.add_argument("--against", nargs="+", default=others, choices=others, help="what paged is compared with")
    args.add_argument("--num-requests", type=int, default=48)
    args.add_argument("--scale", type=float, default=0.1, help="of ShareGPT's lengths")
    args.add_argument("--block-size", type=int, default=4)
    args.add_argument("--pool-tokens", type=int, default=1024, help="KV slots")
    args.add_argument("--repetitions", type=int, default=5)
    args.add_argument("--vocab", type=int, default=49_152, help="prompts are random ids below this")
    args.add_argument("--set", action="append", default=[], metavar="a.b=c", help="an option of all")
    args = args.parse_args()
    shape = {"num_requests": args.num_requests, "scale": args.scale, "vocab": args.vocab, "rate": float("inf")}
    scenes = [draw("sharegpt", seed, **shape) for seed in range(args.repetitions)]
    overrides = {
        "model.path": args.model,
        "model.dtype": args.dtype,
        "model.max_model_len": max(scene.max_model_len for scene in scenes),
        "kv.block_size": args.block_size,
        "kv.num_blocks": args.pool_tokens // args.block_size,
        **parse_set(args.set),
    }
    names = ["paged", *args.against]
    configs = {name: EngineConfig.build("orca-max", {**overrides, "kv.allocation": name}) for name in names}
    with loaded(configs) as sides, tqdm(total=len(names) * args.repetitions, unit="run", dynamic_ncols=True) as bar:
        runs = in_turns(sides, scenes, bar.update)
    values = {name: {m: [run[m] for run in found] for m in METRICS} for name, found in runs.values.items()}
    rows = {name: {metric: spread(found) for metric, found in values[name].items()} for name in names}
    ratios = {
        name: {m: shown(bootstrap_ratio(values[name][m], values["paged"][m])) for m in ("running", "throughput")}
        for name in names[1:]
    }
    for name in names:
        against = ratios.get(name, {})
        note(f"{name:7} at once {rows[name]['running']['median']:6.1f}, paged / {name}: {against}")
    params = vars(args) | {"paper_at_once_paged_to": PAPER_AT_ONCE}
    results = {"allocations": rows, "paged_to": ratios, "outputs_that_differ": runs.num_different}
    emit("equal_memory", params, results, args.out)


if __name__ == "__main__":
    main()
