"""The solution of chapter 13's exercise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple


class Answer(NamedTuple):
    latency: float  # seconds from when it was wanted to when its answer was there, or its failure
    late: float  # seconds from when it was wanted to when it was sent
    failed: bool


async def offer(ask: Callable[[int], Awaitable[object]], wanted: Sequence[float]) -> list[Answer]:
    """Send request i, by awaiting ask(i), wanted[i] seconds from now, which rise. -> the answers."""
    now = asyncio.get_running_loop().time
    start = now()

    async def one(i: int, due: float) -> Answer:
        late, failed = now() - due, False
        try:
            await ask(i)
        except Exception:
            failed = True
        return Answer(now() - due, late, failed)

    tasks = []
    for i, seconds in enumerate(wanted):
        await asyncio.sleep(max(0.0, start + seconds - now()))
        tasks.append(asyncio.create_task(one(i, start + seconds)))
    return list(await asyncio.gather(*tasks))
