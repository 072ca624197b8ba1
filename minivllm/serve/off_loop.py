"""Work whose length a client chooses runs beside the event loop, so that nobody else waits until it is done.

What is short stays in the loop: handing it over would take longer. There are two threads, since the interpreter runs
one thread at a time: among more of them the loop would wait for its turn. One client has one of them (fair_threads.py),
so that its long bodies are neither two rivals of the loop nor before everybody else's.

It ends with its owner: a request whose client leaves, or whose time is over, waits no longer for it (connection.py's
`watched`), and from then on it is unwanted, which it finds out between two of its parts (minivllm/wanted.py). A process
that ends does not wait for it either.

One step of such work must be short all the same, for a call that does not give the interpreter's lock back stops the
loop as well: JSON is bounded in what it is made of before it is decoded (json_bounds.py), and encoded in pieces
(json_pieces.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from minivllm import wanted
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

# Of the request that is served: waits with its client. What goes on without its client has none (response_shelf.py).
attending: ContextVar[Callable[[Awaitable[Any]], Awaitable[Any]] | None] = ContextVar("attending", default=None)

serves: ContextVar[str] = ContextVar("serves", default="")  # on whose account; what has none is the server's own


class _Errand(Generic[R]):
    """Work, as long as its owner waits for it."""

    def __init__(self, work: Callable[[], R]):
        self._work, self.is_wanted = work, True

    def __call__(self) -> R:
        with wanted.asking(lambda: self.is_wanted):
            return self._work()


async def by_size(size: int, work: Callable[[], R], client: str) -> R:
    """What `work` returns or raises. Cancelled before a thread has begun with it, it is never done; later, it is given
    up. client: on whose account (keys.Keys.share_of)."""
    if size <= SHORT:
        return work()
    threads = _waiting_threads if size == UNBOUNDED else _threads
    return await done_by(threads, client, size, work)


async def done_by(threads: FairThreads, client: str, size: int, work: Callable[[], R]) -> R:
    """As by_size, by one of these threads."""
    errand = _Errand(work)
    result = asyncio.wrap_future(threads.submit(client, size, errand))
    attend = attending.get()
    try:
        return await (result if attend is None else attend(result))
    finally:
        errand.is_wanted = False


def leave(code: int) -> None:
    """At the end of a server's process: at once, if a thread is still at work. The interpreter's own end would wait for
    it inside of a library, or break it off there."""
    if _threads.is_busy or _waiting_threads.is_busy:
        sys.stdout.flush()
        os._exit(code)


def client_of(state: Mapping[str, Any]) -> str:
    """On whose account a request is served. state: its scope's, which guard.py has written."""
    return state.get("client", "")
