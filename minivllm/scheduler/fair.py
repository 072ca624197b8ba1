"""Fair: one client's flood does not hold up another client's request.

The requests of a client (an API key, or an address) follow each other on a line of virtual time, each as long as the
work that it makes, and the earliest start is served next: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM
1996). Work is counted in tokens, one of a prompt as 1 and one of an output as 2, as the virtual token counter does
(Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Virtual time is the earliest start of all that
live. So who was away starts level with the others: a pause neither saves up a claim nor costs one.

    A: |-- a1 --|-- a2 --|-- a3 --|-- a4 --| ...      b1 arrives while a1 runs: it starts where a1 did, and is served
    B: |--- b1 ---|-- b2 --|                          before a2; b2, which follows it, before a3

What a request costs is known when it has ended. Until then its output is taken to be as long as its client's were in
the mean, and no longer than it may be; the difference then moves what the client has waiting.

Three rules make the wait of a single request short, and not only its share fair. On equal starts whoever came to the
line last is first: the others have been served meanwhile. A client that has nothing running takes the place of one
that has more than one request running, or has one running and others that wait. And a prompt leaves every request that
runs a token of the step's budget, or those that were there before would stand still for it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import Request
from minivllm.scheduler.around import Around
from minivllm.scheduler.protocol import InnerScheduler

OUTPUT_WEIGHT = 2  # of a token of output, which takes a pass of its own, beside one of a prompt
FIRST_GUESS = 256  # tokens of output, of a client of which none has ended
MEMORY = 0.9  # of the mean length of a client's outputs: how much of it one more leaves
MAX_CLIENTS = 10_000  # that are remembered while they have nothing to be served


@dataclass(slots=True)
class _Charge:
    req: Request
    cost: float

    @property
    def start(self) -> float:
        return self.req.order[0]


class Fair:
    spares_running: ClassVar[bool] = True

    def __init__(self) -> None:
        self._live: dict[str, _Charge] = {}  # by request
        self._starts: list[tuple[float, str]] = []  # a heap of them; what has left or moved stays until it comes up
        self._ends: dict[str, float] = {}  # of each client's line
        self._mean_output: dict[str, float] = {}
        self._group: tuple[str, tuple[float, int]] = ("", (0.0, 0))  # the last one, and its place
        self._num_begun = 0  # times that a client came to its line anew

    def order(self, req: Request, sequence: int) -> tuple:
        group, place = self._group
        if not req.group or req.group != group:  # else: the sequences of one prompt stay together
            place = self._place(req.client)
            self._group = req.group, place
        start, client = place[0], req.client
        output = min(self._mean_output.get(client, FIRST_GUESS), req.params.max_tokens or FIRST_GUESS)
        self._live[req.id] = charge = _Charge(req, _cost(req.num_prompt_tokens, output))
        heapq.heappush(self._starts, (start, req.id))
        self._ends[client] = max(self._ends.get(client, start), start) + charge.cost
        return (*place, sequence)

    def _place(self, client: str) -> tuple[float, int]:
        """Of a request that arrives now: its start, and who is first among equal starts."""
        now, end = self._now(), self._ends.get(client, 0.0)
        if end > now:
            return end, 0
        self._num_begun += 1
        return now, -self._num_begun

    def _now(self) -> float:
        """Virtual time. It never goes back."""
        starts, live = self._starts, self._live
        while starts and ((charge := live.get(starts[0][1])) is None or charge.start != starts[0][0]):
            heapq.heappop(starts)
        return starts[0][0] if starts else 0.0

    def check(self, requests: Mapping[str, Request]) -> None:
        for req_id, charge in self._live.items():
            assert requests[req_id] is charge.req, "a request is not the one that was taken in"
            assert charge.start >= self._now(), "a request is not on its client's line"

    def around(self, inner: InnerScheduler) -> InnerScheduler:
        return MakingWay(inner, self)

    def left(self, req_id: str, waiting: Sequence[Request]) -> dict[str, tuple]:
        """It has ended, or was aborted. What it cost less than was thought, or more, moves its client's others: their
        new orders."""
        charge = self._live.pop(req_id, None)
        if charge is None:  # a fork of a beam: its search is its first beam's
            return {}
        if not self._live:
            self._forget_all()
            return {}
        req = charge.req
        client, num_output = req.client, req.num_output_tokens
        mean = self._mean_output.get(client, num_output)
        self._mean_output[client] = MEMORY * mean + (1 - MEMORY) * num_output
        owed = _cost(req.num_prompt_tokens - req.num_cached_tokens, num_output) - charge.cost
        self._ends[client] += owed
        self._forget_old()
        return self._move(client, owed, waiting)

    def _move(self, client: str, owed: float, waiting: Sequence[Request]) -> dict[str, tuple]:
        now, moved = self._now(), {}
        for req in waiting:
            if req.client == client and (charge := self._live.get(req.id)) is not None:
                start = max(now, charge.start + owed)
                moved[req.id] = start, *req.order[1:]
                heapq.heappush(self._starts, (start, req.id))
        return moved

    def _forget_all(self) -> None:
        """Nobody is served: everybody is level. What outputs are like stays known."""
        self._starts, self._ends, self._group = [], {}, ("", (0.0, 0))

    def _forget_old(self) -> None:
        if len(self._mean_output) > MAX_CLIENTS:
            del self._mean_output[next(iter(self._mean_output))]
        if len(self._ends) > MAX_CLIENTS:
            now, live = self._now(), {charge.req.client for charge in self._live.values()}
            self._ends = {client: end for client, end in self._ends.items() if end > now or client in live}


class MakingWay(Around):
    """Lets in a request whose client has nothing running."""

    def __init__(self, inner: InnerScheduler, policy: Fair):
        super().__init__(inner)
        self.policy = policy

    def abort(self, req_id: str) -> None:
        self.inner.abort(req_id)
        self._left(req_id)

    def fork(self, forks: Sequence[tuple[str, Request]], ends: Sequence[str]) -> None:
        self.inner.fork(forks, ends)
        for req_id in ends:
            self._left(req_id)

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        deltas = self.inner.update(plan, out)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._left(delta.req_id)
        return deltas

    def check(self) -> None:
        self.inner.check()
        self.policy.check(self.requests)

    def schedule(self, now: float) -> StepPlan:
        to = self.waiting[-1] if self.waiting else None
        if to is not None and self.running and _goes_ahead(to, self.running):
            self.inner.let_in(to, _spare(to, self.running, self.waiting))
        enters = to is not None and self.waiting[-1:] != [to]
        plan = self.inner.schedule(now)
        if enters:
            plan.stats.prefix_queries += to.num_tokens
            plan.stats.prefix_hits += to.num_cached_tokens
        return plan

    def _left(self, req_id: str) -> None:
        if orders := self.policy.left(req_id, self.waiting):
            self.inner.reorder(orders)


def _goes_ahead(to: Request, running: Sequence[Request]) -> bool:
    return to.order < running[-1].order and all(req.client != to.client for req in running)


def _spare(to: Request, running: Sequence[Request], waiting: Sequence[Request]) -> list[Request]:
    """Those behind `to`, the last first: all but the first of each client, and then these, if others of that client
    wait. Where there is one place, or memory for one request, a flood would else keep it until a request of it ends."""
    num_running = Counter(req.client for req in running)
    found, firsts = [], []
    for req in reversed(running):
        if req.order > to.order:
            (found if num_running[req.client] > 1 else firsts).append(req)
            num_running[req.client] -= 1
    if firsts:
        flooding = {req.client for req in waiting}
        found += [req for req in firsts if req.client in flooding]
    return found


def _cost(num_prompt: float, num_output: float) -> float:
    return num_prompt + OUTPUT_WEIGHT * num_output
