"""What other servers have at paths of their own and this one has not: a 501 that says why, so that nobody looks for a
wrong address. Not in the table of endpoints, since nothing can be asked there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minivllm.serve.errors import ApiError

ONE_MODEL = "this server has the one model that it was started with: python -m minivllm.serve --model NAME"
NO_ACCOUNT = "this server has no accounts; see --api-key"
CACHED = "prompts are cached by content (kv.prefix), and no request has a slot"
REFUSED = {
    "/api/pull": ("POST", ONE_MODEL),  # Ollama's
    "/api/push": ("POST", ONE_MODEL),
    "/api/create": ("POST", ONE_MODEL),
    "/api/copy": ("POST", ONE_MODEL),
    "/api/delete": ("DELETE", ONE_MODEL),
    "/api/blobs/{digest}": ("POST", ONE_MODEL),
    "/api/me": ("POST", NO_ACCOUNT),
    "/api/signout": ("POST", NO_ACCOUNT),
    "/slots/{id_slot}": ("POST", CACHED),  # llama.cpp's
    "/embed_all": ("POST", "a text has one vector here"),  # TEI's
    "/embed_sparse": ("POST", "no model here makes sparse vectors"),
    "/lora-adapters": ("POST", "a request names its adapter as its model: see /v1/load_lora_adapter"),
}


def routes() -> list[Route]:
    return [Route(path, refusal(path, why), methods=[method]) for path, (method, why) in REFUSED.items()]


def refusal(path: str, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(_: Request) -> Response:
        raise ApiError(501, f"{path} is not supported: {why}", code="not_supported")

    return refuse
