"""Work whose length a client chooses runs beside the event loop, so that nobody else waits until it is done.

What is short stays in the loop: handing it over would take longer. There are two threads, since the interpreter runs
one thread at a time: among more of them the loop would wait for its turn. One client has one of them (fair_threads.py),
so that its long bodies are neither two rivals of the loop nor before everybody else's.

One step of such work must be short all the same, for a call that does not give the interpreter's lock back stops the
loop as well: JSON is bounded in what it is made of before it is decoded (json_bounds.py), and encoded in pieces
(json_pieces.py).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from minivllm.serve.fair_threads import FairThreads

R = TypeVar("R")

SHORT = 16_384  # bytes of a body, or as many other things that take no longer each: a few milliseconds
SWITCH_SECONDS = (
    0.0005  # that a thread may keep the interpreter while the loop waits for it: Python's own 0.005 would be
)
# waited for at each token (make attack: others' p99 beside long conversations is half as long)
UNBOUNDED = sys.maxsize  # of work that is as long as a client likes, however little was sent

NUM_THREADS = 2  # of each of these
_threads = FairThreads(NUM_THREADS, "off-loop")
_waiting_threads = FairThreads(NUM_THREADS, "off-loop-unbounded")  # so that nothing else waits behind it


async def by_size(size: int, work: Callable[[], R], client: str) -> R:
    """What `work` returns or raises. Cancelled before a thread has begun with it, it is never done. client: on whose
    account (keys.Keys.share_of)."""
    if size <= SHORT:
        return work()
    threads = _waiting_threads if size == UNBOUNDED else _threads
    return await asyncio.wrap_future(threads.submit(client, size, work))


def client_of(state: Mapping[str, Any]) -> str:
    """On whose account a request is served. state: its scope's, which guard.py has written."""
    return state.get("client", "")
