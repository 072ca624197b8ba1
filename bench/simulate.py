"""How far is the simulator from what a real vLLM did, on the same requests, with nothing fitted on them?

A recorded run (bench/vllm_run.py says of what it is made) is done again: this engine's scheduler and KV manager with
vLLM's options, one simulated device whose layers take what tables of that device say (minivllm/simulate/tables.py), a
virtual clock. Errors are of the means and percentiles over all requests, simulated / measured - 1.

    python -m bench simulate --run RUN --tables rtx4090_llama-3.1-8b_tp1 [rtx4090_llama-3.1-8b_tp2 ...]

Or servers of which only means were measured, at a fixed number of clients, by tables of operators (bench/silicon.py):

    python -m bench simulate --silicon POINTS.csv --tables FOLDER [--plot FILE.svg]

One JSON line says how many points were predicted, and of mean TTFT and TPOT the mean absolute error in percent, of all
and by model and GPU, the worst first.

Of a run, TTFT and latency count from when the engine core took a request (vLLM's queued_ts), TPOT is the mean time
between its tokens. Prompts are made up. Where meta.json names a public workload whose shared beginnings are known
(bench/vllm_workloads.json), they share those; else, and with --prompts unshared, they share nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import silicon
from common import RESULTS, note, parser, percent, record
from lockstep import Lockstep, Rank, RankCost, RankQueue
from lockstep import drive as drive_ranks
from vllm_run import CAPTURE_SIZES, CONTEXT_BYTES, Run, read_run

from minivllm.config import EngineConfig
from minivllm.engine.build.engine import build_over
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.engine.core import EngineCore
from minivllm.engine.step_loop import Reporter
from minivllm.errors import ConfigError, TraceError, UserError
from minivllm.executor.uni import UniExecutor
from minivllm.loading.dummy import SHAPES
from minivllm.loading.sources import DUMMY_PREFIX
from minivllm.request import EngineRequest, SamplingParams
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import Numbers
from minivllm.simulate.devices import DEVICES
from minivllm.simulate.host import NO_HOST
from minivllm.simulate.models import MODELS
from minivllm.simulate.shape import Shape, read_shape
from minivllm.simulate.sources import find_model
from minivllm.simulate.tables import Links, TableCost, Tables, choose_tables, read_tables
from minivllm.simulate.timeline import TimelineExecutor
from minivllm.simulate.workload import FIRST_TOKEN, TraceRequest, prompt_tokens

HERE = Path(__file__).parent
WORKLOADS = HERE / "vllm_workloads.json"
# Tables say what a step takes, and the run how many blocks there are: the device must only hold the weights.
ROOMY = max(DEVICES, key=lambda name: DEVICES[name].memory)
WAYS = {"mean": statistics.fmean, **{f"p{q}": partial(np.percentile, q=q) for q in (50, 90, 99)}}
METRICS = ("ttft", "tpot", "latency")
NO_LINKS = Links(1.0, 0.0)  # where sizes are asked for, and no step


@dataclass(slots=True)
class Times:
    """Seconds of one request."""

    queued: float
    first: float = 0.0
    last: float = 0.0

    def metrics(self, num_output: int) -> dict[str, float]:
        found = {"ttft": self.first - self.queued, "latency": self.last - self.queued}
        return found | ({"tpot": (self.last - self.first) / (num_output - 1)} if num_output > 1 else {})


Series = list[tuple[float, int, int, float]]  # after each step: seconds, running, waiting, share of KV in use


@dataclass(slots=True)
class Simulated:
    requests: list[Times]
    series: list[Series]  # of each engine core
    num_preempted: int
    prefix_hits: int  # tokens
    num_blocks: int
    seconds: float  # that it took to simulate


# --------------------------------------------------------------------------------------------------------- the engine


def find_shape(run: Run, asked: str | None) -> str:
    """What model.path takes: as asked for, or whose sizes go by the model's name here. Raises ConfigError."""
    if asked is not None:
        return asked
    name = run.model.rpartition("/")[2].lower()
    for known in sorted({*MODELS, *SHAPES}, key=len, reverse=True):
        if re.fullmatch(re.escape(known) + r"(-(instruct|base|chat|it|hf|\d{4}))*", name):
            return known if known in MODELS else DUMMY_PREFIX + known
    raise ConfigError(f"{run.model}: its sizes are not known here: name a folder that holds its config.json (--model)")


def shape_of(model: str) -> Shape:
    found = find_model(model)
    return read_shape(found.config, found.where)


def capture_sizes(run: Run) -> list[int]:
    """Tokens of vLLM's captured forwards, to which a smaller step is padded (VllmConfig._set_cudagraph_sizes)."""
    if run.option("enforce_eager"):
        return []
    sizes = run.option("cudagraph_capture_sizes")
    if isinstance(sizes, list) and all(isinstance(size, int) for size in sizes):
        return sorted(sizes)
    most = min(2 * run.option("max_num_seqs"), 512, run.option("max_num_batched_tokens"))
    return [size for size in CAPTURE_SIZES if size <= most]


def check_parallel(run: Run, shape: Shape) -> None:
    """Raises ConfigError for what is not simulated."""
    tp, dp = run.option("tensor_parallel_size"), run.option("data_parallel_size")
    ep = run.option("enable_expert_parallel")
    if dp > 1 and not (ep and shape.experts and run.option("async_scheduling")):
        what = "of a mixture with enable_expert_parallel and asynchronous scheduling alone"
        raise ConfigError(f"{run.name}: data_parallel_size={dp} is simulated {what}")
    if shape.experts and tp > 1 and not ep:
        raise ConfigError(f"{run.name}: experts that are split by width (tensor parallelism) are not simulated yet")


def expert_ranks(run: Run) -> int:
    ranks = run.option("tensor_parallel_size") * run.option("data_parallel_size")
    return ranks if run.option("enable_expert_parallel") else 1


def find_links(run: Run) -> Links | None:
    machine = run.machine
    if run.option("tensor_parallel_size") == run.option("data_parallel_size") == 1:
        return None
    if not machine.link_bandwidth or machine.link_latency is None:
        raise ConfigError(f"{run.name}/config.json: no link_bw and link_latency, by which its devices would talk")
    return Links(machine.link_bandwidth, machine.link_latency)


def numbers_of(run: Run) -> Numbers:
    kept = str(run.option("kv_cache_dtype"))
    return Numbers("bfloat16", 2, 1 if "fp8" in kept or "int8" in kept else 2)


def count_blocks(run: Run, model: str, tables: Tables) -> int:
    """Of the KV pool, less the one that vLLM never gives away (its null block). Where the run does not say, what the
    memory leaves beside weights, the widest forward and CUDA's own. Raises ConfigError if that is nothing."""
    blocks = run.option("num_gpu_blocks")
    if blocks is not None:
        blocks //= run.option("data_parallel_size")  # vLLM's client adds up those of all engine cores
    else:
        what = DEVICES[ROOMY], shape_of(model), numbers_of(run), expert_ranks(run)
        cost = TableCost(tables, NO_LINKS, (), *what)
        share = run.option("gpu_memory_utilization") * run.machine.memory
        forwards = cost.forward_bytes(run.option("max_num_batched_tokens"), run.option("max_num_seqs"))
        left = share - cost.weight_bytes - forwards - CONTEXT_BYTES
        blocks = int(left / (cost.kv_bytes_per_token * run.option("block_size")))
    if blocks < 2:
        raise ConfigError(
            f"{run.model}: no room for KV on {run.machine.name} beside the weights at tensor_parallel_size={tables.tp}"
        )
    return blocks - 1


def make_config(run: Run, model: str, num_blocks: int) -> EngineConfig:
    """vLLM's scheduler: V1's, with its options."""
    longest = run.option("max_model_len")
    fits = num_blocks * run.option("block_size") + 1
    return EngineConfig.build(
        "v1",
        {
            "model.path": model,
            "model.max_model_len": min(longest, fits) if longest else None,
            "executor.kind": "simulated",
            "executor.device": ROOMY,
            "kv.num_blocks": num_blocks,
            "kv.block_size": run.option("block_size"),
            "kv.prefix": "hash" if run.option("enable_prefix_caching") else "none",
            "scheduler.admission": "full_prompt" if run.option("scheduler_reserve_full_isl") else "all",
            "scheduler.max_num_seqs": run.option("max_num_seqs"),
            "scheduler.max_num_batched_tokens": run.option("max_num_batched_tokens"),
            "scheduler.chunked_prefill": run.option("enable_chunked_prefill"),
        },
    )


class Watch(Reporter):
    """An Observer that writes down when tokens came."""

    def __init__(self, clock: VirtualClock):
        self._clock = clock
        self.times: dict[str, Times] = {}
        self.series: Series = []

    def on_add(self, req: EngineRequest, step: int) -> None:
        self.times[req.id] = Times(self._clock())

    def on_step(self, plan: Any, out: Any, deltas: Sequence[Any], times: Mapping[str, float]) -> None:
        now, stats = self._clock(), plan.stats
        for delta in deltas:
            if delta.error is not None:
                raise ConfigError(f"request {delta.req_id}: {delta.error}")
            of = self.times[delta.req_id]
            of.first, of.last = of.first or now, now
        used = 1 - stats.num_free_blocks / stats.num_total_blocks
        self.series.append((now, stats.num_running, stats.num_waiting, used))


Coming = list[tuple[float, EngineRequest]]  # by arrival, seconds from the first one's


def simulate(run: Run, folders: Sequence[Path], model: str, prompts: Sequence[Sequence[int]]) -> Simulated:
    """Raises UserError."""
    begin = time.perf_counter()
    check_parallel(run, shape_of(model))
    tables = read_tables(choose_tables(folders, run.option("tensor_parallel_size")))
    num_blocks = count_blocks(run, model, tables)
    config = make_config(run, model, num_blocks)
    tables_of = tables, find_links(run), capture_sizes(run)
    serve = serve_alone if run.option("data_parallel_size") == 1 else serve_in_lockstep
    served = serve(run, config, tables_of, coming_of(run, prompts))
    times = {req_id: times for _, watch in served for req_id, times in watch.times.items()}
    stats = [core.stats for core, _ in served]
    return Simulated(
        [times[str(i)] for i in range(len(run.requests))],
        [watch.series for _, watch in served],
        sum(of.num_preempted for of in stats),
        sum(of.prefix_hits for of in stats),
        num_blocks,
        time.perf_counter() - begin,
    )


def coming_of(run: Run, prompts: Sequence[Sequence[int]]) -> Coming:
    begin = min(request.arrival for request in run.requests)
    found = []
    for i, (request, prompt) in enumerate(zip(run.requests, prompts, strict=True)):
        params = SamplingParams(max_tokens=request.num_output, ignore_eos=True, temperature=0)
        found.append((request.arrival - begin, EngineRequest(str(i), list(prompt), params)))
    return sorted(found, key=lambda each: each[0])


def serve_alone(run: Run, config: EngineConfig, tables: tuple, coming: Coming) -> list[tuple[EngineCore, Watch]]:
    host, stopwatch = VirtualClock(), VirtualClock()
    worker = SimulatedWorkerBuilder(config, clock=stopwatch, make_cost=partial(TableCost, *tables, **_ranks(run)))
    executor, watch = TimelineExecutor(worker.build(), stopwatch, host, NO_HOST), Watch(host)
    own = config.override({"engine.overlap": 2 if run.option("async_scheduling") else 1})
    core = build_over(executor, own, [watch], host).core
    drive(core, host, coming)
    core.shutdown()
    return [(core, watch)]


def serve_in_lockstep(run: Run, config: EngineConfig, tables: tuple, coming: Coming) -> list[tuple[EngineCore, Watch]]:
    num_ranks = run.option("data_parallel_size")
    costs: list[RankCost] = []

    def make_cost(*of: Any) -> RankCost:
        costs.append(RankCost(*tables, *of, **_ranks(run)))
        return costs[-1]

    group = Lockstep(num_ranks, lambda steps: costs[0].group_seconds(steps))
    ranks, watches = [], []
    for number in range(num_ranks):
        host = VirtualClock()
        worker = SimulatedWorkerBuilder(config, clock=VirtualClock(), make_cost=make_cost)
        engine, watch = build_over(UniExecutor(worker.build), config, clock=host), Watch(host)
        queue = RankQueue(engine.core.executor, host, group, number, costs[-1])
        core = EngineCore(engine.core.scheduler, queue, [watch], host, overlap=2)
        ranks.append(Rank(core, queue))
        watches.append(watch)
    drive_ranks(ranks, coming)
    return [(rank.core, watch) for rank, watch in zip(ranks, watches, strict=True)]


def _ranks(run: Run) -> dict[str, int]:
    return {"num_expert_ranks": expert_ranks(run)}


def drive(core: EngineCore, clock: VirtualClock, coming: Coming) -> None:
    """As vLLM's engine core goes round: take what has arrived, step."""
    waiting = coming[::-1]
    while waiting or core.has_work:
        while waiting and waiting[-1][0] <= clock():
            core.add(waiting.pop()[1])
        if core.has_work:
            core.step()
        else:
            clock.wait_until(waiting[-1][0])


# ------------------------------------------------------------------------------------------------------------ prompts


def make_prompts(run: Run, model: str, asked: str) -> tuple[list[list[int]], str]:
    """(of each request its tokens, where they are from). Raises TraceError."""
    if asked not in ("auto", "unshared"):
        return read_prompts(Path(asked), run), asked
    vocab = shape_of(model).vocab_size
    pairs = enumerate(run.requests)
    prompts = [prompt_tokens(TraceRequest(r.arrival, r.num_prompt, r.num_output), vocab, i) for i, r in pairs]
    known = json.loads(WORKLOADS.read_text())["workloads"].get(run.dataset) if asked == "auto" else None
    if known is None:
        return prompts, "made up, sharing nothing"
    for i, earlier, count in known["shared"]:
        if i < len(prompts):
            prompts[i][:count] = prompts[earlier][:count]
            prompts[i][count : count + 1] = [_another(prompts[i][count : count + 1], prompts[earlier], count)]
    return [prompt[: r.num_prompt] for prompt, r in zip(prompts, run.requests, strict=True)], (
        f"made up, sharing what those of {known['name']} share"
    )


def _another(own: Sequence[int], earlier: Sequence[int], at: int) -> int:
    """A token other than the earlier prompt's there, so that no more than was said is shared."""
    token = own[0] if own else FIRST_TOKEN
    return token if at >= len(earlier) or token != earlier[at] else token ^ 1


def read_prompts(path: Path, run: Run) -> list[list[int]]:
    """Of a workload's file: JSON lines with input_tok_ids, in the order of the run's requests."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None
    if len(lines) < len(run.requests):
        raise TraceError(f"{path}: {len(lines)} prompts for {len(run.requests)} requests")
    prompts = []
    for number, (line, request) in enumerate(zip(lines, run.requests, strict=False), 1):
        try:
            tokens = json.loads(line)["input_tok_ids"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise TraceError(f"{path}:{number}: no JSON object with input_tok_ids") from None
        if not isinstance(tokens, list) or len(tokens) != request.num_prompt:
            raise TraceError(f"{path}:{number}: its tokens are not the {request.num_prompt} of the run's request")
        prompts.append(tokens)
    return prompts


# ----------------------------------------------------------------------------------------------------------- compared


@dataclass(slots=True)
class Compared:
    """Of one metric, seconds of the requests that were measured."""

    simulated: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    def figures(self, metric: str) -> list[dict[str, Any]]:
        found = []
        for name, way in WAYS.items() if self.measured else ():
            ours, theirs = float(way(self.simulated)), float(way(self.measured))
            times = {"measured_ms": round(1e3 * theirs, 3), "simulated_ms": round(1e3 * ours, 3)}
            found.append({"metric": metric, "of": name, **times, "error_percent": percent(ours, theirs)})
        return found

    @property
    def each_percent(self) -> float | None:
        """How far each request is off, in the mean of them."""
        off = [abs(a - b) / b for a, b in zip(self.simulated, self.measured, strict=True) if b > 0]
        return round(100 * statistics.fmean(off), 2) if off else None


def compare(run: Run, simulated: Simulated) -> dict[str, Compared]:
    found = {name: Compared() for name in METRICS}
    for request, times in zip(run.requests, simulated.requests, strict=True):
        if request.queued is None or request.first is None or request.last is None:
            continue
        measured = Times(request.queued, request.first, request.last).metrics(request.num_output)
        ours = times.metrics(request.num_output)
        for name, value in measured.items():
            found[name].simulated.append(ours[name])
            found[name].measured.append(value)
    if not found["latency"].measured:
        raise TraceError(f"{run.name}/requests.jsonl: no request has queued_ts, first_token_ts and last_token_ts")
    return found


def means(run: Run, simulated: Simulated) -> dict[str, Any]:
    """Over time: how many ran and waited, and how full the pool was, there and here; of one engine core."""
    ours = np.mean([over_time(series) for series in simulated.series], axis=0).tolist()
    theirs = [statistics.fmean(row[name] for row in run.series) if run.series else None for name in SERIES]
    theirs[2] = theirs[2] / 100 if theirs[2] else None  # older recorders wrote 0 throughout
    return {
        name: {"simulated": round(a, 3), "measured": None if b is None else round(b, 3)}
        for name, a, b in zip(("running", "waiting", "kv_used"), ours, theirs, strict=True)
    }


def over_time(series: Series) -> list[float]:
    if not series:
        return [0.0, 0.0, 0.0]
    ends, *columns = zip(*series, strict=True)
    return [float(np.average(column, weights=np.diff([0.0, *ends]))) for column in columns]


SERIES = ("running", "waiting", "kv_cache_pct")


def results_of(run: Run, simulated: Simulated, prompts: str) -> dict[str, Any]:
    """figures: the worst first."""
    compared = compare(run, simulated)
    figures = [figure for metric, of in compared.items() for figure in of.figures(metric)]
    return {
        "case": f"{run.model} on {run.machine.name}, prompts {prompts}",
        "run": run.name,
        "figures": sorted(figures, key=lambda figure: -abs(figure["error_percent"] or 0)),
        "each_request_percent": {metric: of.each_percent for metric, of in compared.items()},
        "over_time": means(run, simulated),
        "requests": len(run.requests),
        "steps": sum(map(len, simulated.series)),
        "preemptions": simulated.num_preempted,
        "prefix_hit_tokens": simulated.prefix_hits,
        "kv_blocks": simulated.num_blocks,
        "seconds": round(simulated.seconds, 2),
    }


def headline(results: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader of the line looks for first."""
    errors = {(figure["of"], figure["metric"]): figure["error_percent"] for figure in results["figures"]}
    wanted = [(of, metric) for of in ("mean", "p50", "p99") for metric in METRICS]
    found = {f"{metric}_{of}_error_percent": errors.get((of, metric)) for of, metric in wanted}
    return found | {"seconds": results["seconds"]}


def arguments() -> argparse.Namespace:
    args = parser(__doc__, "simulate")
    what = args.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", type=Path, metavar="FOLDER", help="what vLLM did, request by request")
    what.add_argument("--silicon", type=Path, metavar="FILE", help="a CSV of servers' mean TTFT and TPOT")
    args.add_argument(
        "--tables",
        type=Path,
        nargs="+",
        required=True,
        metavar="FOLDER",
        help="of a run: layer times; names end in tp1, tp2 ... With --silicon: the folder of operators' tables",
    )
    args.add_argument("--model", help="of a run: folder with the model's config.json; None: known by its name")
    args.add_argument(
        "--prompts", default="auto", help="of a run: auto, unshared, or a workload's file with input_tok_ids"
    )
    args.add_argument("--plot", type=Path, metavar="FILE", help="with --silicon: a picture (svg, png) of all errors")
    args.add_argument("--processes", type=int, default=os.cpu_count(), help="with --silicon: how many predict")
    asked = args.parse_args()
    if asked.silicon is None and asked.plot is not None:
        args.error("--plot draws the points of --silicon")
    if asked.silicon is not None and (asked.model is not None or asked.prompts != "auto" or len(asked.tables) > 1):
        args.error("--silicon takes one folder of --tables, and neither --model nor --prompts")
    if asked.processes < 1:
        args.error(f"--processes {asked.processes}: at least 1")
    return asked


def main() -> int:
    args = arguments()
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    try:
        return main_silicon(args) if args.silicon is not None else main_run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def main_silicon(args: argparse.Namespace) -> int:
    """Raises UserError."""
    found, rows = silicon.run(args.silicon, args.tables[0], args.processes)
    for line in silicon.lines(found, rows):
        note(line)
    if args.plot is not None:
        silicon.save_plot(rows, args.plot)
    params = {"silicon": args.silicon.name, "tables": args.tables[0].name}
    groups = [{"case": name, **errors} for name, errors in found["by"].items()]
    line = found | record("silicon", params, found | {"groups": groups})
    print(json.dumps(line))
    if args.out is not None:
        line["results"]["rows"] = rows
        append(args.out.with_stem("silicon") if args.out == RESULTS / "simulate.jsonl" else args.out, json.dumps(line))
    return 0


def main_run(args: argparse.Namespace) -> int:
    """Raises UserError."""
    run = read_run(args.run)
    model = find_shape(run, args.model)
    prompts, source = make_prompts(run, model, args.prompts)
    results = results_of(run, simulate(run, args.tables, model, prompts), source)
    for figure in results["figures"]:
        name, times = f"{figure['metric']} {figure['of']}", (figure["measured_ms"], figure["simulated_ms"])
        note(f"{name:13} {times[0]:12,.1f} ms, simulated {times[1]:12,.1f} ms, {figure['error_percent']:+.2f} %")
    params = {"run": run.name, "tables": [folder.name for folder in args.tables]}
    params |= {"model": str(args.model), "prompts": args.prompts}
    line = json.dumps(headline(results) | record("simulate", params, results))
    print(line)
    if args.out is not None:
        append(args.out, line)
    return 0


def append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
