"""Who is served first: a policy is a sort key, made once when a request arrives.

Waiting and running requests are both kept in key order. So the head of the queue is served next, the tail of the
running list is preempted first, and a preempted request returns to its own place without any further rule. Keys must
be unique: `sequence` counts arrivals.
"""

from __future__ import annotations

from typing import Protocol

from minivllm.request import Request


class Policy(Protocol):
    def order(self, req: Request, sequence: int) -> tuple:
        """What requests are sorted by, the first to be served lowest. sequence: of its arrival, from 0."""
        ...


class FCFS:
    """First come, first served."""

    def order(self, req: Request, sequence: int) -> tuple:
        return (sequence,)


class Priority:
    """The smaller `priority` first, then the earlier arrival (vLLM's `--scheduling-policy priority`)."""

    def order(self, req: Request, sequence: int) -> tuple:
        return (req.priority, sequence)
