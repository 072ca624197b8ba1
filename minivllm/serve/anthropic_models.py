"""The models as Anthropic's client lists them: for requests to /v1/models that bear its header."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from starlette.requests import Request

from minivllm.errors import BadRequest
from minivllm.serve.ollama_protocol import as_utc

HEADER = "anthropic-version"  # its client sends it with every request
DEFAULT_PAGE, LARGEST_PAGE = 20, 1000  # models


class AnthropicModel(Struct, kw_only=True):
    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(Struct):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def wants(request: Request) -> bool:
    return HEADER in request.headers


def card(request: Request, name: str) -> AnthropicModel:
    """A request has room for what its prompt leaves of the context, so both figures are the context's."""
    state = request.app.state
    length, created = state.service.engine.max_model_len, as_utc(state.created)
    return AnthropicModel(id=name, display_name=name, created_at=created, max_input_tokens=length, max_tokens=length)


def listing(request: Request) -> AnthropicModelList:
    """The page that `limit` and `after_id` or `before_id` ask for. Raises BadRequest."""
    names, (begin, end) = request.app.state.service.served, (0, None)
    query, most = request.query_params, page_size(request)
    if "after_id" in query:
        begin = place(names, query["after_id"], "after_id") + 1
    if "before_id" in query:
        end = place(names, query["before_id"], "before_id")
    found = names[begin:end]
    page = found[-most:] if "before_id" in query and "after_id" not in query else found[:most]
    data = [card(request, name) for name in page]
    return AnthropicModelList(data, len(page) < len(found), *((page[0], page[-1]) if page else (None, None)))


def page_size(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_PAGE))
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= LARGEST_PAGE):
        raise BadRequest(f"limit must be a number from 1 to {LARGEST_PAGE}", "limit")
    return int(text)


def place(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise BadRequest(f'{param}: there is no model "{name}"', param)
    return names.index(name)
