"""/debug/live: how the engine runs, as server-sent events, until the client leaves. What the page's second half draws.

Each event is a look at one replica of the engine (engine/live.py) with the steps since the one before, and says which
server tells it. All replicas are looked at, or ?replica=1 alone; each by itself, so that one whose step hangs holds up
no other's news. It shows how many tokens of whose request are where, and never what they say. Like all of /debug it
needs a key where there are keys; and where keys are isolated, a request is listed to its own key alone: the others are
in the sums, which /metrics has too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.live import LEASE_SECONDS, Look
from minivllm.errors import ReplicaDead
from minivllm.serve import errors
from minivllm.serve.connection import EventStream
from minivllm.serve.debug import replica_of
from minivllm.serve.generation import new_id

EVERY_SECONDS = 0.25
SILENT_SECONDS = 10.0  # without news, until a comment says that the connection lives
MAX_VIEWERS = 8  # each has the core look for itself

assert EVERY_SECONDS < LEASE_SECONDS


class Place(NamedTuple):
    """Which of the servers of one engine this is (--api-servers)."""

    server: int = 0
    servers: int = 1


ALONE = Place()


class LiveEvent(msgspec.Struct):
    server: int
    servers: int
    replica: int
    replicas: int
    look: Look | None  # null: this replica does not run


async def live(request: Request) -> ASGIApp:
    state = request.app.state
    engine, number = state.service.engine, state.service.engine.config.engine.replicas
    asked = [replica_of(request)] if "replica" in request.query_params else range(number)
    tenant = getattr(request.state, "tenant", "")
    return EventStream(events(engine, state.viewers, tenant, asked, state.place), new_id("live"))


async def events(
    engine: AsyncLLM, viewers: set[object], tenant: str, replicas: Iterable[int] = (0,), place: Place = ALONE
) -> AsyncIterator[bytes]:
    """viewers: everybody who looks, each while they do. tenant: whose requests they may see (keys.Keys.tenant); "":
    everybody's. Raises ApiError 429 for one viewer too many, EngineDead once no replica runs."""
    if len(viewers) >= MAX_VIEWERS:
        raise errors.too_many_viewers(MAX_VIEWERS)
    me = object()
    viewers.add(me)
    news: asyncio.Queue[bytes | Exception] = asyncio.Queue(1)  # nobody looks faster than the client reads
    watching = [asyncio.create_task(_watch(engine, tenant, replica, place, news)) for replica in replicas]
    try:
        while True:
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    event = await news.get()
            except TimeoutError:
                event = b": nothing new\n\n"
            if isinstance(event, Exception):
                raise event
            yield event
    finally:
        viewers.discard(me)
        for task in watching:
            task.cancel()


async def _watch(
    engine: AsyncLLM, tenant: str, replica: int, place: Place, news: asyncio.Queue[bytes | Exception]
) -> None:
    """Put what is new of a replica, until cancelled; an error at last."""
    number, after = engine.config.engine.replicas, 0
    shown: object = "nothing yet"
    while True:
        try:
            look: Look | None = for_eyes_of(tenant, await engine.look(after, replica))
        except ReplicaDead:  # the others go on, and this one may come back
            look = None
        except Exception as error:
            await news.put(error)
            return
        data = msgspec.json.encode(LiveEvent(*place, replica, number, look))
        after = 0 if look is None else look.next
        if look is not None:
            look.now = 0.0  # that time has passed is no news
        if look != shown:
            shown = look
            await news.put(b"data: %b\n\n" % data)
        await asyncio.sleep(EVERY_SECONDS)


def for_eyes_of(tenant: str, look: Look) -> Look:
    """Without the requests of others, and without salts."""
    shown = [msgspec.structs.replace(row, salt="") for row in look.requests if row.salt.startswith(tenant)]
    return msgspec.structs.replace(look, requests=shown)
