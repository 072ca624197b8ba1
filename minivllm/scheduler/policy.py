"""Who is served first: a policy is a sort key, made when a request arrives.

Waiting and running requests are both kept in key order. So the head of the queue is served next, the tail of the
running list is preempted first, and a preempted request returns to its own place without any further rule. Keys must
be unique: `sequence` counts arrivals. A policy whose keys are not all of it stands around the scheduler (`around`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from minivllm.request import Request

if TYPE_CHECKING:
    from minivllm.scheduler.protocol import InnerScheduler


class Policy(Protocol):
    spares_running: ClassVar[bool]  # a running prompt leaves a token of the budget to each request behind it

    def order(self, req: Request, sequence: int) -> tuple:
        """What requests are sorted by, the first to be served lowest. sequence: of its arrival, from 0."""
        ...

    def around(self, inner: InnerScheduler) -> InnerScheduler:
        """What is asked in the place of `inner`."""
        ...


class ByKey:
    """Policies that are their key, and no more."""

    spares_running: ClassVar[bool] = False

    def around(self, inner: InnerScheduler) -> InnerScheduler:
        return inner


class FCFS(ByKey):
    """First come, first served."""

    def order(self, req: Request, sequence: int) -> tuple:
        return (sequence,)


class DecodesFirst(FCFS):
    """Whoever decodes gets its token first; prompts share what is left of the step's budget, those that were begun
    before new ones (Agrawal et al., "Sarathi-Serve", OSDI 2024, algorithm 3: stall-free batching)."""

    spares_running: ClassVar[bool] = True


class Priority(ByKey):
    """The smaller `priority` first, then the earlier arrival (vLLM's `--scheduling-policy priority`)."""

    def order(self, req: Request, sequence: int) -> tuple:
        return (req.priority, sequence)
