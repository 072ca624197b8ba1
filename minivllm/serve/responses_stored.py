"""The endpoints of /v1/responses. With keys, a key finds its own responses alone, whatever it knows of others' ids.

What a response answers is kept with it, so previous_response_id goes on from it; instructions are not carried over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from minivllm.errors import BadRequest
from minivllm.serve import bodies, chat, generation
from minivllm.serve.connection import EventStream, JSONAnswer, JSONParts, reply
from minivllm.serve.errors import ApiError
from minivllm.serve.generation import attach
from minivllm.serve.off_loop import SHORT, by_size, client_of
from minivllm.serve.response_shelf import Asked, Run
from minivllm.serve.responses import as_chat, item_id, items_of, prepare
from minivllm.serve.responses_protocol import (
    InputItem,
    InputItemsQuery,
    InputTokenCount,
    InputTokensRequest,
    ResponseDeleted,
    ResponsesRequest,
    RetrieveQuery,
)
from minivllm.serve.tools.ask import asked

R = TypeVar("R")

PREFIXES = {  # of ids, by type; others: msg
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


async def responses(request: Request) -> ASGIApp:
    body, state = await bodies.taken(request, ResponsesRequest), request.app.state
    state.service.check_model(body.model)
    keeps = state.shelf.keeps(body, request)
    body.input = await referred(body.input, request)
    before = await earlier(body.previous_response_id, request)
    writer = await worked_out(request, before, lambda: prepare(body, state.service, before))
    attach(writer.job, request)
    if keeps:
        writer.response.store = True
        items = await worked_out(request, (), lambda: stored_items(body, writer.job.id))
        kept = Asked(owner(request), items, body.previous_response_id, bool(body.stream))
        if body.background:
            request.state.deadline = None  # it is the run's
            return queued(await state.shelf.start(writer, kept))
        writer.keep = partial(state.shelf.keep, writer, kept)
    if body.stream:
        return EventStream(writer.events(), writer.job.id, writer.error)
    return JSONAnswer(writer.answer(), writer.job.id)


def queued(run: Run) -> ASGIApp:
    if run.streamed:
        return EventStream(run.follow(0), run.writer.job.id, run.writer.error)
    return reply(run.writer.response)


async def input_tokens(request: Request) -> Response:
    body, service = await bodies.taken(request, InputTokensRequest), request.app.state.service
    service.check_model(body.model)
    same = {name: getattr(body, name) for name in ("model", "instructions", "tools", "tool_choice", "reasoning")}
    before, given = await earlier(body.previous_response_id, request), await referred(body.input or [], request)

    def counted() -> int:
        asks = as_chat(ResponsesRequest(input=given, **same), before)
        text = chat.render(asks, asked(asks), service)
        return len(generation.tokenize(service, text, add_special_tokens=False).token_ids)

    return reply(InputTokenCount(await worked_out(request, before, counted)))


async def retrieve(request: Request) -> ASGIApp:
    query, shelf, id = bodies.queried(request, RetrieveQuery), request.app.state.shelf, id_of(request)
    if not query.stream:
        if query.starting_after is not None:
            raise BadRequest("starting_after needs stream=true", "starting_after")
        return JSONParts(*await shelf.answer(id, owner(request)))
    seen = await shelf.seen(id, owner(request))
    if seen.num_events is None:
        why = "only a response that was made with background=true and stream=true"
        raise BadRequest(f"stream: {why} can be streamed again", "stream")
    number = 0 if query.starting_after is None else query.starting_after + 1
    return EventStream(shelf.events(id, owner(request), number), id)


async def delete(request: Request) -> Response:
    await request.app.state.shelf.delete(id_of(request), owner(request))
    return reply(ResponseDeleted(id_of(request)))


async def cancel(request: Request) -> ASGIApp:
    shelf, id = request.app.state.shelf, id_of(request)
    if not await shelf.is_background(id, owner(request)):
        raise ApiError(400, "only a response that was made with background=true can be cancelled", "not_in_background")
    await shelf.cancel(id, owner(request))
    return JSONParts(*await shelf.answer(id, owner(request)))


async def input_items(request: Request) -> ASGIApp:
    query, state = bodies.queried(request, InputItemsQuery), request.app.state
    page = await state.shelf.page(id_of(request), owner(request), query, state.max_body_bytes)
    request.state.memory.answer(sum(map(len, page.data)), state.service.most_answer_bytes)
    return reply(page)


# ------------------------------------------------------------------------------------------------------------- parts


def id_of(request: Request) -> str:
    return request.path_params["response_id"]


def owner(request: Request) -> str:
    return getattr(request.state, "owner", "")


async def earlier(id: str | None, request: Request) -> list[InputItem]:
    """A conversation that is kept may be as long as one that is sent."""
    state = request.app.state
    return await state.shelf.earlier(id, owner(request), state.max_body_bytes)


async def referred(given: str | list[InputItem], request: Request) -> str | list[InputItem]:
    """With the items that are kept in the place of references to them. Raises ApiError."""
    if isinstance(given, str) or not any(is_reference(item) for item in given):
        return given
    state, wanted = request.app.state, {item.id: f"input[{i}]" for i, item in enumerate(given) if is_reference(item)}
    found = await state.shelf.items(wanted, owner(request), state.max_body_bytes)
    return [found[item.id] if is_reference(item) else item for item in given]


async def worked_out(request: Request, before: Sequence[InputItem], work: Callable[[], R]) -> R:
    """As bodies.worked_out; what comes before the request may be long where that is short."""
    return await by_size(SHORT + 1 if before else request.state.size, work, client_of(request.scope["state"]))


def is_reference(item: InputItem) -> bool:
    """Its type may be left out."""
    bare = item.type == "message" and item.role is None and item.content is None
    return item.id is not None and (item.type == "item_reference" or bare)


def stored_items(body: ResponsesRequest, response_id: str) -> bytes:
    items = enumerate(items_of(body))
    return msgspec.json.encode([stored_item(item, item_id_of(item, response_id, i)) for i, item in items])


def item_id_of(item: InputItem, response_id: str, place: int) -> str:
    return item_id(PREFIXES.get(item.type, "msg"), response_id, f"i{place:x}")


def stored_item(item: InputItem, id: str) -> dict[str, Any]:
    """In the form of an answer: with an id and a status, contents as parts."""
    given = without_nulls(msgspec.to_builtins(item))
    if item.type == "message" and isinstance(item.content, str):
        written = item.role == "assistant"
        part = {"type": "output_text", "annotations": []} if written else {"type": "input_text"}
        given["content"] = [{**part, "text": item.content}]
    made = {"id": id} | ({} if item.type == "reasoning" else {"status": "completed"})
    return {**made, **given}


def without_nulls(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: without_nulls(value) for key, value in data.items() if value is not None}
    return [without_nulls(item) for item in data] if isinstance(data, list) else data
