"""The second half of chapter 12: why should a device wait for a scheduler? A step is planned while another one runs.

Measured on this machine's processor, and on a stand-in for a device that computes by itself: it sleeps for as long as a
pass takes, so the host is free meanwhile, as beside a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from bench.common import spread
from chapters.harness import in_time, note
from minivllm.config import EngineConfig
from minivllm.engine.build import build_kv, build_scheduler, build_worker
from minivllm.engine.core import EngineCore
from minivllm.executor.background import BackgroundExecutor
from minivllm.executor.uni import UniExecutor
from minivllm.plan import StepOutput, StepPlan
from minivllm.request import EngineRequest, SamplingParams
from minivllm.scheduler.base import Limits

EXACT = {"model.dtype": "float32", "model.quantization": "none"}
NUM_BLOCKS, MAX_LEN, NUM_PROMPT, FIRST_ID = 512, 512, 16, 1000
PASS_SECONDS = 0.002  # of the stand-in
STOP_AT = NUM_PROMPT + 10  # the stand-in's token that ends a request, where one is told to stop at it
WARMUP = 3  # passes that are not looked at


class Crowd(NamedTuple):
    num_requests: int
    num_new: int


HERE, ELSEWHERE, SMOKE_HERE = Crowd(16, 24), Crowd(64, 100), Crowd(4, 12)
WARM_TOKENS = 4  # of each request, in a run that is not looked at
ROUNDS, SMOKE_ROUNDS = 2, 1


class Sleeper:
    """The stand-in. Its token says how many came before it."""

    def execute(self, plan: StepPlan) -> StepOutput:
        time.sleep(PASS_SECONDS)
        return StepOutput({req_id: [plan.start[req_id] + num] for req_id, num in plan.num_tokens.items()})


class Timed:
    """A worker, and when each of its passes began and ended (seconds)."""

    def __init__(self, worker: Any, passes: list[tuple[float, float]]):
        self.worker, self.passes = worker, passes

    def execute(self, plan: StepPlan) -> StepOutput:
        begin = time.perf_counter()
        out = self.worker.execute(plan)
        if plan.num_tokens:
            self.passes.append((begin, time.perf_counter()))
        return out


class Run(NamedTuple):
    tokens: dict[str, list[int]]
    passes: list[tuple[float, float]]
    num_computed: int  # tokens
    seconds: float


class Loop:
    """A step loop with so many steps in flight, over a worker."""

    def __init__(self, worker: Any, in_flight: int):
        config = EngineConfig.build("v1", {"kv.num_blocks": NUM_BLOCKS})
        kv = build_kv(config, NUM_BLOCKS, MAX_LEN)
        limits = Limits(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens, MAX_LEN, kv.capacity)
        self.passes: list[tuple[float, float]] = []

        def make() -> UniExecutor:
            return UniExecutor(lambda: Timed(worker, self.passes))

        executor = BackgroundExecutor(make) if in_flight > 1 else make()
        self.core = EngineCore(build_scheduler(config, kv, limits), executor, [self], overlap=in_flight)
        self.num_computed = 0

    def serve(self, name: str, crowd: Crowd, stops: bool = False) -> Run:
        """stops: at a token that nobody can foresee, long before the length that was asked for."""
        self.num_computed = 0
        self.passes.clear()
        stop = (STOP_AT,) if stops else ()
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=crowd.num_new, ignore_eos=True, stop_token_ids=stop)
        tokens: dict[str, list[int]] = {}
        for i in range(crowd.num_requests):
            prompt = [FIRST_ID + 97 * i + j for j in range(NUM_PROMPT)]
            self.core.add(EngineRequest(f"{name}-{i}", prompt, params))
            tokens[f"{name}-{i}"] = []
        begin = time.perf_counter()
        while self.core.has_work:
            for delta in self.core.step():
                tokens[delta.req_id] += delta.token_ids
        seconds = time.perf_counter() - begin
        while not self.core.is_settled:
            self.core.step()
        return Run(tokens, list(self.passes), self.num_computed, seconds)

    def on_step(self, plan: StepPlan, *_: Any) -> None:
        self.num_computed += plan.total_tokens

    def on_add(self, *_: Any) -> None: ...
    def on_abort(self, *_: Any) -> None: ...
    def close(self) -> None: ...


def real_worker(num_threads: int) -> Any:
    sizes = {"kv.num_blocks": NUM_BLOCKS, "model.max_model_len": MAX_LEN, "executor.num_threads": num_threads}
    return build_worker(EngineConfig.build("v1", {**EXACT, **sizes}))


def told(runs: Sequence[Run], in_flight: int) -> dict[str, Any]:
    lengths = [1e3 * (end - begin) for run in runs for begin, end in run.passes[WARMUP:]]
    gaps = [1e3 * (after[0] - before[1]) for run in runs for before, after in pairwise(run.passes[WARMUP:])]
    length, gap = statistics.median(lengths), statistics.median(gaps)
    num_tokens = sum(map(len, runs[0].tokens.values()))
    return {
        "in_flight": in_flight,
        "pass": round(length, 2),
        "gap": round(gap, 3),
        "busy": round(100 * length / (length + gap), 1),  # percent of the time
        "rate": spread([num_tokens / run.seconds for run in runs], 0),
    }


def measure(smoke: bool, num_threads: int) -> dict[str, Any]:
    rounds, here = (SMOKE_ROUNDS, SMOKE_HERE) if smoke else (ROUNDS, HERE)
    found: dict[str, Any] = {"pass_ms": 1e3 * PASS_SECONDS, "equal": True}
    for place, crowd, worker in (("here", here, real_worker(num_threads)), ("elsewhere", ELSEWHERE, Sleeper())):
        note(f"  steps in flight: {place}, {crowd.num_requests} requests")
        loops = {in_flight: Loop(worker, in_flight) for in_flight in (1, 2)}
        runs: dict[int, list[Run]] = {1: [], 2: []}
        for loop in loops.values():
            loop.serve("warm", crowd._replace(num_new=WARM_TOKENS))
        for i in range(rounds):
            for in_flight, loop in loops.items():
                runs[in_flight].append(loop.serve(f"{i}", crowd))
        texts = [list(run.tokens.values()) for each in runs.values() for run in each]
        found["equal"] = found["equal"] and all(text == texts[0] for text in texts)
        found[place] = [told(each, in_flight) for in_flight, each in runs.items()]
        found[f"num_{place}"] = crowd.num_requests
        if place == "elsewhere":
            stopped = {in_flight: loop.serve("stops", crowd, stops=True) for in_flight, loop in loops.items()}
            needed = crowd.num_requests * STOP_AT  # the token itself needs no pass
            found["wasted"] = [run.num_computed - needed for run in stopped.values()]
        for loop in loops.values():
            loop.core.shutdown()
    return found


def check(results: dict[str, Any]) -> None:
    assert results["equal"], "a step planned ahead changed the output"
    alone, ahead = results["elsewhere"]
    in_time(ahead["gap"] < alone["gap"], "the device waits for the scheduler as long as before")
    in_time(all(row["gap"] < row["pass"] / 10 for row in results["here"]), "on a CPU the gap is worth closing")
    assert results["wasted"] == [0, results["num_elsewhere"]], "an end that nobody foresaw costs something else"


def tell(results: dict[str, Any]) -> list[str]:
    lines = [
        "steps in       usual      usual    the device       tokens",
        "flight      pass, ms    gap, ms       is busy     a second",
    ]
    names = {
        "here": f"this processor, {results['num_here']} requests:",
        "elsewhere": f"a device that sleeps {results['pass_ms']:.0f} ms a pass, {results['num_elsewhere']} requests:",
    }
    for place, name in names.items():
        lines.append(name)
        for row in results[place]:
            lines.append(
                f"{row['in_flight']:6} {row['pass']:13.2f} {row['gap']:10.3f} {row['busy']:11.1f} % "
                f"{row['rate']['max']:12,.0f}"
            )
    wasted = results["wasted"]
    lines.append(f"tokens computed for requests that had ended: {wasted[0]}, and {wasted[1]} with two steps in flight")
    return lines
