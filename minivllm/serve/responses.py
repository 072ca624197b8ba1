"""/v1/responses, OpenAI's newer API: a request becomes a chat request, and the chat's answer a list of items.

A stream and a whole answer are made by the same `Items`, so the response that ends a stream is what has been streamed.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from minivllm.errors import BadRequest
from minivllm.serve import chat, errors, protocol
from minivllm.serve.chat import ChatShape
from minivllm.serve.connection import EventStream, JSONAnswer, read_body
from minivllm.serve.generation import Job, Service, attach
from minivllm.serve.protocol import ChatDelta, ChatRequest, Message
from minivllm.serve.responses_protocol import (
    AllowedChoice,
    FunctionChoice,
    Incomplete,
    InputItem,
    InputPart,
    OutputCall,
    OutputMessage,
    OutputText,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    TextFormat,
)

NAMES = {  # a chat request's, and what they are called here
    "messages": "input",
    "max_tokens": "max_output_tokens",
    ".function.": ".",
    "response_format.json_schema": "text.format",
}


async def responses(request: Request) -> ASGIApp:
    body, service = protocol.parse(await read_body(request), ResponsesRequest), request.app.state.service
    service.check_model(body.model)
    writer = await prepare(body, service)
    attach(writer.job, request)
    if body.stream:
        return EventStream(writer.events(), writer.job.id, writer.error)
    return JSONAnswer(writer.answer(), writer.job.id)


async def prepare(body: ResponsesRequest, service: Service) -> Writer:
    with errors.renaming(NAMES):
        job, shape = await chat.prepare(as_chat(body), service)
    job.id = new_id("resp")
    return Writer(job, shape, body)


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


# -------------------------------------------------------------------------------------------- the request, as a chat


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """Raises BadRequest, naming the field."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        messages += conversation(body.input)
    if not messages:
        raise BadRequest("input is empty", "input")
    return ChatRequest(
        model=body.model,
        messages=messages,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=[as_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=as_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=as_response_format(body.text.format if body.text else None),
        cache_salt=body.cache_salt,
    )


def conversation(items: Sequence[InputItem]) -> list[Message]:
    """Calls in a row, and the assistant's message before them, are one message."""
    made: list[Message] = []
    called: set[str] = set()
    for i, item in enumerate(items):
        path = f"input[{i}]"
        if item.type == "message":
            made.append(Message(role=required(item, "role", path), content=text_of(item.content, f"{path}.content")))
        elif item.type == "function_call":
            if not made or made[-1].role != "assistant":
                made.append(Message(role="assistant", content=""))
            called.add(required(item, "call_id", path))
            function = protocol.CalledFunction(required(item, "name", path), required(item, "arguments", path))
            made[-1].tool_calls = [*(made[-1].tool_calls or ()), protocol.CalledTool(item.call_id, function)]
        elif item.type == "function_call_output":
            if required(item, "call_id", path) not in called:
                why = f'"{item.call_id}" is the call_id of no earlier function_call'
                raise BadRequest(f"{path}.call_id: {why}", f"{path}.call_id")
            text = text_of(required(item, "output", path), f"{path}.output")
            made.append(Message(role="tool", tool_call_id=item.call_id, content=text))
    return made


def required(item: InputItem, name: str, path: str) -> Any:
    if (value := getattr(item, name)) is None:
        raise BadRequest(f'{path}.{name} is missing, and type is "{item.type}"', f"{path}.{name}")
    return value


def text_of(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    try:
        parts = msgspec.convert(content, list[InputPart])
    except msgspec.ValidationError as error:
        raise BadRequest(f"{path}: {error}", path) from None
    texts = []
    for i, part in enumerate(parts):
        where = f"{path}[{i}]"
        protocol.refuse_unsupported(part, f"{where}.")
        text = part.refusal if part.type == "refusal" else part.text
        if part.type.startswith("input_") and part.type != "input_text" or text is None:
            raise BadRequest(f"{where}: only texts are supported, got type {part.type}", where)
        texts.append(text)
    return "\n".join(texts)


def as_tool(tool: Any) -> protocol.Tool:
    function = protocol.Function(name=tool.name, description=tool.description, parameters=tool.parameters)
    return protocol.Tool(type="function", function=function)


def as_choice(choice: str | FunctionChoice | AllowedChoice | None) -> Any:
    if isinstance(choice, FunctionChoice):
        return protocol.NamedTool(function=protocol.FunctionName(choice.name))
    if isinstance(choice, AllowedChoice):
        tools = [protocol.FunctionReference("function", protocol.FunctionName(tool.name)) for tool in choice.tools]
        return protocol.AllowedTools(allowed_tools=protocol.ToolSubset(mode=choice.mode, tools=tools))
    return choice


def as_response_format(form: TextFormat | None) -> protocol.ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return protocol.ResponseFormat(type="json_object")
    if form.schema is None:
        raise BadRequest('text.format.schema is missing, and type is "json_schema"', "text.format.schema")
    schema = protocol.JSONSchema(name=form.name or "answer", schema=form.schema)
    return protocol.ResponseFormat(type="json_schema", json_schema=schema)


# -------------------------------------------------------------------------------------------------------- the answer


class Items:
    """A chat's deltas as output items, one open at a time, and the events that tell of it."""

    def __init__(self) -> None:
        self.output: list[OutputMessage | OutputCall] = []
        self.open: OutputMessage | OutputCall | None = None
        self.num_events = 0

    def event(self, type: str, **fields: Any) -> ResponseEvent:
        self.num_events += 1
        return ResponseEvent(type=f"response.{type}", sequence_number=self.num_events - 1, **fields)

    def take(self, delta: ChatDelta) -> Iterator[ResponseEvent]:
        if delta.content:
            if not isinstance(self.open, OutputMessage):
                yield from self._begin(OutputMessage(id=new_id("msg"), content=[]))
                self.open.content.append(OutputText())
                yield self.event("content_part.added", **self._part(), part=OutputText())
            self.open.content[0].text += delta.content
            yield self.event("output_text.delta", **self._part(), delta=delta.content, logprobs=[])
        for part in delta.tool_calls or ():
            if part.id:
                yield from self._begin(OutputCall(id=new_id("fc"), call_id=part.id, name=part.function.name))
            if text := part.function.arguments:
                self.open.arguments += text
                yield self.event("function_call_arguments.delta", **self._place(), delta=text)

    def close(self, status: str = "completed") -> Iterator[ResponseEvent]:
        item = self.open
        if item is None:
            return
        item.status = status
        if isinstance(item, OutputMessage):
            (part,) = item.content
            yield self.event("output_text.done", **self._part(), text=part.text, logprobs=[])
            yield self.event("content_part.done", **self._part(), part=part)
        else:
            done = {"name": item.name, "arguments": item.arguments}
            yield self.event("function_call_arguments.done", **self._place(), **done)
        yield self.event("output_item.done", output_index=len(self.output) - 1, item=item)
        self.open = None

    def _begin(self, item: OutputMessage | OutputCall) -> Iterator[ResponseEvent]:
        yield from self.close()
        self.open = item
        self.output.append(item)
        yield self.event("output_item.added", output_index=len(self.output) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.open.id, "output_index": len(self.output) - 1}

    def _part(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}


class Writer:
    def __init__(self, job: Job, shape: ChatShape, body: ResponsesRequest):
        self.job, self.shape = job, shape
        self.items = Items()
        self.response = ResponseObject.of(
            body, id=job.id, model=shape.model, output=self.items.output, status="in_progress"
        )

    async def answer(self) -> ResponseObject:
        async with aclosing(self.job.outputs("final")) as stream:
            output = [output async for _, output in stream][-1]
        (out,) = output.outputs
        choice = self.shape.whole(0, self.job.prompts[0], output, out)
        whole = protocol.ChatDelta(content=choice.message.content, tool_calls=as_parts(choice.message.tool_calls))
        for _ in [*self.items.take(whole), *self.finish(choice.finish_reason)]:
            pass
        return self.response

    async def events(self) -> AsyncIterator[bytes]:
        started = False
        async with aclosing(self.job.outputs("delta")) as stream:
            async for _, output in stream:
                (out,) = output.outputs
                if not started:
                    started = True
                    yield encoded(self.items.event("created", response=self.response))
                    yield encoded(self.items.event("in_progress", response=self.response))
                for choice in self.shape.deltas(0, out):
                    for event in self.items.take(choice.delta):
                        yield encoded(event)
                if out.finish_reason is not None:
                    reason = self.shape.ending(0, out).finish_reason
        for event in self.finish(reason):
            yield encoded(event)

    def finish(self, finish_reason: str | None) -> Iterator[ResponseEvent]:
        response, used = self.response, self.job.usage
        response.status = "incomplete" if finish_reason == "length" else "completed"
        yield from self.items.close(response.status)
        if response.status == "incomplete":
            response.incomplete_details = Incomplete("max_output_tokens")
        response.usage = ResponseUsage(
            used.prompt_tokens, used.completion_tokens, used.total_tokens, used.prompt_tokens_details
        )
        yield self.items.event(response.status, response=response)

    def error(self, error: errors.ApiError) -> bytes:
        number = self.items.num_events
        fields = {"message": str(error), "code": error.code or "server_error", "param": error.param}
        return encoded(ResponseEvent(type="error", sequence_number=number, **fields))


def as_parts(calls: Sequence[protocol.ToolCall] | msgspec.UnsetType) -> list[protocol.ToolCallDelta]:
    """Whole calls as what a stream would have brought."""
    return [
        protocol.ToolCallDelta(
            i, protocol.FunctionDelta(name=call.function.name, arguments=call.function.arguments), call.id
        )
        for i, call in enumerate(calls or ())
    ]


def encoded(data: ResponseEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data.type.encode(), msgspec.json.encode(data))
