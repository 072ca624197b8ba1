"""Data-parallel ranks: engine cores with a device each, which share a mixture's experts (vLLM's DP with EP).

    rank 0   |host| attention |       |e   |host| attention |  |e   |        e: experts, with the tokens of all ranks
    rank 1   |host| attention, longer |x   |host| attention    |x   |        x: so all ranks meet there
    rank 2   |host| a token of no use |p   |host| ...

Each rank has its own requests, scheduler and KV. In each layer all exchange tokens for the experts, so the n-th step of
one is the n-th of all: it begins when the last of them is submitted and ends for all at once, and the rank with the
most to do is waited for. One with nothing to do takes part with a token of no use (vLLM's execute_dummy_batch).

So ranks go round together: in a round each that has work makes a step of its core. Only then is it known how long the
step takes, so what a core waits for meanwhile is written down, and its clock moves when the round ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cluster import Cluster, Core, Replica, Router
from minivllm.simulate.cost import StepCost
from minivllm.simulate.events import Order
from minivllm.simulate.host import HostCost
from minivllm.simulate.prompts import Prompts
from minivllm.simulate.timeline import TimedWorker


@dataclass(slots=True, eq=False)
class SharedStep:
    end: float = math.inf  # seconds; inf: not all have submitted theirs


class RankGroup:
    """The devices of ranks that share their experts."""

    def __init__(self, num_ranks: int, shared_seconds: Callable[[int], float], idle_seconds: float):
        """shared_seconds: of so many tokens of all. idle_seconds: of what a rank does alone with a token of no use."""
        self.num_ranks = num_ranks
        self.busy_seconds = 0.0  # of each device, and what one waits for others within a step is in it
        self._shared_seconds = shared_seconds
        self._idle_seconds = idle_seconds
        self._free_at = 0.0
        self._step = SharedStep()
        self._parts: list[tuple[float, float, int]] = []  # of it: when submitted, seconds alone, tokens
        self._awaited: list[SharedStep] = []

    def submit(self, now: float, seconds: float, num_tokens: int) -> SharedStep:
        """-> what it is part of."""
        self._parts.append((now, seconds, num_tokens))
        return self._step

    def await_end(self, step: SharedStep) -> None:
        """Who asks goes on when that has ended."""
        self._awaited.append(step)

    def end_round(self) -> float:
        """Every rank with work has made a step -> when all go on."""
        ready = max((now for now, _, _ in self._parts), default=0.0)
        if self._parts:
            self._run(ready)
        end = max((step.end for step in self._awaited), default=0.0)
        self._awaited.clear()
        return max(ready, end)

    def _run(self, ready: float) -> None:
        num_idle = self.num_ranks - len(self._parts)
        alone = max(seconds for _, seconds, _ in self._parts)
        if num_idle:
            alone = max(alone, self._idle_seconds)
        seconds = alone + self._shared_seconds(sum(num_tokens for _, _, num_tokens in self._parts) + num_idle)
        self._step.end = self._free_at = max(ready, self._free_at) + seconds
        self.busy_seconds += seconds
        self._step = SharedStep()
        self._parts.clear()


class RankExecutor:
    """An Executor: of one rank."""

    def __init__(
        self, worker: TimedWorker, stopwatch: VirtualClock, clock: VirtualClock, host: HostCost, group: RankGroup
    ):
        """stopwatch: the worker's, which it moves by what its rank does alone. clock: the rank's core's."""
        self.worker: Any = worker
        self.group = group
        self._stopwatch = stopwatch
        self._clock = clock
        self._host = host

    @property
    def busy_seconds(self) -> float:
        return self.group.busy_seconds

    @property
    def costs(self) -> list[StepCost]:
        return [self.worker.cost]

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def tell(self, method: str, *args: Any) -> None:
        self.call(method, *args)

    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        clock, group = self._clock, self.group
        self._stopwatch.now = 0.0
        out = self.worker.execute(plan)
        if not self._stopwatch.now:  # it tells the worker who has left, and nobody waits for that
            return AsyncOutput.ready(out)
        clock.now += self._host.seconds(len(plan.num_tokens))
        step = group.submit(clock.now, self._stopwatch.now, plan.total_tokens)

        def wait() -> StepOutput:
            group.await_end(step)
            return out

        return AsyncOutput(lambda: clock.now >= step.end, wait)

    def shutdown(self) -> None:
        self.worker = None


class RankedCluster(Cluster):
    """Replicas are the ranks of one group or of several, which go their own ways."""

    def __init__(
        self,
        groups: Sequence[RankGroup],
        replicas: Sequence[tuple[Core, VirtualClock]],
        router: Router,
        prompts: Prompts,
        link_seconds: float = 0.0,
    ):
        """replicas: the ranks of the first group, then those of the next."""
        super().__init__(replicas, router, prompts, link_seconds)
        self._teams: list[tuple[RankGroup, list[Replica]]] = []  # of each replica
        for group in groups:
            first = len(self._teams)
            members = self.replicas[first : first + group.num_ranks]
            self._teams += [(group, members)] * len(members)

    def _wake(self, replica: Replica) -> None:
        if replica.runs:
            return
        _, members = self._teams[replica.number]
        for member in members:
            member.runs = True
        self._events.at(self._events.now, Order.CORE, self._go_on, replica)

    def _go_on(self, replica: Replica) -> None:
        """A round of its team."""
        group, members = self._teams[replica.number]
        working = [member for member in members if not self._rests(member)]
        if not working:
            for member in members:
                member.runs = False
            return
        begin = self._events.now
        told = []
        for member in working:
            member.clock.now = begin
            told.append(member.core.step())
        end = max(begin, group.end_round())
        for member, deltas in zip(working, told, strict=True):
            member.clock.now = end
            self._take(member, deltas, begin, end)
        self._events.at(end, Order.CORE, self._go_on, replica)
