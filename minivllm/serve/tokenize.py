"""/tokenize and /detokenize, in vLLM's shapes: what the server would make of a prompt or a conversation."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from minivllm.errors import BadRequest
from minivllm.serve import generation, protocol
from minivllm.serve.chat import render
from minivllm.serve.completions import check_ids
from minivllm.serve.connection import read_body
from minivllm.serve.protocol import ChatRequest, Message, RequestBody, Tool, doc, refused
from minivllm.serve.tools.ask import asked

OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class Tokenize(RequestBody):
    model: str | None = None
    prompt: Annotated[str | None, doc("A text; give this or messages.")] = None
    messages: Annotated[list[Message] | None, doc("A conversation, as in /v1/chat/completions.")] = None
    add_special_tokens: Annotated[
        bool | None,
        doc("Such as a BOS token. null: true for a prompt, false for messages, whose template writes them."),
    ] = None
    return_token_strs: Annotated[bool | None, doc("Also each token's text.")] = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Annotated[Any, refused("templates are the model's own, never a request's")] = None
    mm_processor_kwargs: Annotated[Any, refused("this server's models read text only")] = None


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenize(RequestBody):
    tokens: list[int]
    model: str | None = None


class Text(Struct):
    prompt: str


async def tokenize(request: Request) -> Response:
    body, service = protocol.parse(await read_body(request), Tokenize), request.app.state.service
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give prompt or messages, and not both", "prompt")
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    if body.messages is None:
        if given := [name for name in OF_CHATS if getattr(body, name) is not None]:
            raise BadRequest(f"{given[0]} needs messages", given[0])
        text = body.prompt
    else:
        chat = ChatRequest(messages=body.messages, **{name: getattr(body, name) for name in OF_CHATS})
        text = render(chat, asked(chat), service)
    ids = (await generation.tokenize(service, text, special)).token_ids
    tokenizer = service.engine.tokenizer
    strs = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return _reply(Tokens(len(ids), service.engine.max_model_len, ids, strs))


async def detokenize(request: Request) -> Response:
    body, service = protocol.parse(await read_body(request), Detokenize), request.app.state.service
    service.check_model(body.model)
    check_ids(body.tokens, service, "tokens")
    return _reply(Text(service.engine.tokenizer.decode(body.tokens, skip_special_tokens=False)))


def _reply(data: Struct) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")
