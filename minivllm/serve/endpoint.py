"""One row of the table of all that can be asked (app.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from starlette.requests import Request


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
    role: str = "use"  # of the key that it needs (serve/keys.py)
    takes_type: str = "application/json"
