"""The HTTP side of a request's life: its body is read up to a limit, and its work ends when the client leaves.

Invariant: the work of a response never outlives its connection. Each response runs under `watched`, which waits for the
work, the client's disconnect and the server's closing at once, and cancels the work on the latter two.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from minivllm.serve import errors
from minivllm.serve.patience import SLOWEST

R = TypeVar("R")
LONGEST_LENGTH = 18  # digits: a longer number is no size of anything, and slow to read
UNTOLD = ("", "application/x-www-form-urlencoded", "text/plain")


async def read_body(request: Request) -> bytes:
    """Raises ApiError 415 for what is not called JSON, 413 for too much of it, 408 for what comes too slowly."""
    _check_media_type(request.headers)
    limit, patience = request.app.state.max_body_bytes, request.app.state.client_timeout
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > LONGEST_LENGTH or int(length) > limit):
        raise errors.too_large(limit)
    data = bytearray()
    begin = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(patience) as deadline:
            async for chunk in request.stream():
                data += chunk
                if len(data) > limit:
                    raise errors.too_large(limit)
                deadline.reschedule(begin + patience + len(data) / SLOWEST)
    except TimeoutError:
        raise errors.too_slow(patience) from None
    return bytes(data)


def _check_media_type(headers: Headers) -> None:
    """JSON, or what a tool that was told nothing calls it (curl -d: a form). A page in a browser may send only such
    types to a server that has not asked for it (CORS), so from there it must be JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not is_json and (kind not in UNTOLD or (kind and "origin" in headers)):
        raise errors.ApiError(
            415, f"the body must be application/json, not {kind[:100]}", code="unsupported_media_type"
        )
    if (coding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise errors.ApiError(415, f"content-encoding {coding[:100]} is not supported", code="unsupported_media_type")


async def watched(work: Coroutine[Any, Any, R], receive: Receive, closing: asyncio.Future) -> R:
    """The result of `work`. Raises ApiError 499 or 503, once the work has ended, if it had to be cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone, closing}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise errors.client_left() if gone.done() else errors.closing()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class JSONAnswer:
    """An ASGI response: one JSON document, once `work` has made it."""

    def __init__(self, work: Coroutine[Any, Any, msgspec.Struct], request_id: str):
        self.work, self.request_id = work, request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        result = await watched(self.work, receive, scope["app"].state.closing)
        data = msgspec.json.encode(result)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send(_start(headers, self.request_id))
        await send({"type": "http.response.body", "body": data})


class EventStream:
    """An ASGI response: server-sent events. An error before the first event is a plain error response; a later one is
    an event of its own, as OpenAI's clients expect. `on_error` makes it."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        request_id: str,
        on_error: Callable[[errors.ApiError], bytes] = errors.event,
    ):
        self.events, self.request_id, self.on_error, self.started = events, request_id, on_error, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await watched(self._pump(send), receive, scope["app"].state.closing)
        except Exception as error:
            if not self.started:
                raise
            told = errors.as_api_error(error)
            if told.status == 500 and told is not error:
                errors.logger.exception("request %s failed while streaming", self.request_id)
            await send(_more(self.on_error(told)))
        await send({"type": "http.response.body", "body": b""})

    async def _pump(self, send: Send) -> None:
        async with aclosing(self.events) as events:
            async for event in events:
                if not self.started:
                    self.started = True
                    await send(_start(SSE_HEADERS, self.request_id))
                await send(_more(event))


SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


def _start(headers: list[tuple[bytes, bytes]], request_id: str) -> dict[str, Any]:
    headers = [*headers, (b"x-request-id", request_id.encode())]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _more(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
