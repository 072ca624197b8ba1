"""An engine's steps in this process, as a test wants them: what it must see before an answer is over, it sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eventually import PATIENCE


@contextmanager
def before_each_step(engine, act: Callable) -> Iterator[None]:
    """act(plan) before each step that runs something, of an engine in this process."""
    worker = engine._core.executor.worker
    execute = worker.execute

    def acting(plan):
        if plan.num_tokens:
            act(plan)
        return execute(plan)

    worker.execute = acting
    try:
        yield
    finally:
        worker.execute = execute


def slow_down(plan) -> None:
    """Of each step, for before_each_step: else a tiny model's longest answer can be over before one has looked at it.
    It sleeps, and who looks does not wait for the core."""
    time.sleep(0.01)


@contextmanager
def held_after(engine, num_steps: int) -> Iterator[threading.Event]:
    """It runs so many steps, and no more until the event is set, or the block has ended."""
    go_on, left = threading.Event(), [num_steps]

    def hold(plan):
        left[0] -= 1
        assert left[0] >= 0 or go_on.wait(PATIENCE)

    try:
        with before_each_step(engine, hold):
            yield go_on
    finally:
        go_on.set()
