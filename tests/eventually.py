"""What a test waits for, on a machine that somebody else may have taken.

A test says what happens and never how soon: PATIENCE is only how long it waits for what does not happen at all. What a
machine's speed would excuse is counted instead; what can only be timed is looked at again, and is so at least once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds; less than pytest's own limit for a test
ATTEMPTS = 5  # at what a neighbour can spoil


def eventually(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Returns once it is so. Raises AssertionError if it is not so all that time."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(pause)
        pause = min(2 * pause, 0.05)  # looking may cost what it waits for a core


def once_of(attempts: int, is_so: Callable[[], bool]) -> bool:
    """Whether it is so in one of these attempts: for what is false every time if it is false."""
    return any(is_so() for _ in range(attempts))
