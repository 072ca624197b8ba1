"""Watchdog: a step that runs far longer than any should is told of once, while it still runs.

A step cannot be interrupted (it may be inside of a kernel), so this only says what hangs: to the log, and through
`tell` to whoever answers /health. It looks every few seconds from a thread of its own, and costs a step a microsecond.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from minivllm import logs
from minivllm.plan import StepPlan

MOST_NAMED = 4  # requests in a summary

logger = logging.getLogger("minivllm")


class Watchdog:
    def __init__(
        self,
        timeout: float,
        plan: Callable[[], StepPlan | None],
        tell: Callable[[float, str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """timeout: seconds; 0: nothing is watched. plan: the newest one. tell(seconds, what the step does): called in
        the watchdog's thread."""
        self._timeout, self._plan, self._tell, self._clock = timeout, plan, tell, clock
        self._since: float | None = None  # when the step that runs began
        self._before: StepPlan | None = None  # the newest plan then
        self._told: float | None = None  # the beginning of the step that was told of
        self._lock = threading.Lock()  # what is told of a step is told before it ends
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="minivllm-watchdog", daemon=True)
        if timeout:
            self._thread.start()

    def begin(self) -> None:
        self._before = self._plan()
        self._since = self._clock()

    def end(self) -> None:
        with self._lock:
            since, self._since = self._since, None
            was_told = since == self._told
        if was_told:
            logger.warning("the step that ran too long has ended after %.1f s", self._clock() - since)

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.wait(min(5.0, max(0.001, self._timeout / 10))):
            with self._lock:
                since = self._since
                if since is not None and since != self._told and self._clock() - since >= self._timeout:
                    self._told = since
                    self._report(self._clock() - since)

    def _report(self, seconds: float) -> None:
        plan = self._plan()
        what, fields = summary(plan) if plan is not self._before else ("it is still being planned", {})
        fields = {"seconds": round(seconds, 1), **fields}
        text = f"a step has run for {seconds:.1f} s (engine.step_timeout) and goes on: {what}"
        logs.event(logger, "step_timeout", text, fields, logging.ERROR)
        self._tell(seconds, what)


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
