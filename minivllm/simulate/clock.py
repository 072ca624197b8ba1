"""Who says what time it is while a simulated device computes.

On the real clock a step takes as long as it would there, so that what the host does beside it (planning, inputs, HTTP,
text) takes its true time. On a virtual one nobody waits: time is what was waited for.
"""

from __future__ import annotations

import time
from typing import Protocol

SPIN_SECONDS = 2e-4  # a sleep ends late by about a quarter of this; what is left of a step is waited for awake


class Clock(Protocol):
    def __call__(self) -> float:
        """Seconds."""
        ...

    def wait_until(self, moment: float) -> None:
        """Returns at once for one that has passed."""
        ...


class RealClock:
    def __call__(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        if (left := moment - SPIN_SECONDS - self()) > 0:
            time.sleep(left)
        while self() < moment:
            pass


class VirtualClock:
    """Begins at 0. Whoever waits moves it: for one thread."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)
