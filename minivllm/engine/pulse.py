"""Pulse: how a core's process shows its parent that it lives, whatever else it does: the time of a file that changes.

The watchdog's thread sets it (watchdog.py). So it stands still while the process is stopped, or while something there
holds Python's lock, and goes on beside a step that takes long, of which the watchdog tells. A step pays nothing for it,
and a disk that is full has no part in it: the file stays empty, and only its time, a number that counts up, is written.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

FILE = "pulse"
PART = 0.6  # of engine.step_timeout: so long a silence is one. The rest is for the last beat's age and the next look
LEAST_SECONDS = 1.0  # a busy machine keeps a thread waiting
TIMES_AS_LONG = 3  # as the first one's, a later one's building may take, and engine.step_timeout more


class Pulse:
    """In the core."""

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._path.touch(0o600)
        self._num_beats = 0

    def beat(self) -> None:
        self._num_beats += 1
        os.utime(self._path, (self._num_beats, self._num_beats))


class Listener:
    """In the parent, for one process, which is not there yet. A core that is being built has no pulse. The first is
    given whatever time it takes, since nobody knows; one after it, what that says."""

    def __init__(
        self,
        folder: Path,
        step_timeout: float,
        built_in: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """step_timeout: seconds; 0: no silence is too long. built_in: seconds that building it took before."""
        self._path, self._clock = folder / FILE, clock
        self._path.unlink(missing_ok=True)  # that of a process before it
        self._limit = max(LEAST_SECONDS, PART * step_timeout) if step_timeout else math.inf
        self._building = math.inf
        if step_timeout and built_in is not None:
            self._building = TIMES_AS_LONG * built_in + step_timeout
        self._heard: float | None = None
        self._looked = clock()
        self.silence = 0.0  # seconds

    @property
    def is_lost(self) -> bool:
        return self.silence >= (self._building if self._heard is None else self._limit)

    @property
    def what(self) -> str:
        """Of a silence, for a log."""
        what = "not been built" if self._heard is None else "given no sign of life"
        return f"{what} for {self.silence:.1f} s (engine.step_timeout)"

    def look(self) -> None:
        """To be called more often than the core's watchdog beats. A long pause between two looks counts for little:
        whatever kept this process from looking may have kept the other one from its beats."""
        now = self._clock()
        heard, passed, self._looked = self._read(), now - self._looked, now
        if heard != self._heard:
            self._heard, self.silence = heard, 0.0
        else:
            self.silence += min(passed, self._limit / 4)

    def _read(self) -> float | None:
        try:
            return self._path.stat().st_mtime
        except FileNotFoundError:
            return None
