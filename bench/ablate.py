"""From configuration A to B, one switch at a time: what does each design decision give, and what does it cost?

    python bench/ablate.py --from v1 --to v1 --set-b kv.prefix=none --workload shared_prefix
    python bench/ablate.py --from v0 --to v1

Where A and B differ in several fields there are three kinds of comparison, all of the form A -> B:

    whole  A -> B
    path   every switch, in the order of the feature table, on top of those before it: the steps multiply up to whole
           (if they ran the same workload)
    alone  B with one switch back at A's value -> B: what B owes to that switch

Both engines of a comparison are in this process at once and run interleaved. A repetition has its own prompts, equal
for both, and ratios are taken within a repetition (latency.bootstrap_ratio). Who is first takes turns, A B B A A B:
with A always first, two equal engines of a tiny model showed a TTFT ratio of 0.83 (probably the first to meet a batch
shape pays for what the process then keeps; the cause was not looked for). So repetitions should be even in number. Even
in turns, equal engines of the tiny model of --quick differed by up to 6 % with an interval that left 1 out: --quick is
for trying things out, not for figures. Intervals are not corrected for the many metrics of a row. To see the noise
floor of a machine, switch something idle: --set-b kv.swap_memory=2GiB.

The core is driven with tokens, an open loop: a request is added when its time has come, however busy the engine is.
With --virtual time is counted in steps, so that a run makes the same plans every time. Outputs must be equal: greedy
(parallel sampling: seeded), float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import RESULTS, note, record
from latency import METRICS, StepRecord, Timeline, bootstrap_ratio, metrics, verdict
from plots import KINDS, markdown
from tqdm import tqdm
from workloads import WORKLOADS, Arrival, Scene, draw

from minivllm.config import DEFAULT_MODEL, PRESETS, EngineConfig, check_options, fields, parse_set
from minivllm.engine.build import Engine, build
from minivllm.engine.prepare import child_ids, children
from minivllm.errors import ConfigError, UserError
from minivllm.features import FEATURES
from minivllm.kv.waste import paged_waste
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import EngineRequest, SamplingParams

VIRTUAL_STEPS = 100  # steps that --virtual takes for a second
MAX_POOL = 32_768  # KV slots of a pool that --set does not size
QUICK_RATE, QUICK_LONGEST = 50, 256
SETTLE_STEPS = 4
ENOUGH = 5  # repetitions: of fewer, chance alone has all on one side too often to mark a winner
WASTE_EVERY = 10  # steps: looking at each block takes a fraction of a millisecond
DEFAULT_VOCAB, SMALLEST_VOCAB = 49_152, 256  # of the default model; of every dummy shape at least

# ---------------------------------------------------------------------------------------- comparisons


@dataclass(frozen=True, slots=True)
class Switch:
    """One thing that differs between A and B; several fields only where they cannot change one by one."""

    name: str
    changes: dict[str, tuple[Any, Any]]  # dotted field: (value in A, value in B)
    workload: str
    metric: str

    def __add__(self, other: Switch) -> Switch:
        return replace(other, name=f"{self.name} + {other.name}", changes=self.changes | other.changes)


@dataclass(frozen=True, slots=True)
class Comparison:
    kind: str  # whole | path | alone
    switch: Switch
    a: EngineConfig
    b: EngineConfig
    workload: str


def switches(a: EngineConfig, b: EngineConfig) -> list[Switch]:
    """What differs: features in the order of their table, then other fields in the order of the tree."""
    features = {feature.field: feature for feature in FEATURES}
    found = []
    for field in [*features, *(f for f in fields() if f not in features)]:
        if (before := a.get(field)) != (after := b.get(field)):
            feature = features.get(field)
            workload, metric = (feature.workload, feature.metric) if feature else ("", "")
            name = feature.name if feature else field
            workload = workload if workload in WORKLOADS else "sharegpt"
            metric = metric if metric in METRICS else "throughput"
            found.append(Switch(name, {field: (before, after)}, workload, metric))
    return found


def plan_comparisons(
    a: EngineConfig, b: EngineConfig, metric: str = "throughput"
) -> tuple[list[Comparison], list[str]]:
    """(comparisons, what cannot be compared and why), with each switch's own workload. Raises ConfigError if A is B."""
    found = switches(a, b)
    if not found:
        raise ConfigError("A and B are equal: choose two presets, or let --set-b change something")
    if len(found) == 1:
        return [Comparison("whole", found[0], a, b, found[0].workload)], []
    name = f"{a.preset} → {b.preset}" if a.preset != b.preset else "all switches"
    whole = Switch(name, _merged(found), "sharegpt", metric)
    comparisons = [Comparison("whole", whole, a, b, whole.workload), *_path(a, found)]
    skipped = []
    for switch in found:
        without, why = _without(b, switch, found)
        if without is None:
            skipped.append(f"alone, {switch.name}: {why}")
        else:
            comparisons.append(Comparison("alone", without, b.override(_side(without, 0)), b, switch.workload))
    return comparisons, skipped


def _without(b: EngineConfig, switch: Switch, found: Sequence[Switch]) -> tuple[Switch | None, str]:
    """The switch, with another one where it cannot be turned alone; or None and the reason."""
    why = ""
    for other in (None, *(one for one in found if one is not switch)):
        chosen = replace(switch + other, workload=switch.workload, metric=switch.metric) if other else switch
        try:
            check_options(b.override(_side(chosen, 0)))
        except ConfigError as e:
            why = why or str(e)
            continue
        return chosen, ""
    return None, why


def _side(switch: Switch, side: int) -> dict[str, Any]:
    """The fields of the switch as A (0) or B (1) has them."""
    return {field: values[side] for field, values in switch.changes.items()}


def _merged(found: Sequence[Switch]) -> dict[str, tuple[Any, Any]]:
    return {field: values for switch in found for field, values in switch.changes.items()}


def _path(a: EngineConfig, found: Sequence[Switch]) -> Iterator[Comparison]:
    """Cumulative. A switch that conflicts with what is not switched yet waits for the next and goes with it."""
    here, held = a, None
    for switch in found:
        switch = held + switch if held else switch
        there = here.override(_side(switch, 1))
        try:
            check_options(there)
        except ConfigError:
            held = switch
            continue
        yield Comparison("path", switch, here, there, switch.workload)
        here, held = there, None


# ---------------------------------------------------------------------------------------- one run


class Recorder:
    """An engine observer: when each token came, and what each step cost and kept."""

    def __init__(self, block_size: int, prepare: TimedInputs | None, scheduler: Any):
        self.block_size = block_size
        self.prepare = prepare
        self.scheduler = getattr(scheduler, "inner", scheduler)  # inside failure injection
        self.start()

    def start(self) -> None:
        self.timelines: dict[str, Timeline] = {}
        self.steps: list[StepRecord] = []
        self.held: dict[str, int] = {}  # request -> tokens in the cache
        self.final_lengths: dict[str, int] = {}
        if self.prepare:
            self.prepare.take()

    def expect(self, request: EngineRequest, arrival: float, num_in: int) -> None:
        self.timelines[request.id] = Timeline(arrival, num_in)
        self.final_lengths[request.id] = len(request.prompt_token_ids) + request.params.max_tokens

    def on_step(self, plan: StepPlan, out: StepOutput, deltas: list[Delta], times: dict[str, float]) -> None:
        now = time.perf_counter()
        for req_id in plan.leaves:
            self.held.pop(req_id, None)
        for req_id, num in plan.num_tokens.items():
            self.held[req_id] = plan.start[req_id] + num
        stats = plan.stats
        host_ms = times["schedule"] + times["update"] + (1e3 * self.prepare.take() if self.prepare else 0.0)
        slots = (stats.num_total_blocks - stats.num_free_blocks) * self.block_size
        for delta in deltas:
            timeline = self.timelines[delta.req_id]
            timeline.times += [now] * len(delta.token_ids)
            timeline.steps += [len(self.steps)] * len(delta.token_ids)
            timeline.tokens += delta.token_ids
        waste = self._waste() if len(self.steps) % WASTE_EVERY == 0 else None
        self.steps.append(StepRecord(host_ms, sum(self.held.values()), slots, stats.num_preempted, waste))
        for delta in deltas:
            if delta.finish_reason is not None:
                self.held.pop(delta.req_id, None)

    def _waste(self) -> tuple[float, float, float, float] | None:
        kv = getattr(self.scheduler, "kv", None)
        measure = getattr(kv, "waste", None) or (partial(paged_waste, kv) if hasattr(kv, "tables") else None)
        if measure is None:
            return None  # an engine without a pool
        waiting = self.scheduler.waiting
        return measure(self.scheduler.requests, self.final_lengths, waiting[-1] if waiting else None)

    def on_start(self, config: dict[str, Any], info: dict[str, Any]) -> None: ...
    def on_add(self, req: EngineRequest, step: int) -> None: ...
    def on_abort(self, req_id: str) -> None: ...
    def close(self) -> None: ...


class TimedInputs:
    """An input builder, with a clock around what it does in a step."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        return self._timed(value) if name in ("apply", "build", "append") else value

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed

    def take(self) -> float:
        """Seconds since the last take."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Side:
    """One configuration, loaded."""

    def __init__(self, config: EngineConfig):
        self.engine: Engine = build(config)
        runner = getattr(getattr(self.engine.executor, "worker", None), "runner", None)
        prepare = None
        if hasattr(runner, "inputs"):
            prepare = runner.inputs = TimedInputs(runner.inputs)
        self.recorder = Recorder(config.kv.block_size, prepare, self.engine.core.scheduler)
        self.engine.core.observers.append(self.recorder)
        self.num_runs = 0

    def run(self, arrivals: Sequence[Arrival], virtual: bool) -> tuple[dict[str, float], list[list[int]]]:
        """(metrics, the tokens of each request in order of arrival)."""
        self.num_runs += 1
        self.recorder.start()
        gc.collect()
        drive(self.engine.core, [self._requests(i, a) for i, a in enumerate(arrivals)], self.recorder, virtual)
        timelines = list(self.recorder.timelines.values())
        return metrics(timelines, self.recorder.steps), [t.tokens for t in timelines]

    def close(self) -> None:
        self.engine.core.shutdown()

    def _requests(self, i: int, arrival: Arrival) -> tuple[float, list[EngineRequest]]:
        sampled = {"temperature": 1.0} if arrival.n > 1 else {"temperature": 0.0}
        params = SamplingParams(
            **sampled, n=arrival.n, seed=i * 1000, max_tokens=arrival.max_tokens, ignore_eos=True, detokenize=False
        )
        req_id = f"r{self.num_runs}-{i}"
        common = {"priority": arrival.priority} | ({"group": req_id} if arrival.n > 1 else {})
        each = zip(child_ids(req_id, arrival.n), children(params), strict=True)
        return arrival.time_s, [EngineRequest(id_, arrival.prompt_token_ids, p, **common) for id_, p in each]


def drive(
    core: Any, requests: Sequence[tuple[float, list[EngineRequest]]], recorder: Recorder, virtual: bool = False
) -> None:
    """Run until all is served. Raises SystemExit for a request that the engine gave up."""
    pending = deque(requests)
    start, steps = time.perf_counter(), 0.0
    while pending or core.has_work:
        now = steps / VIRTUAL_STEPS if virtual else time.perf_counter() - start
        while pending and pending[0][0] <= now:
            at, together = pending.popleft()
            arrival = time.perf_counter() if virtual else start + at
            for i, request in enumerate(together):
                request.arrival_time = core.clock()
                recorder.expect(request, arrival, 0 if i else len(request.prompt_token_ids))
                core.add(request)
        if core.has_work:
            _check(core.step())
            steps += 1
        elif virtual:
            steps = max(steps, pending[0][0] * VIRTUAL_STEPS)
        else:
            time.sleep(max(0.0, pending[0][0] - (time.perf_counter() - start)))
    for _ in range(SETTLE_STEPS):  # the workers drop the last rows
        if not core.is_settled:
            core.step()
            recorder.steps.pop()


def _check(deltas: list[Delta]) -> None:
    for delta in deltas:
        if delta.finish_reason not in (None, "length"):
            raise SystemExit(f"request {delta.req_id} ended with {delta.finish_reason}: {delta.error}")


# ---------------------------------------------------------------------------------------- A B B A


def measure(comparison: Comparison, args: argparse.Namespace, bar: tqdm) -> dict[str, Any]:
    """Raises UserError for a configuration that cannot be built."""
    workload = WORKLOADS[comparison.workload]
    rate = args.rate or workload.rate * (QUICK_RATE if args.quick else 1)
    scale = args.scale or (min(1.0, QUICK_LONGEST / workload.longest) if args.quick else 1.0)
    shape = {"num_requests": args.num_requests, "rate": rate, "scale": scale, "vocab": args.vocab}
    scenes = [draw(comparison.workload, args.seed + i, **shape) for i in range(args.repetitions)]
    first = scenes[0].arrivals[0]
    warm = first._replace(prompt_token_ids=first.prompt_token_ids[::-1], max_tokens=min(4, first.max_tokens), n=1)
    sides: dict[str, Side] = {}
    try:
        for name, config in (("a", comparison.a), ("b", comparison.b)):
            sides[name] = side = Side(sized(config, scenes, args.pool_tokens))
            if (size := side.engine.info.get("vocab_size", args.vocab)) < args.vocab:
                raise ConfigError(f"the model knows {size} tokens: choose --vocab {size}")
            side.run([warm], virtual=True)
        values: dict[str, list[dict[str, float]]] = {"a": [], "b": []}
        num_different = 0
        for i, scene in enumerate(scenes):
            tokens = {}
            for name in ("a", "b") if i % 2 == 0 else ("b", "a"):
                found, tokens[name] = sides[name].run(scene.arrivals, args.virtual)
                values[name].append(found)
                bar.update()
            num_different += sum(a != b for a, b in zip(tokens["a"], tokens["b"], strict=True))
        num_outputs = sum(a.n for scene in scenes for a in scene.arrivals)
        configs = {name: side.engine.config.flat() for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.close()
    outputs = {"num": num_outputs, "num_different": num_different}
    return row(comparison, values, outputs) | {"shape": shape | {"rate": str(rate)}, "configs": configs}


def row(comparison: Comparison, values: dict[str, list[dict[str, float]]], outputs: dict[str, int]) -> dict[str, Any]:
    """One comparison as JSON: values of every repetition, ratios B / A, and what they mean."""
    ratios = {}
    names = [name for name in METRICS if all(name in run for runs in values.values() for run in runs)]
    for name in names:
        a, b = ([run[name] for run in values[side]] for side in "ab")
        ratio = bootstrap_ratio(a, b)
        found = {key: round(value, 4) for key, value in ratio._asdict().items()} if ratio else {"ratio": None}
        ratios[name] = found | {"verdict": verdict(name, ratio, a, b) if len(a) >= ENOUGH else ""}
    return {
        "kind": comparison.kind,
        "switch": comparison.switch.name,
        "changes": {field: list(values) for field, values in comparison.switch.changes.items()},
        "workload": comparison.workload,
        "workload_is": WORKLOADS[comparison.workload].what,
        "metric": comparison.switch.metric,
        "verdict": ratios[comparison.switch.metric]["verdict"],
        "outputs": outputs,
        "ratios": ratios,
        "values": {
            side: {name: [round(run[name], 4) for run in runs] for name in names} for side, runs in values.items()
        },
    }


def sized(config: EngineConfig, scenes: Sequence[Scene], pool_tokens: int | None) -> EngineConfig:
    """Room for the workload, where the configuration leaves it open: equal memory for A and B."""
    overrides: dict[str, Any] = {}
    longest = max(scene.max_model_len for scene in scenes)
    if config.model.max_model_len is None:
        overrides["model.max_model_len"] = longest
    if config.kv.num_blocks is None and config.kv.memory is None:
        tokens = pool_tokens or min(max(scene.pool_tokens for scene in scenes), max(MAX_POOL, longest))
        overrides["kv.num_blocks"] = math.ceil(tokens / config.kv.block_size) + 1
    return config.override(overrides)


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
    parser.add_argument("--model", help=f"{DEFAULT_MODEL}; with --quick dummy:tiny")
    parser.add_argument("--dtype", default="float32", help="float32: else equal outputs cannot be asked for")
    parser.add_argument("--repetitions", type=int, help="of A and B (6)")
    parser.add_argument("--num-requests", type=int, help="the workload's own; with --quick 9")
    what = f"requests a second; the workload's own; with --quick {QUICK_RATE} times that"
    parser.add_argument("--rate", type=float, help=what)
    parser.add_argument(
        "--scale", type=float, help=f"of all lengths (1); with --quick, so that the longest has {QUICK_LONGEST}"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first repetition's prompts (0)")
    parser.add_argument("--vocab", type=int, help="prompts are random ids below this")
    parser.add_argument("--pool-tokens", type=int, help="KV slots; the workload's own")
    parser.add_argument("--virtual", action="store_true", help=f"time is steps: {VIRTUAL_STEPS} are a second")
    parser.add_argument("--quick", action="store_true", help="a small model and short requests: under two minutes")
    parser.add_argument("--out", type=Path, help="the JSON file (bench/results/ablate-A-B-workload.json)")
    args = parser.parse_args(argv)
    quick: dict[str, Any] = {"model": "dummy:tiny", "repetitions": 6, "num_requests": 9}
    usual = {"model": DEFAULT_MODEL, "repetitions": 6}
    for name, value in (quick if args.quick else usual).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.vocab is None:
        args.vocab = SMALLEST_VOCAB if args.model.startswith("dummy:") else DEFAULT_VOCAB
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
                comparisons.append(replace(one, workload=chosen))
    return comparisons, skipped


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    comparisons, skipped = comparisons_of(args)
    rows = []
    with tqdm(total=2 * args.repetitions * len(comparisons), unit="run", dynamic_ncols=True) as bar:
        for comparison in comparisons:
            bar.set_description(f"{comparison.kind}: {comparison.switch.name}, {comparison.workload}")
            try:
                rows.append(measure(comparison, args, bar))
            except UserError as e:
                skipped.append(f"{comparison.kind}, {comparison.switch.name}, {comparison.workload}: {e}")
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
    note(f"{out}; plots: python bench/plots.py {out}")
    num_different = sum(row["outputs"]["num_different"] for row in results["rows"])
    if num_different:
        note(
            f"\n*** {num_different} OUTPUTS OF A AND B DIFFER: a design decision may change timing, never tokens ***\n"
        )
    return 1 if num_different and args.dtype == "float32" else 0


if __name__ == "__main__":
    raise SystemExit(main())
