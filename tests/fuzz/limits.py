"""What one input may cost, counted and not timed: calls of functions, and the most memory that the process held."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

CALLS, CALLS_A_BYTE = 400_000, 1_000  # far over what any parser needs: only what grows faster than its input gets there
MEMORY = 512 << 20  # bytes, of all inputs of a run together


class TooMuch(BaseException):
    """No parser may take it for an error of its own."""


class Memory:
    """What the process holds at most, from now on."""

    def __init__(self) -> None:
        self.most = _peak() + MEMORY

    def check(self) -> None:
        if (peak := _peak()) > self.most:
            self.most = peak + MEMORY
            raise TooMuch(f"over {MEMORY >> 20} MiB")


def bounded(read: Callable[[bytes], Any], data: bytes) -> None:
    """Raises TooMuch at the call that is one too many."""
    left = CALLS + CALLS_A_BYTE * len(data)

    def count(frame: Any, event: str, what: Any) -> None:
        nonlocal left
        left -= event in ("call", "c_call")
        if left < 0:
            sys.setprofile(None)
            raise TooMuch(f"over {CALLS + CALLS_A_BYTE * len(data):,} calls for {len(data):,} bytes")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        read(data)
    finally:
        sys.setprofile(before)


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
