"""How long a request may take in all, from its header to the end of its answer: what it says itself in the header
x-server-timeout, in seconds (a system parameter of Google's APIs), and no longer than the server's --request-timeout.
Calls over gRPC bring a deadline of their own.

A request that is not done by then ends, whether it waits or runs, and gives its place back. It is an error and no
shorter answer, since a client would take what it gets for the whole: a 504, as gRPC's DEADLINE_EXCEEDED is over HTTP
(SGLang, which has such limits for the whole server alone, ends them as errors too), or the error event of a stream.
OpenAI's and Anthropic's clients are told not to try again: they would ask for the same work once more.

What is not interrupted is the front end's own work, which has other limits: reading the body (serve/patience.py) and
making a prompt of it. A deadline that passes meanwhile ends the request right after it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from minivllm.serve import errors

HEADER = "x-server-timeout"


class Deadline:
    def __init__(self, seconds: float, why: str, deadlines: Deadlines):
        self._seconds, self._why, self._deadlines = seconds, why, deadlines
        self._at = deadlines.clock() + seconds

    async def passes(self) -> None:
        await self._deadlines.sleep(max(0.0, self._at - self._deadlines.clock()))

    def error(self) -> errors.ApiError:
        return errors.too_late(self._seconds, self._why)


class Deadlines:
    def __init__(
        self,
        most: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        """most: seconds that the server gives a request; None: as many as it takes."""
        self.most, self.clock, self.sleep = most, clock, sleep

    def of(self, asked: str | None = None) -> Deadline | None:
        """Of a request that begins now. asked: its header. None: it has none. Raises ApiError 400."""
        seconds = None if asked is None else _seconds(asked)
        if seconds is not None and (self.most is None or seconds <= self.most):
            return Deadline(seconds, HEADER, self)
        return None if self.most is None else Deadline(self.most, "--request-timeout", self)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise errors.ApiError(400, f"{HEADER} is a number of seconds above 0, got {text[:40]}", param=HEADER)
    return seconds
