"""The HTTP side of a request's life: its body is read up to a limit, and its work ends when the client leaves.

Invariant: the work of a response never outlives its connection. Each response runs under `watched`, which waits for the
work, the client's disconnect, the server's closing and the request's deadline at once, and cancels the work on all but
the first. Only what was asked for in the background outlives it (response_shelf.py), and never the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minivllm.serve import errors, json_pieces
from minivllm.serve.deadline import Deadline
from minivllm.serve.off_loop import SHORT, by_size, client_of
from minivllm.serve.patience import SLOWEST

R = TypeVar("R")
LONGEST_LENGTH = 18  # digits: a longer number is no size of anything, and slow to read
PART = 64 * 2**10  # bytes that are sent at once
END = {"type": "http.response.body", "body": b""}
UNTOLD = ("", "application/x-www-form-urlencoded")
SAY_JSON = "curl says so with -H 'content-type: application/json'"


def reply(data: object, status: int = 200) -> Response:
    """JSON that is there already; of what takes time, JSONAnswer."""
    return Response(msgspec.json.encode(data), status, media_type="application/json")


async def read_body(request: Request) -> bytes:
    """Raises ApiError 415 for what is not called JSON, and as read_all does."""
    _check_media_type(request.headers)
    return await read_all(request)


async def read_all(request: Request) -> bytes:
    """A body of whatever type. Raises ApiError 415 if it is compressed, 413 for too much of it, 408 for what comes too
    slowly."""
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise errors.ApiError(415, f"content-encoding {coding[:100]} is not supported", code="unsupported_media_type")
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
                request.state.memory.body(len(data))
                deadline.reschedule(begin + patience + len(data) / SLOWEST)
    except TimeoutError:
        raise errors.too_slow(patience) from None
    return bytes(data)


def _check_media_type(headers: Headers) -> None:
    """JSON, or what a tool that was told nothing calls it (curl -d: a form, as in Ollama's documentation). A page in a
    browser may send a form to a server that has not asked for it (CORS), so from there it must be JSON; and text/plain
    may come from a page that names no origin."""
    kind = media_type(headers)
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not is_json and (kind not in UNTOLD or "origin" in headers):
        raise errors.ApiError(
            415, f"the body must be application/json, not {kind[:100]}; {SAY_JSON}", code="unsupported_media_type"
        )


def media_type(headers: Headers) -> str:
    """What the body is called."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def hint_at_type(headers: Headers) -> str:
    """For who sent what is not JSON, and did not call it so."""
    kind = media_type(headers)
    return f". It is called {kind}, and should be application/json: {SAY_JSON}" if kind in UNTOLD[1:] else ""


async def watched(work: Awaitable[R], receive: Receive, scope: Scope) -> R:
    """The result of `work`. Raises ApiError 499, 503 or 504, once the work has ended, if it had to be cancelled."""
    closing: asyncio.Future = scope["app"].state.closing
    deadline: Deadline | None = scope["state"].get("deadline")
    task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(_disconnected(receive))]
    if deadline is not None:
        others.append(asyncio.ensure_future(deadline.passes()))
    try:
        await asyncio.wait({task, closing, *others}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if others[0].done():
            raise errors.client_left()
        raise errors.closing() if closing.done() else deadline.error()
    finally:
        for other in (task, *others):
            other.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def encoded(data: object, client: str) -> list[bytes]:
    """As JSON, in pieces if that is long."""
    if not json_pieces.is_long(data):
        return [msgspec.json.encode(data)]
    return await by_size(SHORT + 1, lambda: json_pieces.encode(data), client)


class JSONAnswer:
    """An ASGI response: one JSON document, once `work` has made it."""

    def __init__(self, work: Coroutine[Any, Any, msgspec.Struct], request_id: str):
        self.work, self.request_id = work, request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        result = await watched(self.work, receive, scope)
        *pieces, last = await encoded(result, client_of(scope.get("state", {})))
        length = sum(map(len, pieces)) + len(last)
        scope["state"]["memory"].answer(length)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
        await send(_start(headers, self.request_id))
        for piece in pieces:
            await send_in_parts(piece, send)
        await send_in_parts(last, send)
        await send(END)


class Bytes(NamedTuple):
    data: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    media_type: bytes = b"application/octet-stream"


class BytesAnswer:
    """An ASGI response: bytes, once `work` has made them."""

    def __init__(self, work: Coroutine[Any, Any, Bytes], request_id: str):
        self.work, self.request_id = work, request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        data, headers, media_type = await watched(self.work, receive, scope)
        length = (b"content-length", str(len(data)).encode())
        await send(_start([(b"content-type", media_type), length, *headers], self.request_id))
        scope["state"]["memory"].answer(len(data))
        await send_in_parts(data, send)
        await send(END)


class JSONParts:
    """An ASGI response: JSON that is there, read in parts as the client takes them."""

    def __init__(self, length: int, parts: AsyncIterator[bytes]):
        self.length, self.parts = length, parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self.parts) as parts:
            async for part in parts:
                if not started:
                    started = True
                    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % self.length)]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send_in_parts(part, send)
        await send(END)


class EventStream:
    """An ASGI response: server-sent events. An error before the first event is a plain error response; a later one is
    an event of its own, as OpenAI's clients expect. `on_error` makes it."""

    media_type = b"text/event-stream; charset=utf-8"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        request_id: str,
        on_error: Callable[[errors.ApiError], bytes] = errors.event,
    ):
        self.events, self.request_id, self.on_error, self.started = events, request_id, on_error, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await watched(self._pump(send), receive, scope)
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
                    await send(_start([(b"content-type", self.media_type), *STREAM_HEADERS], self.request_id))
                await send(_more(event))


class LineStream(EventStream):
    """JSON objects, one a line: Ollama's streams."""

    media_type = b"application/x-ndjson"


STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


def _start(headers: list[tuple[bytes, bytes]], request_id: str) -> dict[str, Any]:
    headers = [*headers, (b"x-request-id", request_id.encode())]
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def send_in_parts(data: bytes, send: Send) -> None:
    """As the client reads: a part goes into the connection's buffer once the one before it has left that."""
    for begin in range(0, len(data), PART):
        await send(_more(data[begin : begin + PART]))


def _more(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
