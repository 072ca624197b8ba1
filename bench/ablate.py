"""From configuration A to B, one switch at a time: what does each design decision give, and what does it cost?

    python -m bench ablate --from v1 --to v1 --set-b kv.prefix=none --workload shared_prefix
    python -m bench ablate --from v0 --to v1 --kinds whole path --workload mixed
    python -m bench ablate --from v0 --to v1 --kinds path
    python -m bench ablate --from v0 --to v1 --quick

One command writes the JSON, and beside it the table (.md) and the plot (.png, .svg).

Where A and B differ in several fields there are three kinds of comparison, all of the form A -> B:

    whole  A -> B
    path   every switch, in the order of the feature table, on top of those before it. One that conflicts with what is
           not switched yet waits for it. With one --workload all steps and the whole are measured together, each
           repetition by every engine on the way, so that the steps multiply up to the whole
    alone  B with one switch (and what it cannot be without) back at A's value -> B: what B owes to that switch

All engines of a comparison are in this process at once and run interleaved. A repetition has its own prompts, equal
for all, and ratios are taken within a repetition (latency.bootstrap_ratio). Who is first takes turns, A B B A A B:
with A always first, two equal engines of a tiny model showed a TTFT ratio of 0.83 (probably the first to meet a batch
shape pays for what the process then keeps; the cause was not looked for). So repetitions should be even in number. Even
in turns, equal engines of a tiny model differed by up to 6 % with an interval that left 1 out. --quick is for trying
things out, not for figures: 4 requests of at most 24 tokens. Intervals are not corrected for the many metrics of a row.

How many repetitions: --repetitions, then twice as many, and so on to --max-repetitions. Each time it is asked whether
the own metric of each row is decided: its 99 % interval leaves 1 out, or half of its 95 % interval is at most --width
of the ratio. It ends when all are. If a row's 95 % interval holds 1 in the end, no difference was found, within what
the interval's farther end says. Whoever looks several times is more often deceived, hence the 99 %: of 600 simulated
pairs of equal engines (10 to 40 repetitions, normal noise of 5 %) 11 % were called different, and of 600 that differ by
5 % 99 %. With a 95 % interval at five looks it would be 21 %.
To see the noise floor of a machine, switch something idle: --set-b kv.swap_memory=2GiB.

The core is driven with tokens, an open loop: a request is added when its time has come, however busy the engine is.
With --over http each configuration is a server of its own and this process its client (bench/drive_http.py): what HTTP,
processes and detokenising cost is then in all figures, and engine.core may differ too:

    python -m bench ablate --over http --from v0 --to v1 --set-b engine.core=process --kinds path --workload sharegpt

With --virtual time is counted in steps, so that a run makes the same plans every time. Outputs must be equal: greedy
(parallel sampling: seeded), float32; beams by the sums of their log-probabilities.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import plots
from common import RESULTS, note, record
from comparisons import Comparison, plan_comparisons
from drive import VIRTUAL_STEPS, Side, Values, in_turns, loaded, sized
from drive_http import Server
from latency import METRICS, SEEN_BY_CLIENTS, bootstrap_ratio, is_decided, shown, verdict
from plots import KINDS, markdown
from tqdm import tqdm
from workloads import WORKLOADS, draw, vocab_of

from minivllm.config import DEFAULT_MODEL, PRESETS, EngineConfig, parse_set
from minivllm.errors import UserError

QUICK_RATE, QUICK_LONGEST, QUICK_REQUESTS = 50, 20, 3
ENOUGH = 5  # repetitions: of fewer, chance alone has all on one side too often to mark a winner
REPETITIONS, MOST_REPETITIONS = 10, 40  # even: who is first takes turns

OVER = {"core": Side, "http": Server}
# What a client cannot see of an engine core, and what it is judged by instead; of the rest throughput.
INSTEAD = {"host_ms": "cpu_us"}

# ---------------------------------------------------------------------------------------- A B B A


def measure(together: Sequence[Comparison], args: argparse.Namespace, bar: tqdm) -> list[dict[str, Any]]:
    """Comparisons on one workload -> their rows. Raises UserError for a configuration that cannot be built."""
    workload = WORKLOADS[together[0].workload]
    rate = args.rate or workload.rate * (QUICK_RATE if args.quick else 1)
    scale = args.scale or (min(1.0, QUICK_LONGEST / workload.longest) if args.quick else 1.0)
    shape = {"num_requests": args.num_requests, "rate": rate, "scale": scale, "vocab": args.vocab}
    scenes = [draw(together[0].workload, args.seed + i, **shape) for i in range(args.max_repetitions)]
    asked: list[EngineConfig] = []
    for config in (config for comparison in together for config in (comparison.a, comparison.b)):
        if config not in asked:
            asked.append(config)
    pairs = [(comparison, str(asked.index(comparison.a)), str(asked.index(comparison.b))) for comparison in together]

    def is_enough(values: Values) -> bool:
        if len(values["0"]) not in args.looks:
            return False
        return all(
            is_decided(*(column(values[side], one.switch.metric) for side in sides_of), args.width)
            for one, *sides_of in pairs
        )

    made = {str(i): sized(config, scenes, args.pool_tokens) for i, config in enumerate(asked)}
    with loaded(made, OVER[args.over]) as sides:
        runs = in_turns(sides, scenes, bar.update, args.virtual, is_enough)
        configs = {name: side.config.flat() for name, side in sides.items()}
    outputs = {"num": runs.num_outputs, "num_different": runs.num_different}
    common = {"shape": shape | {"rate": str(rate)}}
    return [
        row(comparison, {"a": runs.values[a], "b": runs.values[b]}, outputs)
        | common
        | {"configs": {"a": configs[a], "b": configs[b]}}
        for comparison, a, b in pairs
    ]


def column(runs: Sequence[dict[str, float]], metric: str) -> list[float]:
    return [run[metric] for run in runs]


def row(comparison: Comparison, values: dict[str, list[dict[str, float]]], outputs: dict[str, int]) -> dict[str, Any]:
    """One comparison as JSON: values of every repetition, ratios B / A, and what they mean."""
    ratios = {}
    names = [name for name in METRICS if all(name in run for runs in values.values() for run in runs)]
    for name in names:
        a, b = (column(values[side], name) for side in "ab")
        ratio = bootstrap_ratio(a, b)
        ratios[name] = shown(ratio) | {"verdict": verdict(name, ratio, a, b) if len(a) >= ENOUGH else ""}
    return {
        "kind": comparison.kind,
        "switch": comparison.switch.name,
        "changes": {field: list(values) for field, values in comparison.switch.changes.items()},
        "workload": comparison.workload,
        "workload_is": WORKLOADS[comparison.workload].what,
        "metric": comparison.switch.metric,
        "verdict": ratios[comparison.switch.metric]["verdict"],
        "repetitions": len(values["a"]),
        "outputs": outputs,
        "ratios": ratios,
        "values": {
            side: {name: [round(run[name], 4) for run in runs] for name in names} for side, runs in values.items()
        },
    }


# ---------------------------------------------------------------------------------------- the command


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="from_", default="v1", choices=PRESETS, help="preset A (v1)")
    parser.add_argument("--to", default="v1", choices=PRESETS, help="preset B (v1)")
    for name, what in (("set", "of both"), ("set-a", "of A"), ("set-b", "of B")):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="a.b=c", help=f"an option {what}")
    what = f"auto (each switch's own), or some of: {', '.join(WORKLOADS)}"
    parser.add_argument("--workload", nargs="+", default=["auto"], choices=["auto", *WORKLOADS], help=what, metavar="W")
    what = f"what the whole of several switches is judged by (throughput): {', '.join(METRICS)}"
    parser.add_argument("--metric", default="throughput", choices=METRICS, help=what, metavar="M")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="of comparisons (all)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"{DEFAULT_MODEL}")
    parser.add_argument("--dtype", default="float32", help="float32: else equal outputs cannot be asked for")
    what = f"of A and B, the fewest ({REPETITIONS}; with --quick {ENOUGH})"
    parser.add_argument("--repetitions", type=int, help=what)
    what = f"the most, where intervals do not decide before ({MOST_REPETITIONS}; as the fewest, if those are given)"
    parser.add_argument("--max-repetitions", type=int, help=what)
    what = "half of an interval, as a fraction of the ratio, at which no difference is a result too (0.02)"
    parser.add_argument("--width", type=float, default=0.02, help=what)
    parser.add_argument("--num-requests", type=int, help=f"the workload's own; with --quick {QUICK_REQUESTS}")
    what = f"requests a second; the workload's own; with --quick {QUICK_RATE} times that"
    parser.add_argument("--rate", type=float, help=what)
    parser.add_argument(
        "--scale", type=float, help=f"of all lengths (1); with --quick, so that the longest has {QUICK_LONGEST}"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first repetition's prompts (0)")
    parser.add_argument("--vocab", type=int, help="prompts are random ids below this")
    parser.add_argument("--pool-tokens", type=int, help="KV slots; the workload's own")
    parser.add_argument(
        "--over", default="core", choices=OVER, help="what is driven: the engine core, or a server (core)"
    )
    parser.add_argument("--virtual", action="store_true", help=f"time is steps: {VIRTUAL_STEPS} are a second")
    parser.add_argument(
        "--quick", action="store_true", help="few and very short requests: under two minutes on two free cores"
    )
    parser.add_argument("--out", type=Path, help="the JSON file (bench/results/ablate-A-B-workload.json)")
    args = parser.parse_args(argv)
    if args.max_repetitions is None:
        args.max_repetitions = args.repetitions or (ENOUGH if args.quick else MOST_REPETITIONS)
    if args.repetitions is None:
        args.repetitions = min(ENOUGH if args.quick else REPETITIONS, args.max_repetitions)
    if args.over == "http" and args.virtual:
        parser.error("--virtual counts an engine core's steps, which --over http cannot see")
    if args.repetitions > args.max_repetitions:
        parser.error("--max-repetitions is below --repetitions")
    args.looks = [args.repetitions << i for i in range(20) if args.repetitions << i <= args.max_repetitions]
    if args.quick and args.num_requests is None:
        args.num_requests = QUICK_REQUESTS
    if args.vocab is None:
        args.vocab = vocab_of(args.model)
    return args


def config_of(preset: str, args: argparse.Namespace, own: Sequence[str]) -> EngineConfig:
    common = {"model.path": args.model, "model.dtype": args.dtype}
    return EngineConfig.build(preset, {**common, **parse_set(args.set), **parse_set(own)})


def comparisons_of(args: argparse.Namespace) -> tuple[list[Comparison], list[str]]:
    a, b = config_of(args.from_, args, args.set_a), config_of(args.to, args, args.set_b)
    planned, skipped = plan_comparisons(a, b, args.metric)
    comparisons = []
    for workload in args.workload:
        for one in planned:
            chosen = one.workload if workload == "auto" else workload
            if one.kind in args.kinds:
                switch = replace(one.switch, metric=seen_by(args.over, one.switch.metric))
                comparisons.append(replace(one, workload=chosen, switch=switch))
    return comparisons, skipped


def seen_by(over: str, metric: str) -> str:
    if over == "core" or metric in SEEN_BY_CLIENTS:
        return metric
    return INSTEAD.get(metric, "throughput")


def groups(comparisons: Sequence[Comparison], is_one_workload: bool) -> list[list[Comparison]]:
    """What is measured together: the whole and the path of one workload; else each comparison by itself."""
    found: dict[Any, list[Comparison]] = {}
    for i, one in enumerate(comparisons):
        key = one.workload if is_one_workload and one.kind in ("whole", "path") else i
        found.setdefault(key, []).append(one)
    return list(found.values())


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    comparisons, skipped = comparisons_of(args)
    rows = []
    with tqdm(unit="run", dynamic_ncols=True) as bar:
        for together in groups(comparisons, "auto" not in args.workload):
            names = [f"{one.kind}, {one.switch.name}, {one.workload}" for one in together]
            bar.set_description("; ".join(names)[:60])
            try:
                rows += measure(together, args, bar)
            except UserError as e:
                skipped += [f"{name}: {e}" for name in names]
    return {"from": args.from_, "to": args.to, "rows": rows, "skipped": skipped}


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        results = run_all(args)
    except UserError as e:
        raise SystemExit(f"error: {e}") from None
    params = vars(args) | {"out": str(args.out), "rate": str(args.rate)}  # JSON has no infinity
    found = record("ablate", params, results)
    workload = "-".join(args.workload)
    out = args.out or RESULTS / f"ablate-{args.from_}-{args.to}-{workload}{'-quick' * args.quick}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(markdown(found))
    note("\n".join(map(str, [out, *(plots.write(out) if results["rows"] else [])])))
    num_different = sum(row["outputs"]["num_different"] for row in results["rows"])
    if num_different:
        note(
            f"\n*** {num_different} OUTPUTS OF A AND B DIFFER: a design decision may change timing, never tokens ***\n"
        )
    return 1 if num_different and args.dtype == "float32" else 0


if __name__ == "__main__":
    raise SystemExit(main())
