"""One engine under one workload: a configuration is loaded, arrivals are driven through its core, times are taken."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from latency import StepRecord, Timeline, metrics
from workloads import Arrival, Scene

from minivllm.config import EngineConfig
from minivllm.engine.build import Engine, build
from minivllm.engine.prepare import children
from minivllm.errors import ConfigError
from minivllm.kv.waste import paged_waste
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import BeamSearchParams, EngineRequest, SamplingParams, sequence_ids
from minivllm.scheduler.base import SchedulerBase

VIRTUAL_STEPS = 100  # steps that virtual time takes for a second
MAX_POOL = 32_768  # KV slots of a pool that nobody sizes
SETTLE_STEPS = 4
WASTE_EVERY = 10  # steps: looking at each block takes a fraction of a millisecond


class Recorder:
    """An engine observer: when each token came, and what each step cost and kept.

    Which beams are the best is known at the end, when all their tokens come at once. What counts as the time of a
    beam's k-th token is when its request's beams had been extended for the k-th time.
    """

    def __init__(self, block_size: int, prepare: TimedInputs | None, scheduler: SchedulerBase):
        self.block_size = block_size
        self.prepare = prepare
        self.scheduler = scheduler
        self.start()

    def start(self) -> None:
        self.timelines: dict[str, Timeline] = {}
        self.steps: list[StepRecord] = []
        self.held: dict[str, int] = {}  # request -> tokens in the cache
        self.final_lengths: dict[str, int] = {}
        self.beams: dict[str, list[Timeline]] = {}  # by the request that the others are forked from
        if self.prepare:
            self.prepare.take()

    def expect(self, request: EngineRequest, arrival: float, num_in: int) -> None:
        ids = sequence_ids(request.group, request.beam.beam_width) if request.beam else [request.id]
        timelines = [Timeline(arrival, 0 if i else num_in) for i in range(len(ids))]
        self.timelines.update(zip(ids, timelines, strict=True))
        if request.beam:
            self.beams[request.id] = timelines
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
        for root in dict.fromkeys(map(root_of, out.tokens)) if self.beams else ():
            for timeline in self.beams.get(root, ()):
                timeline.at(now, len(self.steps), 1)
        for delta in deltas:
            timeline = self.timelines[delta.req_id]
            timeline.tokens += delta.token_ids
            timeline.at(now, len(self.steps), len(timeline.tokens) - len(timeline.times))
        waste = self._waste() if len(self.steps) % WASTE_EVERY == 0 else None
        held = sum(self.held.values())
        self.steps.append(
            StepRecord(
                host_ms,
                held,
                slots,
                stats.num_preempted,
                waste,
                stats.num_running,
                stats.num_waiting,
                plan.total_tokens,
            )
        )
        for delta in deltas:
            if delta.finish_reason is not None:
                self.held.pop(delta.req_id, None)

    def _waste(self) -> tuple[float, float, float, float]:
        scheduler = self.scheduler
        measure = getattr(scheduler.kv, "waste", None) or partial(paged_waste, scheduler.kv)
        final_lengths = {req_id: self.final_lengths[root_of(req_id)] for req_id in scheduler.requests}
        return measure(scheduler.requests, final_lengths, scheduler.waiting[-1] if scheduler.waiting else None)

    def on_start(self, config: dict[str, Any], info: dict[str, Any]) -> None: ...
    def on_add(self, req: EngineRequest, step: int) -> None: ...
    def on_abort(self, req_id: str) -> None: ...
    def close(self) -> None: ...


def root_of(req_id: str) -> str:
    """A beam that was forked is called after the request that it was forked from (scheduler/beam.py)."""
    return req_id.partition("~")[0]


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
        if config.engine.core != "inproc":
            raise ConfigError(f"engine.core={config.engine.core} cannot be driven: steps are watched in this process")
        self.config = config
        self.engine: Engine = build(config)
        executor = getattr(self.engine.executor, "inner", self.engine.executor)  # of one in a thread of its own
        runner = getattr(getattr(executor, "worker", None), "runner", None)
        prepare = None
        if hasattr(runner, "inputs"):
            prepare = runner.inputs = runner.head.inputs = TimedInputs(runner.inputs)
        self.recorder = Recorder(config.kv.block_size, prepare, self.engine.core.scheduler.base)
        self.engine.core.observers.append(self.recorder)
        self.num_runs = 0

    def check(self, largest: int) -> None:
        """Raises ConfigError if the model does not know that token."""
        if (size := self.engine.info["vocab_size"]) <= largest:
            raise ConfigError(f"the model knows {size} tokens: choose --vocab {size}")

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
        return arrival.time_s, engine_requests(f"r{self.num_runs}-{i}", arrival, seed=i * 1000)


def engine_requests(req_id: str, arrival: Arrival, seed: int) -> list[EngineRequest]:
    """Greedy, or n sampled sequences, or the one request that beams are forked from."""
    num = arrival.num_sequences
    ids, group = sequence_ids(req_id, num), req_id if num > 1 else ""
    if arrival.beam_width:
        beam = BeamSearchParams(beam_width=arrival.beam_width, max_tokens=arrival.max_tokens, ignore_eos=True)
        each, ids = [beam.step.replace(detokenize=False)], ids[:1]
    else:
        beam, temperature = None, 1.0 if arrival.n > 1 else 0.0
        common = {"max_tokens": arrival.max_tokens, "ignore_eos": True, "detokenize": False}
        each = children(SamplingParams(temperature=temperature, n=arrival.n, seed=seed, **common))
    return [
        EngineRequest(id_, arrival.prompt_token_ids, params, priority=arrival.priority, group=group, beam=beam)
        for id_, params in zip(ids, each, strict=True)
    ]


def drive(
    core: Any, requests: Sequence[tuple[float, list[EngineRequest]]], recorder: Recorder, virtual: bool = False
) -> None:
    """Run until all is served. Raises SystemExit for a request that the engine gave up."""
    pending = deque(requests)
    start, steps = time.perf_counter(), 0.0
    while pending or core.has_work:
        now, unit = (steps, VIRTUAL_STEPS) if virtual else (time.perf_counter() - start, 1)
        while pending and pending[0][0] * unit <= now:  # as `steps` is set below: divided, it might never get there
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


# ---------------------------------------------------------------------------------------- several, in turns


Values = dict[str, list[dict[str, float]]]  # of each side, the metrics of each repetition


class Runs(NamedTuple):
    values: Values
    num_different: int  # outputs that differ from the first side's
    num_outputs: int  # of one side


class Driven(Protocol):
    """A configuration that is loaded: a Side, or (drive_http.py) a Server."""

    config: EngineConfig

    def check(self, largest: int) -> None: ...
    def run(self, arrivals: Sequence[Arrival], virtual: bool) -> tuple[dict[str, float], list[list[int]]]: ...
    def close(self) -> None: ...


D = TypeVar("D", bound=Driven)


@contextmanager
def loaded(configs: Mapping[str, EngineConfig], make: Callable[[EngineConfig], D] = Side) -> Iterator[dict[str, D]]:
    """All of them at once. Raises UserError for a configuration that cannot be built."""
    sides: dict[str, D] = {}
    try:
        for name, config in configs.items():
            sides[name] = make(config)
        yield sides
    finally:
        for side in sides.values():
            side.close()


def in_turns(
    sides: Mapping[str, Driven],
    scenes: Sequence[Scene],
    on_run: Callable[[], Any] = lambda: None,
    virtual: bool = False,
    is_enough: Callable[[Values], bool] = lambda values: False,
) -> Runs:
    """Each scene once through every side, in the opposite order from one scene to the next (A B B A), until all are
    through or is_enough, which is asked after each.

    Raises ConfigError if a model does not know a token of the scenes.
    """
    arrivals = [arrival for scene in scenes for arrival in scene.arrivals]
    largest = max(max(arrival.prompt_token_ids) for arrival in arrivals)
    first = arrivals[0]
    warm = first._replace(prompt_token_ids=first.prompt_token_ids[::-1], max_tokens=min(4, first.max_tokens))
    for side in sides.values():
        side.check(largest)
        side.run([warm], virtual=True)
    values: Values = {name: [] for name in sides}
    num_different = num_outputs = 0
    for i, scene in enumerate(scenes):
        tokens = {}
        for name in list(sides) if i % 2 == 0 else list(sides)[::-1]:
            found, tokens[name] = sides[name].run(scene.arrivals, virtual)
            values[name].append(found)
            on_run()
        wanted = tokens[next(iter(sides))]
        num_different += sum(a != b for got in tokens.values() for a, b in zip(wanted, got, strict=True))
        num_outputs += sum(arrival.num_sequences for arrival in scene.arrivals)
        if is_enough(values):
            break
    return Runs(values, num_different, num_outputs)
