"""Policies that let requests wait until a prefill is worth it: first come, first served, but in groups.

Where a prefill is a step of its own, all that decode stand still in it. So other engines do not look at the queue
before each step: Gathering passes over all who wait until its policy says that it is time. When nobody runs, it is
always time, so that nobody waits for ever.

Meant for scheduler.kind=phased. A policy here says when; who fits is the admission's question.
"""

from __future__ import annotations

from typing import Protocol

from minivllm.plan import StepPlan
from minivllm.scheduler.around import Around
from minivllm.scheduler.policy import FCFS
from minivllm.scheduler.protocol import InnerScheduler


class SaysWhen(Protocol):
    def is_time(self, num_waiting: int, num_running: int, num_decodes: int) -> bool:
        """May some of those who wait enter now? num_running is at least 1. num_decodes: steps since somebody did."""
        ...


class ServedRatio(FCFS):
    """TGI's: enough wait, in proportion to those that run, or none has entered for 20 steps; one decode at least lies
    between two prefills. (huggingface/text-generation-inference 2.x, `backends/v3/src/backend.rs`, `batching_task`:
    waiting_served_ratio 0.3, max_waiting_tokens 20.)

    Not the original: TGI also asks that so many fit at once, or lets none enter.
    """

    RATIO = 0.3
    MOST_DECODES = 19  # TGI begins to count at 1, in the prefill

    def around(self, inner: InnerScheduler) -> InnerScheduler:
        return Gathering(inner, self)

    def is_time(self, num_waiting: int, num_running: int, num_decodes: int) -> bool:
        if num_decodes >= self.MOST_DECODES:
            return True
        return num_decodes > 0 and num_waiting >= int(self.RATIO * num_running)


class HalfFull(FCFS):
    """LMDeploy's: four wait, or the batch is less than half full. (InternLM/lmdeploy 0.9, PyTorch engine,
    `pytorch/engine/engine.py`, `do_prefill_default`.)"""

    MANY = 4

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs

    def around(self, inner: InnerScheduler) -> InnerScheduler:
        return Gathering(inner, self)

    def is_time(self, num_waiting: int, num_running: int, num_decodes: int) -> bool:
        return num_waiting >= self.MANY or num_running < 0.5 * self.max_num_seqs


class Gathering(Around):
    """Holds the queue until it is time."""

    def __init__(self, inner: InnerScheduler, policy: SaysWhen):
        super().__init__(inner)
        self.policy = policy
        self._num_decodes = 0  # steps since somebody entered

    def schedule(self, now: float) -> StepPlan:
        if self.waiting and self.running and not self._is_time():
            self.inner.hold([req.id for req in self.waiting])
        plan = self.inner.schedule(now)
        self._num_decodes = 0 if plan.joins else self._num_decodes + 1
        return plan

    def _is_time(self) -> bool:
        return self.policy.is_time(len(self.waiting), len(self.running), self._num_decodes)
