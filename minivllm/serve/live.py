"""/debug/live: how the engine runs, as server-sent events, until the client leaves. What the page's second half draws.

Each event is a look at the engine (engine/live.py) with the steps since the one before. It shows how many tokens of
whose request are where, and never what they say. Like all of /debug it needs a key where there are keys; and where keys
are isolated, a request is listed to its own key alone: the others are in the sums, which /metrics has too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.live import LEASE_SECONDS, LiveRequest, LiveStep, Look
from minivllm.serve import errors
from minivllm.serve.connection import EventStream
from minivllm.serve.debug import replica_of
from minivllm.serve.generation import new_id

EVERY_SECONDS = 0.25
SILENT_SECONDS = 10.0  # without news, until a comment says that the connection lives
MAX_VIEWERS = 8  # each has the core look for itself

assert EVERY_SECONDS < LEASE_SECONDS


class ShownRequest(msgspec.Struct):
    """A LiveRequest without what is its owner's secret."""

    id: str
    running: bool
    prompt: int
    output: int
    computed: int
    cached: int
    preempted: int
    arrived: float
    blocks: list[tuple[int, int]]

    @classmethod
    def of(cls, row: LiveRequest) -> ShownRequest:
        return cls(**{name: getattr(row, name) for name in cls.__struct_fields__})


class LiveEvent(msgspec.Struct):
    """See engine/live.py: Look."""

    now: float
    next: int
    budget: int
    places: int
    block_size: int
    running: int
    waiting: int
    blocks: str
    steps: list[LiveStep]
    requests: list[ShownRequest]

    @classmethod
    def of(cls, look: Look, tenant: str) -> LiveEvent:
        """tenant: the beginning of the salts of those requests that may be listed."""
        rows = [ShownRequest.of(row) for row in look.requests if row.salt.startswith(tenant)]
        names = [name for name in cls.__struct_fields__ if name != "requests"]
        return cls(requests=rows, **{name: getattr(look, name) for name in names})


async def live(request: Request) -> ASGIApp:
    state = request.app.state
    tenant = getattr(request.state, "tenant", "")
    return EventStream(events(state.service.engine, state.viewers, tenant, replica_of(request)), new_id("live"))


async def events(engine: AsyncLLM, viewers: set[object], tenant: str, replica: int = 0) -> AsyncIterator[bytes]:
    """viewers: everybody who looks, each while they do. Raises ApiError 429 for one too many."""
    if len(viewers) >= MAX_VIEWERS:
        raise errors.too_many_viewers(MAX_VIEWERS)
    me = object()
    viewers.add(me)
    try:
        shown, after, silent = None, 0, 0.0
        while True:
            look = await engine.look(after, replica)
            event = LiveEvent.of(look, tenant)
            after, now, event.now = look.next, event.now, 0.0
            if event != shown:
                shown, silent = event, 0.0
                yield b"data: %b\n\n" % msgspec.json.encode(msgspec.structs.replace(event, now=now))
            elif silent >= SILENT_SECONDS:
                silent = 0.0
                yield b": nothing new\n\n"
            await asyncio.sleep(EVERY_SECONDS)
            silent += EVERY_SECONDS
    finally:
        viewers.discard(me)
