"""EngineCore: the step loop. Requests of tokens in, deltas of tokens out; it knows no text, no sockets, no model.

A step that was submitted is in flight until its output has been taken in. With overlap=1 that is at once: the
synchronous engine. With overlap=2 step n + 1 is planned and submitted while n runs, and n's output is processed while
n + 1 runs, so that whoever executes never waits for whoever plans (vLLM's asynchronous scheduling, SGLang's overlap
scheduler):

    executor    | step 0 | step 1 | step 2 | ...
    this loop   |plan 1  |take 0, plan 2|take 1, plan 3| ...
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minivllm.engine.contents import Contents
from minivllm.errors import EngineDead, is_no_memory
from minivllm.executor.base import Executor
from minivllm.plan import NO_MEMORY, AsyncOutput, Delta, StepOutput, StepPlan
from minivllm.request import EngineRequest, Request
from minivllm.scheduler.protocol import Scheduler

logger = logging.getLogger("minivllm")

MAX_IDLE_STEPS = 100  # steps in a row that run nothing though requests are live: a scheduler that will never run them


class Observer(Protocol):
    """Watches an engine core: metrics, traces. May raise nothing and change nothing.

    on_start: the options, and what the engine found out about its model. on_add: step is the number of the next one.
    on_step: times are milliseconds of `schedule`, `execute` and `update`. close: nothing follows.
    """

    def on_start(self, config: dict[str, Any], info: dict[str, Any]) -> None: ...
    def on_add(self, req: EngineRequest, step: int) -> None: ...
    def on_abort(self, req_id: str) -> None: ...
    def on_step(self, plan: StepPlan, out: StepOutput, deltas: list[Delta], times: dict[str, float]) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class EngineStats:
    """Gauges of the last step, and totals since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_total_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_steps: int = 0
    num_preempted: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    prompt_tokens: int = 0  # of all requests taken
    generation_tokens: int = 0
    num_drafted: int = 0  # tokens proposed by speculative decoding and computed
    num_accepted: int = 0  # of these, how many became output
    num_stalled: int = 0  # steps and calls that ran longer than engine.step_timeout

    @property
    def kv_usage(self) -> float:
        """The fraction of blocks that live requests name."""
        return 1 - self.num_free_blocks / self.num_total_blocks if self.num_total_blocks else 0.0

    @property
    def parts(self) -> Sequence[EngineStats]:
        """Of each replica."""
        return (self,)

    def take(self, other: EngineStats) -> None:
        """Become a copy of it. Whoever holds this object reads on."""
        for name in EngineStats.__slots__:
            setattr(self, name, getattr(other, name))

    def on_end(self) -> None:
        """The engine has died, and with it all that ran and waited there."""
        self.num_running = self.num_waiting = self.num_cached_blocks = 0
        self.num_free_blocks = self.num_total_blocks

    def on_step(self, plan: StepPlan, deltas: list[Delta]) -> None:
        stats = plan.stats
        self.num_steps += 1
        for name in ("num_running", "num_waiting", "num_total_blocks", "num_free_blocks", "num_cached_blocks"):
            setattr(self, name, getattr(stats, name))
        for name in ("num_preempted", "prefix_queries", "prefix_hits", "num_drafted", "num_accepted"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        self.generation_tokens += sum(len(delta.token_ids) for delta in deltas)


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        check: bool = False,
        overlap: int = 1,
    ):
        """clock: seconds. All times that a core reports, and what its scheduler takes for now, are its.
        overlap: how many steps may be in flight; 1: a step's output is known before the next one is planned."""
        self.scheduler = scheduler
        self.executor = executor
        self.observers = list(observers)
        self.clock = clock
        self.check = check
        self.overlap = overlap
        self.stats = EngineStats()
        self.plan: StepPlan | None = None  # the newest
        self._contents = Contents(executor)
        self._live: set[str] = set()  # order never matters: only asked whether it is empty or holds an id
        self._in_flight: deque[tuple[StepPlan, AsyncOutput[StepOutput]]] = deque()
        self._num_idle = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._in_flight)

    @property
    def is_settled(self) -> bool:
        """No work, and a plan has said so since: the workers have dropped every row and the gauges show it."""
        return not (self.has_work or self.stats.num_running or self.stats.num_waiting)

    def add(self, er: EngineRequest) -> None:
        """Raises BadRequest (NeverFits) and takes nothing, if the request can never run."""
        self.scheduler.add(Request.make(er))
        self._contents.take(er)
        self._live.add(er.id)
        self.stats.prompt_tokens += len(er.prompt_token_ids)
        for observer in self.observers:
            observer.on_add(er, self.stats.num_steps + len(self._in_flight))

    def abort(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            if req_id in self._live:
                self._live.discard(req_id)
                self.scheduler.abort(req_id)
                self._contents.drop([req_id])
                for observer in self.observers:
                    observer.on_abort(req_id)

    def step(self) -> list[Delta]:
        """Schedule, submit, update: one batch of tokens. [] while the first steps of an overlap are on their way."""
        clock = self.clock
        begin = clock()
        plan = self.plan = self.scheduler.schedule(begin)
        planned = clock()
        self._in_flight.append((plan, self._submit(plan)))
        deltas: list[Delta] = []
        while len(self._in_flight) >= self.overlap or (self._in_flight and not plan.num_tokens):
            for done, out in self._wait_for_oldest():
                executed = clock()
                new = self.scheduler.update(done, out)
                self._observe(done, out, new, begin, planned, executed)
                deltas += new
                begin = planned = clock()
        return deltas

    def _submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        try:
            return self.executor.submit(plan)
        except Exception as error:
            return AsyncOutput.failed(error)

    def _wait_for_oldest(self) -> list[tuple[StepPlan, StepOutput]]:
        """The oldest step's output. If it failed, those in flight behind it were not run: they built on it."""
        plan, output = self._in_flight[0]
        try:
            done = [(plan, output.result())]
        except Exception as error:
            behind = list(self._in_flight)[1:]
            done = [(plan, _failed(plan, error)), *((later, StepOutput(is_lost=True)) for later, _ in behind)]
        for _ in done:
            self._in_flight.popleft()
        return done

    def shutdown(self) -> None:
        self.executor.shutdown()
        for observer in self.observers:
            observer.close()

    def _observe(self, plan: StepPlan, out: StepOutput, deltas: list[Delta], begin, planned, executed) -> None:
        """The times are this loop's, back to back: with an overlap `schedule` is what planning a later step took
        meanwhile, and `execute` how long the loop waited."""
        ended = [delta.req_id for delta in deltas if delta.finish_reason is not None]
        self._live.difference_update(ended)
        self._contents.drop(ended)
        self._num_idle = 0 if plan.num_tokens else self._num_idle + 1
        if self._num_idle > MAX_IDLE_STEPS and self._live:
            raise EngineDead(f"{len(self._live)} requests wait and none has run for {MAX_IDLE_STEPS} steps")
        self.stats.on_step(plan, deltas)
        if self.check:
            self.scheduler.check()
        if self.observers:
            done = self.clock()
            times = {"schedule": planned - begin, "execute": executed - planned, "update": done - executed}
            for observer in self.observers:
                observer.on_step(plan, out, deltas, {name: 1e3 * seconds for name, seconds in times.items()})


def _failed(plan: StepPlan, error: Exception) -> StepOutput:
    """A step that raised may end the requests that were in it, and no others; nothing of it is published."""
    logger.error("a step with %d requests failed", len(plan.num_tokens), exc_info=error)
    message = NO_MEMORY if is_no_memory(error) else f"{type(error).__name__}: {error}"
    return StepOutput(errors=dict.fromkeys(plan.num_tokens, message), is_failed=True)
