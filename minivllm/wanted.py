"""Whether anyone still waits for what a thread does. A thread cannot be stopped, so long work asks between its parts.

    with asking(is_wanted):      who runs it says how that is known
        ...  go_on()  ...        and it raises Unwanted once nobody waits

Outside of such a block `go_on` does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minivllm.errors import MinivllmError


class Unwanted(MinivllmError):
    """Nobody waits for the work any more; it has been given up."""


class _Here(threading.local):
    is_wanted: Callable[[], bool] | None = None


_here = _Here()


@contextmanager
def asking(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """For what this thread does inside."""
    before, _here.is_wanted = _here.is_wanted, is_wanted
    try:
        yield
    finally:
        _here.is_wanted = before


def go_on() -> None:
    """Between two parts of long work. Raises Unwanted."""
    if _here.is_wanted is not None and not _here.is_wanted():
        raise Unwanted("nobody waits for it")


def is_wanted() -> bool:
    """Of what this thread does, for who asks in a way of its own."""
    return _here.is_wanted is None or _here.is_wanted()
