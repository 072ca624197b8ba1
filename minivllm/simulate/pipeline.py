"""A pipeline: stages of devices, each with some of a model's layers, and as many steps in flight as there are stages.

    stage 0   | a0 | b0 | a1 | b1 |          a, b: lanes, each an engine core with requests of its own
    stage 1        | a0 | b0 | a1 | b1 |     hidden states go from stage to stage

A request's next token needs the one before it, so steps in flight must be of different requests. As vLLM V0's virtual
engines do it, each lane has a scheduler and an equal part of the KV pool, and a step of it in flight: the cores are
those of any engine. Steps pass each stage in the order in which they were submitted. One host serves all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import StepCost
from minivllm.simulate.host import HostCost
from minivllm.simulate.timeline import TimedWorker


class Pipeline:
    """What lanes share."""

    def __init__(self, num_stages: int, send_seconds: Callable[[int], float], host: HostCost):
        """send_seconds: of so many tokens' hidden states from a stage to the next."""
        self._free_at = [0.0] * num_stages
        self._host_free_at = 0.0
        self._send_seconds = send_seconds
        self._host = host

    def prepare(self, now: float, num_requests: int) -> float:
        """A step is made by the host -> when it can be submitted."""
        self._host_free_at = max(now, self._host_free_at) + self._host.seconds(num_requests)
        return self._host_free_at

    def run(self, now: float, seconds: Sequence[float], num_tokens: int) -> float:
        """A step is submitted that takes each stage so long -> when the last one is done."""
        way = self._send_seconds(num_tokens)
        for stage, own in enumerate(seconds):
            arrives = now + way if stage else now
            now = self._free_at[stage] = max(arrives, self._free_at[stage]) + own
        return now


class Stage(NamedTuple):
    worker: TimedWorker
    stopwatch: VirtualClock  # which it moves


class PipelineExecutor:
    """An Executor: of one lane. Every stage's worker is told every plan; tokens are the last one's."""

    def __init__(self, stages: Sequence[Stage], clock: VirtualClock, pipeline: Pipeline):
        """clock: the lane's core's."""
        self.stages = stages
        self.busy_seconds = 0.0  # of all stages
        self._clock = clock
        self._pipeline = pipeline

    @property
    def worker(self) -> Any:
        """Of the stage that keeps the most K and V."""
        workers: list[Any] = [stage.worker for stage in self.stages]
        return max(workers, key=lambda worker: worker.cost.kv_bytes_per_token)

    @property
    def costs(self) -> list[StepCost]:
        """Of each stage."""
        workers: list[Any] = [stage.worker for stage in self.stages]
        return [worker.cost for worker in workers]

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(stage.worker, method)(*args) for stage in self.stages]

    def tell(self, method: str, *args: Any) -> None:
        self.call(method, *args)

    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        clock, seconds, out = self._clock, [], StepOutput()
        for worker, stopwatch in self.stages:
            stopwatch.now = 0.0
            out = worker.execute(plan)
            seconds.append(stopwatch.now)
        end = clock.now
        if any(seconds):  # else it tells the workers who has left, and no stage waits for that
            clock.now = self._pipeline.prepare(clock.now, len(plan.num_tokens))
            end = self._pipeline.run(clock.now, seconds, plan.total_tokens)
        self.busy_seconds += sum(seconds)
        return AsyncOutput(lambda: clock.now >= end, partial(self._wait_for, end, out))

    def _wait_for(self, end: float, out: StepOutput) -> StepOutput:
        self._clock.wait_until(end)
        return out

    def shutdown(self) -> None:
        self.stages = ()
