"""OpenAI's error bodies, for everything that is not a 200: {"error": {"message", "type", "param", "code"}}. Below
/v1/messages they are Anthropic's: {"type": "error", "error": {"type", "message"}}; below /api Ollama's: {"error":
message}."""

from __future__ import annotations

import logging
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from minivllm.errors import BadRequest, EngineDead, MissingAdapter, NeverFits, OutOfMemory, ReplicaDead, UnknownAdapter
from minivllm.registry import did_you_mean
from minivllm.serve.messages_protocol import MessageError, MessageErrorDetail
from minivllm.serve.ollama_protocol import OllamaError
from minivllm.serve.protocol import ErrorBody, ErrorDetail
from minivllm.serve.structured import in_terms_of

RETRY_SECONDS = 1  # when a client that was turned away may try again
LONGEST_MESSAGE, LONGEST_PARAM = 2000, 200  # characters

logger = logging.getLogger("minivllm.serve")


class ApiError(Exception):
    """An answer with a status of its own."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers: dict[str, str] = {"www-authenticate": "Bearer"} if status == 401 else {}


def other_role(needed: str) -> ApiError:
    return ApiError(403, f"this needs a key of the role {needed}", code="role_not_allowed")


def client_left() -> ApiError:
    """Nobody reads this answer; 499 is what nginx writes into its access log."""
    return ApiError(499, "the client has left")


def closing() -> ApiError:
    return ApiError(503, "the server is shutting down", code="server_shutting_down")


def queue_full() -> ApiError:
    error = ApiError(429, "too many requests are waiting; try again later", code="queue_full")
    error.headers["retry-after"] = str(RETRY_SECONDS)
    return error


def answers_full() -> ApiError:
    """Beside a request whose answer may be long, others that are as long."""
    error = ApiError(429, "the answers that are being made may take all of --max-answer-bytes; try again later")
    error.code, error.headers["retry-after"] = "answers_full", str(RETRY_SECONDS)
    return error


def bodies_full() -> ApiError:
    """The rest of this body is not read, so its connection ends."""
    error = ApiError(
        429, "the bodies of your requests that are not answered yet are too large together; try again later"
    )
    error.code = "bodies_full"
    error.headers |= {"retry-after": str(RETRY_SECONDS), "connection": "close"}
    return error


def store_failed(error: sqlite3.Error) -> ApiError:
    """Of responses: the disk is full, or cannot be read or written."""
    status = 507 if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL else 503
    return ApiError(status, f"the store of responses cannot be used: {error}", code="store_failed")


def replica_dead() -> ApiError:
    error = ApiError(503, "the replica that ran this request has ended; send the request again", code="replica_dead")
    error.headers["retry-after"] = str(RETRY_SECONDS)
    return error


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")


def ambiguous_length() -> ApiError:
    """What follows on this connection may be the rest of a body, or not (RFC 9112, 6.3)."""
    error = ApiError(400, "content-length and transfer-encoding exclude each other", code="ambiguous_length")
    error.headers["connection"] = "close"
    return error


def unknown_version(version: str) -> ApiError:
    """Where its header and its body end is anybody's guess."""
    error = ApiError(505, f"HTTP/{version} is not spoken here; HTTP/1.1 is", code="http_version_not_supported")
    error.headers["connection"] = "close"
    return error


def too_slow(seconds: float) -> ApiError:
    """The rest of the body may still come, so this connection is of no use any more."""
    error = ApiError(408, f"the body has not come within {seconds:g} s (--client-timeout)", code="request_timeout")
    error.headers["connection"] = "close"
    return error


def too_late(seconds: float, why: str) -> ApiError:
    error = ApiError(504, f"the request was not done within {seconds:g} s ({why})", code="deadline_exceeded")
    error.headers["x-should-retry"] = "false"  # else OpenAI's and Anthropic's clients do
    return error


def too_many_viewers(most: int) -> ApiError:
    error = ApiError(429, f"{most} clients watch the engine already; close one", code="too_many_viewers")
    error.headers["retry-after"] = str(RETRY_SECONDS)
    return error


def rate_limited(why: str, seconds: float) -> ApiError:
    """why: which limit. seconds: until the client may come back."""
    wait = max(1, math.ceil(seconds))
    error = ApiError(429, f"{why}: try again in {wait} s", code="rate_limit_exceeded")
    error.headers["retry-after"] = str(wait)
    return error


def context_length(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, code="context_length_exceeded", param=param)


def out_of_memory() -> ApiError:
    message = "the engine has too little memory left for this request; try again later, or ask for less at once"
    error = ApiError(503, message, code="out_of_memory")
    error.headers["retry-after"] = str(RETRY_SECONDS)
    return error


def as_api_error(error: BaseException) -> ApiError:
    """What the client is told. The text of an unexpected error stays in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NeverFits):
        return context_length(str(error), error.param)
    if isinstance(error, MissingAdapter):
        return ApiError(404, str(error), code="adapter_not_found", param=error.param)
    if isinstance(error, UnknownAdapter):
        return ApiError(404, str(error), code="model_not_found", param=error.param)
    if isinstance(error, BadRequest):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, sqlite3.Error):
        logger.error("the store of responses cannot be used: %r", error)
        return store_failed(error)
    if isinstance(error, RecursionError):  # only what a client has sent is nested as deep as it likes
        return ApiError(400, "the request is nested too deeply", code="nested_too_deeply")
    if isinstance(error, ClientDisconnect):
        return client_left()
    if isinstance(error, OutOfMemory):
        return out_of_memory()
    if isinstance(error, ReplicaDead):
        return replica_dead()
    if isinstance(error, EngineDead):
        return ApiError(503, "the engine has stopped; the server's log has the reason. Restart it.", code="engine_dead")
    return ApiError(500, "an internal error ended this request; the server's log has the details", "internal_error")


def text_of(error: ApiError) -> str:
    """A message may quote what was sent, which may be megabytes."""
    message = str(error)
    return message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + " ..."


def body(error: ApiError) -> bytes:
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
        error.status, "invalid_request_error"
    )
    kind = "server_error" if error.status >= 500 else kind
    param = error.param and error.param[:LONGEST_PARAM]
    return msgspec.json.encode(ErrorBody(ErrorDetail(text_of(error), kind, param, error.code)))


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """For a request that was translated into another: complaints name the fields that the client has sent."""
    try:
        yield
    except (ApiError, BadRequest) as error:
        told = as_api_error(error)
        message, param = in_terms_of(names, str(told)), in_terms_of(names, told.param or "")
        raise ApiError(told.status, message, told.code, param or None) from error


def message_body(error: ApiError) -> bytes:
    """Anthropic's shape, which /v1/messages answers in."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
    kind = kinds.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode(MessageError(MessageErrorDetail(kind, text_of(error))))


def ollama_body(error: ApiError) -> bytes:
    return msgspec.json.encode(OllamaError(text_of(error)))


def ollama_line(error: ApiError) -> bytes:
    """The end of a stream of lines."""
    return ollama_body(error) + b"\n"


def event(error: ApiError) -> bytes:
    """The end of a stream that has begun."""
    return b"data: %b\n\ndata: [DONE]\n\n" % body(error)


def message_event(error: ApiError) -> bytes:
    return b"event: error\ndata: %b\n\n" % message_body(error)


class Shape(NamedTuple):
    of: type  # what a body is
    body: Callable[[ApiError], bytes]


OPENAI = Shape(ErrorBody, body)
SHAPES = {  # by how the path begins; OpenAI's elsewhere
    "/v1/messages": Shape(MessageError, message_body),
    "/api/": Shape(OllamaError, ollama_body),
}


def shape_of(path: str) -> Shape:
    return next((shape for prefix, shape in SHAPES.items() if path.startswith(prefix)), OPENAI)


def response(error: BaseException, path: str = "") -> Response:
    told = as_api_error(error)
    return Response(shape_of(path).body(told), told.status, told.headers, "application/json")


async def on_error(request: Request, error: Exception) -> Response:
    reply = response(error, request.url.path)
    if request_id := getattr(request.state, "request_id", None):  # after all middleware: an unexpected error's answer
        reply.headers["x-request-id"] = request_id
    return reply


async def on_http_exception(request: Request, error: HTTPException) -> Response:
    """Starlette's own 404 and 405. The paths that exist are named: most 404s are a base_url without /v1."""
    path, paths = request.url.path, sorted({route.path for route in request.app.routes})
    if error.status_code == 404 and path in request.app.state.switched_off:
        message = f"{path} is switched off; the server's option --debug-endpoints switches it on"
    elif error.status_code == 404:
        hint = next((f' Did you mean "{p}"?' for p in paths if p.endswith(path) and path != "/"), "")
        message = f"no such path: {path}.{hint or did_you_mean(path, paths)} Paths: {', '.join(paths)}"
    elif error.status_code == 405:
        message = f"{path} does not take {request.method}; it takes {methods(request)}"
    else:
        message = error.detail or HTTPStatus(error.status_code).phrase
    reply = response(ApiError(error.status_code, message), path)
    reply.headers.update({**(error.headers or {}), **({"allow": methods(request)} if error.status_code == 405 else {})})
    return reply


def methods(request: Request) -> str:
    """That the path takes: Starlette's own error names those of one route, and each method has its own."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods}))


HANDLERS = {
    HTTPException: on_http_exception,
    ApiError: on_error,
    BadRequest: on_error,
    EngineDead: on_error,
    ClientDisconnect: on_error,
    RecursionError: on_error,
    sqlite3.Error: on_error,
    Exception: on_error,  # Starlette raises it again once answered, and uvicorn logs the traceback
}
