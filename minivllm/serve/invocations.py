"""/invocations, where Amazon SageMaker sends every request of a container: the fields of the body say which endpoint it
is for, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive

from minivllm.errors import BadRequest
from minivllm.serve import json_bounds
from minivllm.serve.bodies import NotJSON
from minivllm.serve.connection import hint_at_type, read_body
from minivllm.serve.off_loop import by_size, client_of
from minivllm.serve.pooling import CLASSIFIES

PATHS = {  # of the endpoint, by a field that it alone needs
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "query": "/rerank",
    "text_1": "/score",
    "queries": "/score",
    "data_1": "/score",
}


async def invocations(request: Request) -> ASGIApp:
    data = await read_body(request)
    try:
        client = client_of(request.scope["state"])
        parts = await by_size(len(data), lambda: fields_of(data), client)
        path = path_of(parts, request.app.state.service.engine.task)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotJSON(f"the body is no JSON object: {error}{hint_at_type(request.headers)}") from None
    (handler,) = (route.endpoint for route in request.app.routes if route.path == path)
    return await handler(Request(request.scope, again(data, request.receive)))


def fields_of(data: bytes) -> dict[str, msgspec.Raw]:
    """Raises BadRequest for what has too many parts to be looked at."""
    json_bounds.check(data)
    return msgspec.json.decode(data, type=dict[str, msgspec.Raw])


def path_of(fields: Mapping[str, object], task: str) -> str:
    if "input" in fields and task in CLASSIFIES:
        return "/classify"
    if found := next((path for name, path in PATHS.items() if name in fields), None):
        return found
    raise BadRequest(f"nothing says which endpoint this is for: give one of {', '.join(PATHS)}")


def again(data: bytes, receive: Receive) -> Receive:
    """The body, which was read already, and then what the connection brings."""
    unread: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive_again() -> Message:
        return unread.pop() if unread else await receive()

    return receive_again
