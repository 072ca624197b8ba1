"""Data-parallel engine cores that share the experts of a mixture, on virtual clocks (vLLM's DP with EP).

Each core has its own requests, scheduler and KV. In each layer all exchange tokens for the experts, so the n-th step of
one is the n-th of all: it begins when the last was submitted, and ends for all at once. A core with nothing to do takes
part with a token of no use (vLLM's execute_dummy_batch). A new request goes where 4 * waiting + running is least
(DPLBAsyncMPClient), by counts that are published every 100 ms; between them the client counts what it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minivllm.engine.core import EngineCore
from minivllm.executor.base import Executor
from minivllm.plan import AsyncOutput, StepOutput, StepPlan
from minivllm.request import EngineRequest
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import Step
from minivllm.simulate.tables import TableCost

PUBLISHED_SECONDS = 0.1  # DPCoordinatorProc's stats_update_interval_ms
WAITING_WEIGHT = 4  # DPLBAsyncMPClient.get_core_engine_for_request


class Lockstep:
    """The devices of all ranks."""

    def __init__(self, num_ranks: int, seconds: Callable[[Sequence[Step | None]], float]):
        self._seconds = seconds
        self._steps: list[list[tuple[float, Step | None]]] = [[] for _ in range(num_ranks)]  # (submitted, what) by rank
        self._ends: list[float] = []

    def submit(self, rank: int, now: float, step: Step | None) -> int:
        """-> which step it is part of."""
        self._steps[rank].append((now, step))
        return len(self._steps[rank]) - 1

    def end(self, index: int) -> float:
        """Seconds. Every rank has submitted that step."""
        while len(self._ends) <= index:
            parts = [of[len(self._ends)] for of in self._steps]
            free = self._ends[-1] if self._ends else 0.0
            begin = max(free, *(submitted for submitted, _ in parts))
            self._ends.append(begin + self._seconds([step for _, step in parts]))
        return self._ends[index]


class RankCost(TableCost):
    """A step takes what all ranks' steps do, which Lockstep knows: here it is only written down."""

    taken: Step | None = None

    def step_seconds(self, step: Step) -> float:
        self.taken = step
        return 0.0


class RankQueue:
    """An Executor of one rank; needs engine.overlap=2, or a rank would wait for another that has not been asked."""

    def __init__(self, inner: Executor, host: VirtualClock, group: Lockstep, rank: int, cost: RankCost):
        self.inner, self.host = inner, host
        self.num_submitted = 0
        self._group, self._rank, self._cost = group, rank, cost

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.inner.call(method, *args)

    def tell(self, method: str, *args: Any) -> None:
        self.inner.tell(method, *args)

    def submit(self, plan: StepPlan) -> AsyncOutput[StepOutput]:
        out = self.inner.submit(plan)
        if not plan.num_tokens:
            return out
        index = self._take_part(self._cost.taken)

        def wait() -> StepOutput:
            self.host.wait_until(self._group.end(index))
            return out.result()

        return AsyncOutput(lambda: False, wait)

    def idle(self) -> None:
        """Take part with nothing, a step behind the others' newest."""
        index = self._take_part(None)
        if index:
            self.host.wait_until(self._group.end(index - 1))

    def _take_part(self, step: Step | None) -> int:
        self.num_submitted += 1
        return self._group.submit(self._rank, self.host(), step)

    def shutdown(self) -> None:
        self.inner.shutdown()


class Rank:
    def __init__(self, core: EngineCore, queue: RankQueue):
        self.core, self.queue = core, queue
        self.inbox: list[tuple[float, EngineRequest]] = []  # on their way, the first first

    def go_round(self) -> None:
        """As vLLM's engine core does: take what has come, step."""
        while self.inbox and self.inbox[0][0] <= self.queue.host():
            self.core.add(self.inbox.pop(0)[1])
        before = self.queue.num_submitted
        if self.core.has_work:
            self.core.step()
        if self.queue.num_submitted == before:
            self.queue.idle()


class Balancer:
    def __init__(self, ranks: Sequence[Rank]):
        self._ranks = ranks
        self._counts = [0.0 for _ in ranks]
        self._published = 0.0

    def send(self, arrival: float, request: EngineRequest) -> None:
        if arrival >= self._published + PUBLISHED_SECONDS:
            self._published = arrival
            stats = [rank.core.stats for rank in self._ranks]
            self._counts = [WAITING_WEIGHT * of.num_waiting + of.num_running for of in stats]
        least = self._counts.index(min(self._counts))
        self._counts[least] += WAITING_WEIGHT
        self._ranks[least].inbox.append((arrival, request))


def drive(ranks: Sequence[Rank], coming: list[tuple[float, EngineRequest]]) -> None:
    """coming: by arrival, seconds from 0."""
    balancer, place = Balancer(ranks), 0
    while place < len(coming) or any(rank.core.has_work or rank.inbox for rank in ranks):
        if not any(rank.core.has_work or rank.inbox for rank in ranks):
            for rank in ranks:
                rank.queue.host.wait_until(coming[place][0])
        latest = max(rank.queue.host() for rank in ranks)
        while place < len(coming) and coming[place][0] <= latest:
            balancer.send(*coming[place])
            place += 1
        for rank in ranks:
            rank.go_round()
