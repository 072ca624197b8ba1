"""/v1/messages, Anthropic's API: a request becomes a chat request, and the chat's answer a message of blocks.

So templates, tools, stop strings and structured output are those of /v1/chat/completions. A last message of the
assistant is a beginning that the answer goes on with. Messages of one role in a row are one turn.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from minivllm.engine.output import CompletionOutput
from minivllm.errors import BadRequest
from minivllm.serve import chat, errors, generation, messages_protocol, protocol
from minivllm.serve.chat import ChatShape
from minivllm.serve.connection import EventStream, JSONAnswer, read_body
from minivllm.serve.generation import Job, attach, new_id
from minivllm.serve.messages_protocol import (
    AutoChoice,
    CountTokensRequest,
    CustomTool,
    InputTokens,
    MessageAnswer,
    MessageEvent,
    MessagesRequest,
    MessageTurn,
    MessageUsage,
    NoneChoice,
    TextAnswer,
    TextBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseAnswer,
    ToolUseBlock,
)
from minivllm.serve.protocol import ChatChunkChoice, ChatRequest, Message
from minivllm.serve.tools.ask import asked

NAMES = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "response_format.json_schema": "output_config.format",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(request: Request) -> ASGIApp:
    body, service = protocol.parse(await read_body(request), MessagesRequest), request.app.state.service
    service.check_model(body.model)
    with errors.renaming(NAMES):
        job, shape = await chat.prepare(as_chat(body), service)
    job.id = new_id("msg").replace("-", "_")
    attach(job, request)
    if body.stream:
        return EventStream(events(job, shape), job.id, errors.message_event)
    return JSONAnswer(answer(job, shape), job.id)


async def count_tokens(request: Request) -> Response:
    body, service = protocol.parse(await read_body(request), CountTokensRequest), request.app.state.service
    service.check_model(body.model)
    asks = as_chat(body)
    prompt = await generation.tokenize(service, chat.render(asks, asked(asks), service), add_special_tokens=False)
    return Response(msgspec.json.encode(InputTokens(len(prompt.token_ids))), media_type="application/json")


# -------------------------------------------------------------------------------------------- the request, as a chat


def as_chat(body: CountTokensRequest) -> ChatRequest:
    """Raises BadRequest, naming the field."""
    if not body.messages:
        raise BadRequest("messages is empty: give at least one", "messages")
    turns = [*system(body.system), *conversation(body.messages)]
    begun = turns[-1].role == "assistant"
    if begun and turns[-1].tool_calls:
        raise BadRequest("messages: the last one's tool_use has no tool_result", "messages")
    fields: dict[str, Any] = {"model": body.model, "messages": turns, **tool_fields(body)}
    if begun:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.output_config is not None and (form := body.output_config.format) is not None:
        schema = protocol.JSONSchema(name="answer", schema=form.schema)
        fields["response_format"] = protocol.ResponseFormat(type="json_schema", json_schema=schema)
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        fields["stop"] = body.stop_sequences or None
    return ChatRequest(**fields)


def system(given: str | list[TextBlock] | None) -> list[Message]:
    text = given if isinstance(given, str) else "\n".join(block.text for block in given or ())
    return [Message(role="system", content=text)] if text else []


def conversation(turns: Sequence[MessageTurn]) -> list[Message]:
    made: list[Message] = []
    called: set[str] = set()
    for i, turn in enumerate(turns):
        for message in split(turn, f"messages[{i}]", called):
            if made and message.role == made[-1].role == "user":
                made[-1].content += "\n" + message.content
            elif made and message.role == made[-1].role == "assistant" and not made[-1].tool_calls:
                made[-1].content += message.content
                made[-1].tool_calls = message.tool_calls
            else:
                made.append(message)
    return made


def split(turn: MessageTurn, path: str, called: set[str]) -> Iterator[Message]:
    """One turn as a chat's messages: each tool result is one of its own. called: the ids of earlier calls."""
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
        return
    texts, calls = [], []
    for j, block in enumerate(turn.content):
        where = f"{path}.content[{j}]"
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolUseBlock():
                if turn.role != "assistant":
                    raise BadRequest(f"{where}: only the assistant uses tools", where)
                arguments = json.dumps(block.input, ensure_ascii=False)
                called.add(block.id)
                calls.append(protocol.CalledTool(block.id, protocol.CalledFunction(block.name, arguments)))
            case ToolResultBlock():
                if turn.role != "user" or block.tool_use_id not in called:
                    why = f'"{block.tool_use_id}" is the id of no earlier tool_use of the assistant'
                    raise BadRequest(f"{where}.tool_use_id: {why}", f"{where}.tool_use_id")
                yield Message(role="tool", tool_call_id=block.tool_use_id, content=result_text(block))
    if texts or calls:
        yield Message(role=turn.role, content="\n".join(texts), tool_calls=calls or None)


def result_text(block: ToolResultBlock) -> str:
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return f"Error: {text}" if block.is_error else text


def tool_fields(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"tools": [as_tool(tool) for tool in body.tools or ()] or None}
    match body.tool_choice:
        case None:
            return fields
        case NoneChoice():
            fields["tool_choice"] = "none"
            return fields
        case ToolChoice(name=name):
            fields["tool_choice"] = protocol.NamedTool(function=protocol.FunctionName(name=name))
        case choice:
            fields["tool_choice"] = "auto" if isinstance(choice, AutoChoice) else "required"
    fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    return fields


def as_tool(tool: CustomTool) -> protocol.Tool:
    function = protocol.Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return protocol.Tool(type="function", function=function)


# -------------------------------------------------------------------------------------------------------- the answer


def usage(num_prompt: int, num_cached: int, num_output: int) -> MessageUsage:
    return MessageUsage(num_prompt - num_cached, num_output, num_cached)


def job_usage(job: Job) -> MessageUsage:
    used = job.usage
    return usage(used.prompt_tokens, used.prompt_tokens_details.cached_tokens, used.completion_tokens)


def stopped(finish_reason: str | None, out: CompletionOutput) -> dict[str, str | None]:
    if finish_reason == "stop" and isinstance(out.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": out.stop_reason}
    return {"stop_reason": STOP_REASONS.get(finish_reason), "stop_sequence": None}


async def answer(job: Job, shape: ChatShape) -> MessageAnswer:
    async with aclosing(job.outputs("final")) as stream:
        output = [output async for _, output in stream][-1]
    (out,) = output.outputs
    choice = shape.whole(0, job.prompts[0], output, out)
    text, calls = choice.message.content, choice.message.tool_calls or ()
    content: list[Any] = [TextAnswer(text)] if text else []
    content += [as_block(call) for call in calls]
    ends = stopped(choice.finish_reason, out)
    return MessageAnswer(id=job.id, model=shape.model, content=content, usage=job_usage(job), **ends)


def as_block(call: protocol.ToolCall) -> ToolUseAnswer | TextAnswer:
    """A forced call that max_tokens has cut off has no input to speak of; its beginning is shown as text."""
    try:
        return ToolUseAnswer(call.id, call.function.name, json.loads(call.function.arguments))
    except ValueError:
        return TextAnswer(call.function.arguments)


async def events(job: Job, shape: ChatShape) -> AsyncIterator[bytes]:
    blocks, started = Blocks(), False
    async with aclosing(job.outputs("delta")) as stream:
        async for _, output in stream:
            (out,) = output.outputs
            if not started:
                started = True
                begun = usage(len(job.prompts[0].token_ids), output.num_cached_tokens or 0, 0)
                yield event(MessageEvent(type="message_start", message=empty(job, shape, begun)))
                yield event(MessageEvent(type="ping"))
            for choice in shape.deltas(0, out):
                for made in blocks.take(choice):
                    yield event(made)
            if out.finish_reason is not None:
                for made in blocks.close():
                    yield event(made)
                ends = stopped(shape.ending(0, out).finish_reason, out)
    yield event(MessageEvent(type="message_delta", delta=ends, usage=job_usage(job)))
    yield event(MessageEvent(type="message_stop"))


def empty(job: Job, shape: ChatShape, begun: MessageUsage) -> MessageAnswer:
    return MessageAnswer(id=job.id, model=shape.model, usage=begun)


class Blocks:
    """A chat's deltas as content blocks, one open at a time."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.open: str | None = None  # the type of the block

    def take(self, choice: ChatChunkChoice) -> Iterator[MessageEvent]:
        if choice.delta.content:
            if self.open != "text":
                yield from self.begin(TextAnswer(""))
            yield self.delta({"type": "text_delta", "text": choice.delta.content})
        for part in choice.delta.tool_calls or ():
            if part.id:
                yield from self.begin(ToolUseAnswer(part.id, part.function.name))
            if part.function.arguments:
                yield self.delta({"type": "input_json_delta", "partial_json": part.function.arguments})

    def begin(self, block: TextAnswer | ToolUseAnswer) -> Iterator[MessageEvent]:
        yield from self.close()
        self.open, self.num_begun = block.type, self.num_begun + 1
        yield MessageEvent(type="content_block_start", index=self.num_begun - 1, content_block=block)

    def delta(self, delta: dict[str, Any]) -> MessageEvent:
        return MessageEvent(type="content_block_delta", index=self.num_begun - 1, delta=delta)

    def close(self) -> Iterator[MessageEvent]:
        if self.open is not None:
            self.open = None
            yield MessageEvent(type="content_block_stop", index=self.num_begun - 1)


def event(data: messages_protocol.MessageEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data.type.encode(), msgspec.json.encode(data))
