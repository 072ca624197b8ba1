"""How the engine runs now, for whoever looks: its last steps, the requests that live, the state of each KV block.

Nobody looks most of the time, and then this costs a step nothing: a LiveView becomes an observer of the core with the
first `look`, and leaves with the first step that comes LEASE_SECONDS after the last one. Looks are made between two
steps, in the core's thread, so they may read what the scheduler and the KV manager hold.

A look has no token and no text. It has the salts of requests, by which a server knows whose they are, and which it
takes out before it shows it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from minivllm.engine.core import EngineCore
from minivllm.plan import Delta, StepOutput, StepPlan
from minivllm.request import EngineRequest, Request
from minivllm.scheduler.base import SchedulerBase

LEASE_SECONDS = 3.0  # without a look, until steps are no longer watched
MAX_STEPS = 1024  # that are held
MAX_REQUESTS = 64  # that a look lists


class LiveStep(msgspec.Struct):
    """prefill + decode + draft is what the step computed: tokens that were known before, each request's newest one, and
    guesses of what follows it."""

    number: int  # since the watching began
    step: int
    t: float  # its end, in seconds of the engine's clock
    ms: float
    prefill: int
    decode: int
    draft: int
    accepted: int  # of the drafts
    running: int
    waiting: int
    preempted: int
    ttft_ms: list[float]  # of the requests whose first token this step gave: since they arrived
    itl_ms: list[float]  # since the last token of the others that it gave one; equal ones once


class LiveRequest(msgspec.Struct, omit_defaults=True):
    id: str
    running: bool
    prompt: int  # tokens
    output: int
    computed: int  # tokens whose K and V are there
    cached: int  # of them, found in the prefix cache
    preempted: int  # times
    arrived: float  # seconds of the engine's clock
    blocks: list[tuple[int, int]]  # runs of its table, in token order: first block, how many
    salt: str = ""  # for the server alone


class Look(msgspec.Struct):
    now: float  # seconds of the engine's clock
    next: int  # what the next look may call `after`
    budget: int  # tokens a step
    places: int  # requests a step
    block_size: int  # tokens
    running: int
    waiting: int
    blocks: str  # the pool from its first block on, in runs: f free, c cached, u used, s shared; "u12f300"
    steps: list[LiveStep]
    requests: list[LiveRequest]  # in service order, the first MAX_REQUESTS


class LiveView:
    """An engine observer while somebody looks."""

    def __init__(self, core: EngineCore, scheduler: SchedulerBase):
        """scheduler: the one at the bottom, which has the queues."""
        self._core, self._scheduler = core, scheduler
        self._steps: deque[LiveStep] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self._lease = 0.0
        self._known: dict[str, int] = {}  # tokens that a running request brought when it joined
        self._silent: dict[str, float] = {}  # requests without a token yet: arrival
        self._last: dict[str, float] = {}  # the others: when they had their last one

    def look(self, after: int = 0) -> Look:
        """after: the number of the first step that is wanted; one that has not been, as after a restart of the core, is
        read as 0."""
        now = self._core.clock()
        if not self._watches:
            self._begin()
        self._lease = now + LEASE_SECONDS
        self._forget_ended()
        scheduler, kv = self._scheduler, self._scheduler.kv
        first = self._num_steps - len(self._steps)
        skipped = max(0, (after if after <= self._num_steps else 0) - first)
        requests = [*scheduler.running, *reversed(scheduler.waiting)]
        return Look(
            now=now,
            next=self._num_steps,
            budget=scheduler.limits.max_num_batched_tokens,
            places=scheduler.limits.max_num_seqs,
            block_size=kv.usage.block_size,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks=in_runs(kv.block_map()),
            steps=list(islice(self._steps, skipped, None)),
            requests=[self._row(i, req) for i, req in enumerate(requests[:MAX_REQUESTS])],
        )

    # --- an observer of the core

    def on_start(self, config: Mapping[str, Any], info: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...

    def on_add(self, req: EngineRequest, step: int) -> None:
        self._silent[req.id] = req.arrival_time

    def on_abort(self, req_id: str) -> None: ...  # whose traces go with the next look

    def on_step(self, plan: StepPlan, out: StepOutput, deltas: list[Delta], times: Mapping[str, float]) -> None:
        now = self._core.clock()
        if now > self._lease:
            self._end()
            return
        if plan.num_tokens:
            self._steps.append(self._step(plan, deltas, times, now))
            self._num_steps += 1

    # --- inside

    @property
    def _watches(self) -> bool:
        return any(observer is self for observer in self._core.observers)

    def _begin(self) -> None:
        """What was in the batch before anybody looked has no time of its last token, nor of its first one."""
        for req in self._scheduler.requests.values():
            self._known[req.id] = req.num_prompt_tokens
            if not req.num_output_tokens:
                self._silent[req.id] = req.arrival_time
        self._core.observers.append(self)

    def _end(self) -> None:
        # A new list: the core is walking through the old one.
        self._core.observers = [observer for observer in self._core.observers if observer is not self]
        for kept in (self._known, self._silent, self._last, self._steps):
            kept.clear()
        self._num_steps = 0

    def _forget_ended(self) -> None:
        for kept in (self._known, self._silent, self._last):
            for req_id in kept.keys() - self._scheduler.requests.keys():
                del kept[req_id]

    def _step(self, plan: StepPlan, deltas: list[Delta], times: Mapping[str, float], now: float) -> LiveStep:
        self._known.update((join.req_id, len(join.token_ids)) for join in plan.joins)
        ttft, itl = self._latencies(deltas, now)
        prefill = decode = draft = 0
        for req_id, num_tokens in plan.num_tokens.items():
            num_drafts = len(plan.drafts.get(req_id, ()))
            draft += num_drafts
            if plan.start[req_id] < self._known.get(req_id, 0) or num_tokens - num_drafts > 1:
                prefill += num_tokens - num_drafts
            else:
                decode += num_tokens - num_drafts
        stats = plan.stats
        return LiveStep(
            number=self._num_steps,
            step=plan.step,
            t=now,
            ms=round(sum(times.values()), 3),
            prefill=prefill,
            decode=decode,
            draft=draft,
            accepted=stats.num_accepted,
            running=stats.num_running,
            waiting=stats.num_waiting,
            preempted=stats.num_preempted,
            ttft_ms=ttft,
            itl_ms=itl,
        )

    def _latencies(self, deltas: list[Delta], now: float) -> tuple[list[float], list[float]]:
        ttft, itl = [], set()
        for delta in deltas:
            if not delta.token_ids:
                continue
            if (arrival := self._silent.pop(delta.req_id, None)) is not None:
                ttft.append(round(1e3 * (now - arrival), 3))
            elif (before := self._last.get(delta.req_id)) is not None:
                itl.add(round(1e3 * (now - before), 3))
            self._last[delta.req_id] = now
        return ttft, sorted(itl)

    def _row(self, place: int, req: Request) -> LiveRequest:
        return LiveRequest(
            id=req.id,
            running=place < len(self._scheduler.running),
            prompt=req.num_prompt_tokens,
            output=req.num_output_tokens,
            computed=req.num_computed_tokens,
            cached=req.num_cached_tokens,
            preempted=req.num_preemptions,
            arrived=req.arrival_time,
            blocks=runs_of(self._scheduler.kv.blocks_of(req.id)),
            salt=req.cache_salt,
        )


def in_runs(states: bytes) -> str:
    """A block map as text: a letter for the state and a length for each run of equal blocks."""
    return "".join(f"{'fcus'[run[0][0]]}{len(run[0])}" for run in re.finditer(rb"(?s)(.)\1*", states))


def runs_of(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(first, number) of each run of consecutive blocks, in the table's order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
