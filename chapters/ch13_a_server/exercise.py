"""Chapter 13: load without coordinated omission. Fill in `offer`, then run the tests:

python -m minivllm chapter 13 --exercise
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple


class Answer(NamedTuple):
    latency: float  # seconds from when it was wanted to when its answer was there, or its failure
    late: float  # seconds from when it was wanted to when it was sent
    failed: bool


async def offer(ask: Callable[[int], Awaitable[object]], wanted: Sequence[float]) -> list[Answer]:
    """Send request i, by awaiting ask(i), wanted[i] seconds from now, which rise. -> the answers.

    A request goes out when its time has come, however many others are unanswered. An ask that
    raises an Exception is a failed answer, and no other request's business. The clock is the
    running loop's: asyncio.get_running_loop().time().
    """
    raise NotImplementedError("yours to write")
