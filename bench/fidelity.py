"""How near is a simulated run to a real one on this machine, and how near are two real ones to each other?

All workloads are run twice, on the real engine in this process. To the steps that half of them took the terms of a
profile (minivllm profile) are fitted. The other half, which the fit has not seen, is predicted on a virtual clock by
the real scheduler: presets v0 and v1, a pool that holds all and one that does not (V0 swaps, V1 recomputes), other
lengths and rates than those of the first half. Rates are loads: shares of what the machine was found to serve. An error
is simulated / measured - 1, of the mean of the two runs; beside it stands how far these are apart, and what a profile
of the same machine predicts, made of a grid before any workload ran.

Both halves take turns in each of the PASSES: a machine that gets slower meanwhile does so for the fit as well. `drift`
is how much longer the second pass's steps took than the first one's, of the half that is fitted.

    python -m bench fidelity --out
    python -m bench fidelity --model dummy:tiny --threads 1 --clock cpu --seconds 2   # where others use the machine

With --clock cpu all seconds are of CPU time of this process, on the real engine too: one thread, and waiting for an
arrival is work. What others do on the machine then changes only what they leave in its caches.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import emit, note, parser

from minivllm.config import DEFAULT_MODEL, EngineConfig
from minivllm.engine.build import Engine, build
from minivllm.engine.build.cluster import build_cluster
from minivllm.engine.build.profile import describe, make_profile, measure_host, measure_steps
from minivllm.engine.core import EngineCore
from minivllm.errors import UserError
from minivllm.simulate.clock import Clock, RealClock
from minivllm.simulate.cost import Step
from minivllm.simulate.figures import Figures
from minivllm.simulate.host import HostCost
from minivllm.simulate.profile import Profile, Terms, write_profile
from minivllm.simulate.prompts import Prompts
from minivllm.simulate.recorder import StepRecorder
from minivllm.simulate.regression import OUTLIER, Sample, fit_host
from minivllm.simulate.traces import load_trace
from minivllm.simulate.workload import TraceRequest

PRESETS = {"v0": {"kv.preemption": "swap"}, "v1": {"kv.preemption": "recompute"}}
POOLS = {"roomy": 1024, "small": 64}  # blocks
BLOCK, SEQUENCES, LONGEST, SIGMA = 16, 64, 512, 0.5  # LONGEST: tokens of a prompt, and of an answer
BATCH = 16  # requests that decode together, where the machine is said to be loaded by 1


class Kind(NamedTuple):
    what: str
    prompt: int  # tokens in the mean
    output: int
    loads: Mapping[str, float]  # by pool


# A small pool is in need as long as more waits than it holds: half the time, at loads that no machine keeps up with.
SEEN = (
    Kind("short chats", 48, 48, {"roomy": 0.5, "small": 1.8}),
    Kind("documents", 200, 24, {"roomy": 0.8, "small": 1.5}),
    Kind("essays", 24, 112, {"roomy": 1.1, "small": 2.2}),
)
UNSEEN = (
    Kind("instructions", 32, 64, {"roomy": 0.6, "small": 2.0}),
    Kind("chats", 128, 80, {"roomy": 0.85, "small": 1.6}),
    Kind("summaries", 240, 40, {"roomy": 1.0, "small": 1.4}),
)
PASSES = 2  # real runs of each
SHARE = {"roomy": 1.0, "small": 0.5}  # of the seconds of arrivals
BARS = {"output_tokens_per_s": 5.0, "ttft_p50": 8.0, "itl_p50": 8.0, "ttft_p99": 15.0, "itl_p99": 15.0}  # percent


@dataclass(frozen=True, slots=True)
class Case:
    preset: str
    pool: str
    kind: Kind

    @property
    def name(self) -> str:
        return f"{self.preset}, {self.pool} pool, {self.kind.what}"

    @property
    def trace(self) -> str:
        of = self.kind
        widths = f"prompt_sigma={SIGMA},output_sigma={SIGMA},longest={LONGEST}"
        return f"lognormal:prompt={of.prompt},output={of.output},{widths}"


def cases(kinds: Sequence[Kind]) -> list[Case]:
    return [Case(preset, pool, kind) for kind in kinds for preset in PRESETS for pool in POOLS]


@dataclass(slots=True)
class Served:
    """One run of a case."""

    summary: dict[str, Any]
    preemptions: int
    samples: list[Sample] = field(default_factory=list)
    host: list[tuple[int, float]] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        found = {"output_tokens_per_s": self.summary["output_tokens_per_s"]}
        for name in BARS:
            metric, _, place = name.partition("_")
            if metric in ("ttft", "itl"):
                found[name] = 1e3 * self.summary[metric][place]
        return found


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.base = {"model.path": args.model, "kv.block_size": BLOCK, "scheduler.max_num_seqs": SEQUENCES}
        self.base |= {"model.max_model_len": 2 * LONGEST, "executor.num_threads": args.threads}
        self.engines: dict[tuple[str, str], Engine] = {}
        self.num_runs = 0
        self.clock: Clock = CLOCKS[args.clock]()
        self.folder = Path(tempfile.mkdtemp(prefix="fidelity-"))

    def config(self, preset: str, pool: str, **others: Any) -> EngineConfig:
        own = {"kv.num_blocks": POOLS[pool], "kv.swap_memory": "256MiB", **PRESETS[preset]}
        return EngineConfig.build(preset, {**self.base, **own, **others})

    def engine(self, preset: str, pool: str) -> Engine:
        if (preset, pool) not in self.engines:
            self.engines[preset, pool] = self.build(preset, pool)
        return self.engines[preset, pool]

    # --------------------------------------------------------------------------------------------- of a grid

    def grid_profile(self) -> Profile:
        """Of the engine whose pool can swap, as `minivllm profile` has it."""
        engine = self.engine("v0", "roomy")
        samples = measure_steps(engine, self.args.grid_seconds, self.clock)
        return make_profile(self.about(engine), samples, measure_host(engine.core, self.clock))

    def build(self, preset: str, pool: str) -> Engine:
        engine = build(self.config(preset, pool, **{"kv.prefault": True}))
        engine.core.clock = self.clock
        return engine

    def about(self, engine: Engine) -> Any:
        return describe(self.config("v1", "roomy"), engine, 64 << 30)

    # ------------------------------------------------------------------------------------------------- real runs

    def requests(self, case: Case, profile: Profile) -> list[TraceRequest]:
        rate = case.kind.loads[case.pool] * capacity(profile, case.kind)
        count = max(self.args.least, round(rate * self.args.seconds * SHARE[case.pool]))
        return list(load_trace(case.trace, rate=rate, num_requests=count, seed=self.args.seed))

    def run(self, case: Case, requests: Sequence[TraceRequest]) -> Served:
        self.num_runs += 1
        engine = self.engine(case.preset, case.pool)
        info, first = engine.info, self.num_runs * 100_000
        served = serve(engine.core, info["vocab_size"], info["block_size"], requests, first, self.clock)
        got = served.figures()
        note(f"{case.name}: {len(requests)} requests, {served.preemptions} preemptions, {shown(got)}")
        return served

    # ------------------------------------------------------------------------------------------------ simulated

    def simulate(self, case: Case, requests: Sequence[TraceRequest], profile: Profile, name: str) -> Served:
        path = self.folder / f"{name}.json"
        if not path.exists():
            write_profile(profile, path)
        own = {"executor.kind": "simulated", "executor.device": str(path), "executor.num_threads": None}
        config = self.config(case.preset, case.pool, **own)
        cluster = build_cluster(config, 1, profile.host_cost)
        summary = cluster.run(requests).summary()
        return Served(summary, summary["preemptions"])

    def close(self) -> None:
        for engine in self.engines.values():
            engine.core.shutdown()


def capacity(profile: Profile, kind: Kind) -> float:
    """Requests a second that keep BATCH of them decoding, by the profile: a load of 1."""
    cost = Terms(profile)
    context = np.full(BATCH, kind.prompt + kind.output // 2)
    decode = cost(Step(np.ones(BATCH, np.int64), context, BATCH)) + profile.host_cost.seconds(BATCH)
    prompt = cost(Step(np.array([kind.prompt]), np.zeros(1, np.int64), 1))
    return 1 / (kind.output * decode / BATCH + prompt)


def serve(
    core: EngineCore, vocab_size: int, block_size: int, requests: Sequence[TraceRequest], first: int, clock: Clock
) -> Served:
    """The real engine, requests as they arrive. first: the number of the first one, so that no two runs have a prompt
    in common. clock: the core's own."""
    prompts, figures, recorder = Prompts(vocab_size), Figures(1), StepRecorder(block_size, clock)
    preempted = core.stats.num_preempted
    coming = [(asked, prompts.request(first + i, asked)) for i, asked in enumerate(requests)][::-1]
    core.observers.append(recorder)
    begin = clock()
    while coming or not core.is_settled:
        while coming and coming[-1][0].arrival <= clock() - begin:
            asked, request = coming.pop()
            figures.arrived(request.id, asked)
            core.add(request)
        if core.is_settled:
            recorder.rested()
            clock.wait_until(begin + coming[-1][0].arrival)
        else:
            deltas = core.step()
            figures.told(deltas, clock() - begin)
    core.observers.remove(recorder)
    return Served(figures.summary(), core.stats.num_preempted - preempted, recorder.samples, recorder.host)


class CpuClock:
    """CPU seconds of this process: who waits works."""

    def __call__(self) -> float:
        return time.process_time()

    def wait_until(self, moment: float) -> None:
        while self() < moment:
            pass


CLOCKS = {"real": RealClock, "cpu": CpuClock}


# --------------------------------------------------------------------------------------------------------- compared


def rows_of(case: Case, runs: Sequence[Served], fitted: Served, by_grid: Served) -> Iterator[dict[str, Any]]:
    ours, grid = fitted.figures(), by_grid.figures()
    for name, bar in BARS.items():
        values = [run.figures()[name] for run in runs]
        measured = float(np.mean(values))
        row = {"case": case.name, "metric": name, "bar_percent": bar, "measured": round(measured, 3)}
        row |= {"simulated": round(ours[name], 3), "error_percent": percent(ours[name], measured)}
        row |= {
            "apart_percent": percent(max(values), min(values)),
            "profile_error_percent": percent(grid[name], measured),
        }
        yield row | {"within": abs(row["error_percent"]) <= bar}


def step_seconds(runs: Sequence[Served]) -> float:
    return sum(sample.seconds for served in runs for sample in served.samples)


def percent(ours: float, theirs: float) -> float:
    return round(100 * (ours / theirs - 1), 2) if theirs else 0.0


def totals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each metric: how many of the workloads are within the bar, how far off the worst is, and of how many the real
    runs themselves are further apart than the bar."""
    found = []
    for name, bar in BARS.items():
        of = [row for row in rows if row["metric"] == name]
        errors = [abs(row["error_percent"]) for row in of]
        by_grid = [abs(row["profile_error_percent"]) for row in of]
        found.append(
            {
                "metric": name,
                "bar_percent": bar,
                "workloads": len(of),
                "within": sum(row["within"] for row in of),
                "mean_percent": round(float(np.mean(errors)), 2),
                "worst_percent": max(errors),
                "profile_within": sum(error <= bar for error in by_grid),
                "profile_mean_percent": round(float(np.mean(by_grid)), 2),
                "apart_mean_percent": round(float(np.mean([row["apart_percent"] for row in of])), 2),
                "further_apart": sum(row["apart_percent"] > bar for row in of),
            }
        )
    return found


def shown(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,.4g}" for name, value in figures.items())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    bench, begin = Bench(args), time.perf_counter()
    load = os.getloadavg()[0]
    try:
        by_grid = bench.grid_profile()
        note(f"grid: a step is {by_grid.error:.1%} off in the mean")
        asked = {case.name: bench.requests(case, by_grid) for case in cases((*SEEN, *UNSEEN))}
        seen: list[list[Served]] = [[] for _ in range(PASSES)]
        runs: list[tuple[Case, list[Served]]] = [(case, []) for case in cases(UNSEEN)]
        for of_pass in seen:
            for to_fit, (to_predict, of) in zip(cases(SEEN), runs, strict=True):  # in turns: machines drift
                of_pass.append(bench.run(to_fit, asked[to_fit.name]))
                of.append(bench.run(to_predict, asked[to_predict.name]))
        samples = [sample for served in chain(*seen) for sample in served.samples]
        host = HostCost(*fit_host([each for served in chain(*seen) for each in served.host]))
        fitted = make_profile(bench.about(bench.engine("v1", "roomy")), samples, host, OUTLIER)
        rows, told = [], []
        for case, of in runs:
            ours = bench.simulate(case, asked[case.name], fitted, "traces")
            theirs = bench.simulate(case, asked[case.name], by_grid, "grid")
            rows += rows_of(case, of, ours, theirs)
            told.append(
                {
                    "case": case.name,
                    "requests": len(asked[case.name]),
                    "load": case.kind.loads[case.pool],
                    "preemptions": [served.preemptions for served in of],
                    "simulated_preemptions": ours.preemptions,
                }
            )
    finally:
        bench.close()
    rows.sort(key=lambda row: -abs(row["error_percent"]) / row["bar_percent"])
    return {
        "rows": rows,
        "totals": totals(rows),
        "workloads": told,
        "steps": len(samples),
        "step_error_percent": round(100 * fitted.error, 2),
        "drift_percent": percent(step_seconds(seen[-1]), step_seconds(seen[0])),
        "grid_error_percent": round(100 * by_grid.error, 2),
        "host_us": {name: round(1e6 * seconds, 2) for name, seconds in fitted.host.items()},
        "load_before": round(load, 2),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> int:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--model", default=DEFAULT_MODEL)
    args.add_argument("--threads", type=int, help="of forwards; None: as the engine chooses")
    args.add_argument("--clock", choices=CLOCKS, default="real", help="whose seconds")
    args.add_argument("--seconds", type=float, default=8.0, help="of arrivals in a run")
    args.add_argument("--least", type=int, default=12, help="requests of a run at least")
    args.add_argument("--grid-seconds", type=float, default=30.0, help="for the profile")
    args.add_argument("--seed", type=int, default=0, help="of the workloads")
    args = args.parse_args()
    try:
        results = measure(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in results["totals"]:
        note(", ".join(f"{name} {value}" for name, value in row.items()))
    emit("fidelity", vars(args), results, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
