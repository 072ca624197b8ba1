"""What a scheduler is: to the engine core, and to the schedulers that stand around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import Request


class Scheduler(Protocol):
    def add(self, req: Request) -> None:
        """Raises NeverFits for a request that no amount of waiting can serve."""
        ...

    def abort(self, req_id: str) -> None:
        """Forget the request, wherever it is. An unknown id is no error: it may have finished a moment ago."""
        ...

    def schedule(self, now: float) -> StepPlan:
        """The next step. Plans that update() has not seen are in flight, and are counted on."""
        ...

    def update(self, plan: StepPlan, out: StepOutput) -> list[Delta]:
        """Take in what the step produced; plans in their order. The only writer of num_computed_tokens, except for
        preemption's reset."""
        ...

    def check(self) -> None: ...


class Queues(Protocol):
    """What a scheduler has to do: for others to look at, not to change."""

    @property
    def requests(self) -> Mapping[str, Request]: ...
    @property
    def running(self) -> Sequence[Request]:
        """In service order."""
        ...

    @property
    def waiting(self) -> Sequence[Request]:
        """In reverse service order: the next one is at the end."""
        ...


class InnerScheduler(Scheduler, Queues, Protocol):
    """One that others may stand around. They change its queues by these methods alone, before a schedule() or after an
    update(). What hold() and let_in() preempt is counted in the next plan's statistics."""

    def hold(self, req_ids: Iterable[str]) -> None:
        """These are not in the next plan: who runs is preempted, who waits is passed over. Calls add up. After the plan
        they wait in their order, so whoever is to be held for longer is held again before each plan."""
        ...

    def let_in(self, req: Request, at_cost_of: Sequence[Request] = ()) -> None:
        """The head of the queue gets a place and blocks in the next plan and, where a prompt may be cut, its part of
        the budget: it runs then, in its order. As many of `at_cost_of`, who run, are preempted for that as it takes,
        the first of them first. If all are not enough it waits."""
        ...

    def reorder(self, orders: Mapping[str, tuple]) -> None:
        """Other keys for requests that wait: each goes to its new place in the queue."""
        ...

    def fork(self, forks: Sequence[tuple[str, Request]], ends: Sequence[str]) -> None:
        """Go on from running requests as others, (parent's id, child) each; then abort `ends`.

        children: with all their tokens, and an order of their own. One starts from as much of its parent's KV as
        `kv.fork` gives; if that is nothing, or there is no place for it, it waits and is admitted like a new request.
        """
        ...
