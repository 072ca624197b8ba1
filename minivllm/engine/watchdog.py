"""Watchdog: a step, or a call, that runs far longer than any should is told of once, while it still runs.

Nothing that runs can be interrupted (it may be inside of a kernel), so first this only says what hangs: to the log, and
through `tell` to whoever answers /health. What has not ended after twice the time ends the core, if that is a process
of its own: it is then replaced, as one that crashed. It looks every few seconds from a thread of its own, shows at each
look that the process lives (pulse.py), and costs a step a microsecond.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from minivllm import logs
from minivllm.plan import StepPlan

MOST_NAMED = 4  # requests in a summary
LEAST_GRACE = 2.0  # seconds between telling and giving up: all requests are lost then, and a new core takes seconds

logger = logging.getLogger("minivllm")


class Body(Protocol):
    """The process that a core lives in."""

    def beat(self) -> None:
        """It lives. Called at each look."""
        ...

    def give_up(self, why: str) -> None:
        """What has been told of does not end. Called in the watchdog's thread, while it runs; may end the process."""
        ...


class SharedBody:
    """A front end lives in it too, so that it is not the core's to end, nor dead while that hangs."""

    def beat(self) -> None: ...
    def give_up(self, why: str) -> None: ...


class Watchdog:
    def __init__(
        self,
        timeout: float,
        plan: Callable[[], StepPlan | None],
        tell: Callable[[float, str], None],
        body: Body | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """timeout: seconds; 0: nothing is watched. plan: the newest one. tell(seconds, what hangs): called in the
        watchdog's thread. body: None for one that is shared."""
        self._timeout, self._plan, self._tell, self._clock = timeout, plan, tell, clock
        self._last = max(2 * timeout, timeout + LEAST_GRACE)  # seconds until it is given up
        self._body = body or SharedBody()
        self._since: float | None = None  # when what runs began
        self._call = ""  # that runs; "": a step does
        self._before: StepPlan | None = None  # the newest plan then
        self._told: float | None = None  # the beginning of what was told of
        self._given_up: float | None = None  # likewise
        self._lock = threading.Lock()  # what is told of something is told before it ends
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="minivllm-watchdog", daemon=True)
        if timeout:
            self._body.beat()
            self._thread.start()

    def begin(self, call: str = "") -> None:
        """call: what it does, if it is no step."""
        self._call, self._before = call, self._plan()
        self._since = self._clock()

    def end(self) -> bool:
        """Whether it was told of."""
        with self._lock:
            since, self._since = self._since, None
            was_told = since is not None and since == self._told
        if was_told and since is not None:
            logger.warning("%s that ran too long has ended after %.1f s", self._name(), self._clock() - since)
        return was_told

    def close(self) -> None:
        """Nothing is told from now on."""
        self._closing.set()
        with self._lock:
            self._since = None

    def _watch(self) -> None:
        while not self._closing.wait(min(5.0, max(0.001, self._timeout / 10))):
            self._body.beat()
            with self._lock:
                if self._since is not None:
                    self._judge(self._since, self._clock() - self._since)

    def _judge(self, since: float, seconds: float) -> None:
        if since != self._told:
            if seconds >= self._timeout:
                self._told = since
                self._report(seconds)
        elif seconds >= self._last and since != self._given_up:
            self._given_up = since
            self._body.give_up(f"{self._name()} has run for {seconds:.1f} s (engine.step_timeout): {self._what()[0]}")

    def _report(self, seconds: float) -> None:
        what, fields = self._what()
        fields = {"seconds": round(seconds, 1), **fields}
        text = f"{self._name()} has run for {seconds:.1f} s (engine.step_timeout) and goes on: {what}"
        logs.event(logger, "step_timeout", text, fields, logging.ERROR)
        self._tell(seconds, what)

    def _name(self) -> str:
        return "a call" if self._call else "a step"

    def _what(self) -> tuple[str, dict[str, Any]]:
        if self._call:
            return self._call, {"call": self._call}
        plan = self._plan()
        return summary(plan) if plan is not None and plan is not self._before else ("it is still being planned", {})


def summary(plan: StepPlan) -> tuple[str, dict[str, Any]]:
    """What a step does, for people and for machines."""
    largest = sorted(plan.num_tokens, key=lambda req_id: -plan.num_tokens[req_id])[:MOST_NAMED]
    named = [f"{req_id}: {plan.num_tokens[req_id]} after {plan.start[req_id]}" for req_id in largest]
    more = len(plan.num_tokens) - len(named)
    moves = len(plan.swap_out) + len(plan.copies) + len(plan.swap_in)
    fields = {
        "step": plan.step,
        "requests": len(plan.num_tokens),
        "tokens": plan.total_tokens,
        "joins": len(plan.joins),
        "block_moves": moves,
        "free_blocks": plan.stats.num_free_blocks,
        "waiting": plan.stats.num_waiting,
        "largest": dict(zip(largest, (plan.num_tokens[req_id] for req_id in largest), strict=True)),
    }
    text = (
        f"step {plan.step}, {len(plan.num_tokens)} requests, {plan.total_tokens} tokens "
        f"({'; '.join(named)}{f'; and {more} more' if more else ''}), {len(plan.joins)} joined, {moves} block moves, "
        f"{plan.stats.num_waiting} waiting, {plan.stats.num_free_blocks} blocks free"
    )
    return text, fields
