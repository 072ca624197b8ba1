"""Cluster: engine cores, a router and links between them, as events on one virtual clock.

    arrival ---router---> (link) delivery ---> core: a step ---> core: the next one ...
                 ^                                 |
                 '-------- (link) report ----------'

The cores are the real ones. Each has a clock of its own, which is behind or at the end of the step that it has made
last: `core.step()` runs when the step begins and leaves the clock where its tokens are there. What is delivered
meanwhile the core takes before its next step, as a real step loop does, and what it tells is heard when it is told: so
nothing sees the future, in whatever order replicas are simulated.

Requests are made when they arrive, and nothing is kept of one that has ended but its row of figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minivllm.errors import BadRequest, TraceError
from minivllm.plan import Delta
from minivllm.request import EngineRequest
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.events import Events, Order
from minivllm.simulate.figures import Figures
from minivllm.simulate.prompts import Prompts
from minivllm.simulate.workload import TraceRequest


class Core(Protocol):
    """An EngineCore."""

    stats: Any
    executor: Any
    plan: Any

    @property
    def is_settled(self) -> bool: ...
    def add(self, er: EngineRequest) -> None: ...
    def step(self) -> list[Delta]: ...


class Router(Protocol):
    def place(self, request: EngineRequest) -> int:
        """The replica that it goes to."""
        ...

    def forget(self, replica: int, req_id: str) -> None:
        """It has ended there."""
        ...


@dataclass(slots=True, eq=False)
class Replica:
    number: int
    core: Core
    clock: VirtualClock
    runs: bool = field(default=False)  # a step, or is about to


class Cluster:
    def __init__(
        self,
        replicas: Sequence[tuple[Core, VirtualClock]],
        router: Router,
        prompts: Prompts,
        link_seconds: float = 0.0,
    ):
        """replicas: each with the clock that its core reads. link_seconds: of a request's way to a core, and of a
        token's way back."""
        self.replicas = [Replica(number, core, clock) for number, (core, clock) in enumerate(replicas)]
        self.figures = Figures(len(self.replicas))
        self._router = router
        self._prompts = prompts
        self._link = link_seconds
        self._events = Events()
        self._num_arrived = 0
        self._gives_up = False

    def run(self, requests: Iterable[TraceRequest], gives_up: bool = False) -> Figures:
        """requests: in the order of their arrival; taken one by one, when the last one has arrived. gives_up: at the
        last arrival, if the queue has grown until then."""
        arrivals, self._gives_up = iter(requests), gives_up
        self._expect(arrivals)
        self._events.run()
        sides = {name: [replica.core for replica in replicas] for name, replicas in self.sides().items()}
        self.figures.end(sides, self._prefix_cores())
        return self.figures

    def sides(self) -> Mapping[str, Sequence[Replica]]:
        """Replicas by what they do, where they do not all do the same."""
        return {"": self.replicas}

    def _prefix_cores(self) -> Iterable[Core]:
        """Whose prefix caches count."""
        return (replica.core for replica in self.replicas)

    def _expect(self, arrivals: Iterator[TraceRequest]) -> None:
        if (asked := next(arrivals, None)) is None:
            if self._gives_up and self.figures.queue_grew:
                self.figures.gave_up = True
                self._events.clear()
            return
        if asked.arrival < self._events.now:
            number, moment = self._num_arrived, f"{asked.arrival:g} s"
            raise TraceError(f"request {number} of the trace arrives at {moment}, before the one that it follows")
        self._events.at(asked.arrival, Order.ARRIVAL, self._arrive, asked, arrivals)

    def _arrive(self, asked: TraceRequest, arrivals: Iterator[TraceRequest]) -> None:
        request = self._prompts.request(self._num_arrived, asked)
        self._num_arrived += 1
        self.figures.arrived(request.id, asked)
        self._place(request)
        self._expect(arrivals)

    def _place(self, request: EngineRequest) -> None:
        replica = self.replicas[self._router.place(request)]
        self._events.at(self._events.now + self._link, Order.DELIVERY, self._deliver, replica, request)

    def _deliver(self, replica: Replica, request: EngineRequest) -> None:
        try:
            self._add(replica, request)
        except BadRequest as error:
            self.figures.refused(request.id, str(error))
            self._router.forget(replica.number, request.id)
            return
        self._wake(replica)

    def _add(self, replica: Replica, request: EngineRequest) -> None:
        """Raises BadRequest."""
        replica.core.add(request)

    def _wake(self, replica: Replica) -> None:
        if not replica.runs:
            replica.runs = True
            self._events.at(self._events.now, Order.CORE, self._go_on, replica)

    def _rests(self, replica: Replica) -> bool:
        """Whether its core has nothing to do until something comes."""
        return replica.core.is_settled

    def _go_on(self, replica: Replica) -> None:
        if self._rests(replica):
            replica.runs = False
            return
        begin = replica.clock.now = self._events.now
        deltas = replica.core.step()
        end = replica.clock.now
        self._take(replica, deltas, begin, end)
        self._events.at(end, Order.CORE, self._go_on, replica)

    def _take(self, replica: Replica, deltas: list[Delta], begin: float, end: float) -> None:
        """What a step from begin to end has said."""
        ended = self._tell(replica, deltas, end)
        self.figures.ran(replica.core.stats.kv_usage, end - begin)
        if ended:
            self._events.at(end + self._link, Order.REPORT, self._report, replica.number, ended)

    def _tell(self, replica: Replica, deltas: list[Delta], end: float) -> list[str]:
        """-> who has left the replica."""
        return self.figures.told(deltas, end + self._link)

    def _report(self, replica: int, ended: list[str]) -> None:
        for req_id in ended:
            self._router.forget(replica, req_id)
