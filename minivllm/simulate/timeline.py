"""TimelineExecutor: a device and its host as two timelines, on a virtual clock. Nobody waits and no thread runs.

A plan is submitted when the host has done its part; its step begins when the device is free, and its output is there
when that ends. Who asks for an output moves the clock there:

    host      |h0|          |h1|          |h2|            engine.overlap=1: the device waits for the host
    device       |  step 0  |  |  step 1  |  |  step 2

    host      |h0|h1|        |h2|         |h3|            engine.overlap=2: it does not, while a step is longer
    device       |  step 0   |  step 1    |  step 2

A worker computes at once what a step says, and tells by a stopwatch how long it would take.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import StepCost
from minivllm.simulate.host import HostCost


class TimedWorker(Protocol):
    def execute(self, plan: StepPlan) -> StepOutput:
        """Moves its stopwatch by the seconds that the device takes."""
        ...


class TimelineExecutor:
    """An Executor."""

    def __init__(self, worker: TimedWorker, stopwatch: VirtualClock, clock: VirtualClock, host: HostCost):
        """stopwatch: the worker's. clock: the engine core's."""
        self.worker: Any = worker
        self.busy_seconds = 0.0  # of the device
        self._stopwatch = stopwatch
        self._clock = clock
        self._host = host
        self._free_at = 0.0  # the device

    @property
    def costs(self) -> list[StepCost]:
        """Of what a step passes, one behind the other."""
        return [self.worker.cost]

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def tell(self, method: str, *args: Any) -> None:
        self.call(method, *args)

    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        clock, stopwatch = self._clock, self._stopwatch
        clock.now += self._host.seconds(len(plan.num_tokens))
        stopwatch.now = 0.0
        out = self.worker.execute(plan)
        self.busy_seconds += stopwatch.now
        end = self._free_at = max(clock.now, self._free_at) + stopwatch.now
        return AsyncOutput(lambda: clock.now >= end, partial(self._wait_for, end, out))

    def _wait_for(self, end: float, out: StepOutput) -> StepOutput:
        self._clock.wait_until(end)
        return out

    def shutdown(self) -> None:
        self.worker = None
