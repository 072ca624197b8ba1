"""/tokenize and /detokenize, in vLLM's shapes: what the server would make of a prompt or a conversation. A request with
`content` is llama.cpp's, and so is its answer; that of /detokenize has the names of both."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from minivllm.errors import BadRequest
from minivllm.serve import generation
from minivllm.serve.bodies import taken, worked_out
from minivllm.serve.chat import rendered
from minivllm.serve.completions import check_ids
from minivllm.serve.connection import reply
from minivllm.serve.protocol import (
    MAX_ITEMS,
    MAX_TOOLS,
    TEXT_ONLY,
    AnyTool,
    ChatRequest,
    Message,
    RequestBody,
    doc,
    refused,
)
from minivllm.serve.tools.ask import asked

MAX_CONTEXTS = 16  # full of tokens, that /detokenize takes: nothing here makes more of one request
OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "chat_template")


class Tokenize(RequestBody):
    model: str | None = None
    prompt: Annotated[str | None, doc("A text; give this or messages.")] = None
    messages: Annotated[
        Annotated[list[Message], Meta(max_length=MAX_ITEMS)] | None, doc("A conversation, as in /v1/chat/completions.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        doc("Such as a BOS token. null: true for a prompt, false for messages, whose template writes them."),
    ] = None
    return_token_strs: Annotated[bool | None, doc('Also each token as the vocabulary writes it, such as "Ġthe".')] = (
        None
    )
    tools: Annotated[list[AnyTool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Annotated[str | None, doc("As in /v1/chat/completions.")] = None
    mm_processor_kwargs: Annotated[Any, refused(TEXT_ONLY)] = None
    content: Annotated[str | None, doc("llama.cpp's: a text, in the place of prompt and messages.")] = None
    add_special: Annotated[bool | None, doc("llama.cpp's: with content, the special tokens too; null: false.")] = None
    with_pieces: Annotated[bool | None, doc("llama.cpp's: with content, each token's text too.")] = None
    parse_special: Annotated[bool | None, refused("special tokens in a text are read as such", True)] = None
    media_io_kwargs: Annotated[Any, refused(TEXT_ONLY, {})] = None


class Piece(Struct):
    id: int
    piece: str | list[int]  # bytes that are no whole character as numbers


class LlamaTokens(Struct):
    tokens: list[int | Piece]


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
    content: str  # the same, as llama.cpp calls it


async def tokenize(request: Request) -> Response:
    body, service = await taken(request, Tokenize), request.app.state.service
    service.check_model(body.model)
    return await worked_out(request, lambda: reply(tokens_of(body, service)))


def tokens_of(body: Tokenize, service: generation.Service) -> Tokens | LlamaTokens:
    if body.content is not None and body.prompt is None and body.messages is None:
        return llama_tokens(body, body.content, service)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give prompt or messages, and not both", "prompt")
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    if body.messages is None:
        if given := [name for name in OF_CHATS if getattr(body, name) is not None]:
            raise BadRequest(f"{given[0]} needs messages", given[0])
        text = body.prompt
    else:
        chat = ChatRequest(messages=body.messages, **{name: getattr(body, name) for name in OF_CHATS})
        text = rendered(chat, asked(chat), service)
    ids = generation.tokenize(service, text, special).token_ids
    tokenizer = service.engine.tokenizer
    strs = [tokenizer.token_str(token) for token in ids] if body.return_token_strs else None
    return Tokens(len(ids), service.engine.max_model_len, ids, strs)


async def detokenize(request: Request) -> Response:
    body, service = await taken(request, Detokenize), request.app.state.service
    service.check_model(body.model)
    return await worked_out(request, lambda: reply(text_of(body, service)))


def text_of(body: Detokenize, service: generation.Service) -> Text:
    if len(body.tokens) > (most := MAX_CONTEXTS * service.engine.max_model_len):
        what = f"{len(body.tokens)} tokens; {most} at most, {MAX_CONTEXTS} times the model's context"
        raise BadRequest(what, "tokens")
    check_ids(body.tokens, service, "tokens")
    text = service.engine.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return Text(text, text)


def llama_tokens(body: Tokenize, text: str, service: generation.Service) -> LlamaTokens:
    ids = generation.tokenize(service, text, bool(body.add_special)).token_ids
    tokenizer = service.engine.tokenizer
    return LlamaTokens([Piece(t, piece(tokenizer.token_bytes(t))) for t in ids] if body.with_pieces else ids)


def piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def tokenizer_info(request: Request) -> Response:
    """vLLM's: tokenizer_config.json, with the chat template that is in use."""
    tokenizer = request.app.state.service.engine.tokenizer
    found = {**tokenizer.config, "chat_template": tokenizer.chat_template}
    return reply(found)
