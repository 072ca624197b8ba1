"""One row of the table of all that can be asked (app.py): what it takes and gives, who may ask, and what it may cost.

tests/serve/test_endpoints.py walks the table and holds each row to what it says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Literal, NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp

Handler = Callable[[Request], Awaitable[ASGIApp]]


class Cost(NamedTuple):
    """What the dearest request may take. calls: of Python functions in the event loop, all else is done in threads
    (off_loop.py) or in the core. body: bytes that it may send; None: --max-body-bytes, counted as they come
    (memory.py). answer: bytes that are there at once; None: its price is known, and bounded, before it is made
    (price.py, shares.py). counted_by: `connections` alone, the client's limit of `requests`, or of `sequences` and
    tokens too."""

    calls: int
    body: int | None
    answer: int | None
    counted_by: Literal["connections", "requests", "sequences"]


LOOK = Cost(6_000, 0, 2**20, "connections")  # what is there already, and 30 kB of metrics
PING = LOOK._replace(counted_by="requests")  # a POST
KEPT = Cost(6_000, 0, 2**20, "requests")  # parts of a store, read as the client takes them
WORK = Cost(100_000, None, 2**24, "requests")  # of a body: as long as that, at most
RUN = Cost(200_000, None, None, "sequences")  # of a thousand sequences, between whose turns others have theirs


class Endpoint(NamedTuple):
    method: str
    path: str
    handler: Callable[[Request], Awaitable]
    what: str
    answers: Any = None  # a type, or several of which it is one; None: plain text or free JSON
    takes: type | None = None
    streams: type | None = None  # the type of each event, when the request asks for a stream
    tasks: tuple[str, ...] = ()  # of the engine (model.task) that it needs; (): any
    stream_type: str = "text/event-stream"
    asks: type | None = None  # the query's parameters, as a Struct
    role: str = "use"  # of the key that it needs (serve/keys.py); anyone: none, where there are keys
    takes_type: str = "application/json"
    cost: Cost | None = None  # None: nobody has thought of it, and a test fails


def counted(endpoint: Endpoint, handler: Handler) -> Handler:
    """The handler; one that only reads, and counts among its client's requests all the same, raises ApiError 429 where
    these are too many. Others are counted before their body is read (guard.py)."""
    if endpoint.method != "GET" or endpoint.cost is None or endpoint.cost.counted_by == "connections":
        return handler

    @wraps(handler)
    async def counting(request: Request) -> ASGIApp:
        request.state.counts = True
        request.app.state.limits.count_request(request.state.client)
        return await handler(request)

    return counting
