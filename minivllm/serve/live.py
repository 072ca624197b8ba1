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
from minivllm.engine.live import LEASE_SECONDS, Look
from minivllm.serve import errors
from minivllm.serve.connection import EventStream
from minivllm.serve.debug import replica_of
from minivllm.serve.generation import new_id

EVERY_SECONDS = 0.25
SILENT_SECONDS = 10.0  # without news, until a comment says that the connection lives
MAX_VIEWERS = 8  # each has the core look for itself

assert EVERY_SECONDS < LEASE_SECONDS


async def live(request: Request) -> ASGIApp:
    state = request.app.state
    tenant = getattr(request.state, "tenant", "")
    return EventStream(events(state.service.engine, state.viewers, tenant, replica_of(request)), new_id("live"))


async def events(engine: AsyncLLM, viewers: set[object], tenant: str, replica: int = 0) -> AsyncIterator[bytes]:
    """viewers: everybody who looks, each while they do. tenant: whose requests they may see (guard.Keys.tenant); "":
    everybody's. Raises ApiError 429 for one viewer too many."""
    if len(viewers) >= MAX_VIEWERS:
        raise errors.too_many_viewers(MAX_VIEWERS)
    me = object()
    viewers.add(me)
    try:
        shown, after, silent = None, 0, 0.0
        while True:
            look = for_eyes_of(tenant, await engine.look(after, replica))
            data, after = msgspec.json.encode(look), look.next
            look.now = 0.0  # that time has passed is no news
            if look != shown:
                shown, silent = look, 0.0
                yield b"data: %b\n\n" % data
            elif silent >= SILENT_SECONDS:
                silent = 0.0
                yield b": nothing new\n\n"
            await asyncio.sleep(EVERY_SECONDS)
            silent += EVERY_SECONDS
    finally:
        viewers.discard(me)


def for_eyes_of(tenant: str, look: Look) -> Look:
    """Without the requests of others, and without salts."""
    shown = [msgspec.structs.replace(row, salt="") for row in look.requests if row.salt.startswith(tenant)]
    return msgspec.structs.replace(look, requests=shown)
