"""/v1/responses, OpenAI's newer API: a request becomes a chat request, and the chat's answer a list of items.

A stream and a whole answer are made by the same `Items`, so the response that ends a stream is what has been streamed.
The endpoints, and what is kept of responses, are in responses_stored.py.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Collection, Generator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from minivllm.errors import BadRequest
from minivllm.serve import chat, errors, protocol, structured
from minivllm.serve.chat import ChatShape
from minivllm.serve.generation import Job, Service, final_outputs, whole_choice
from minivllm.serve.protocol import ChatChunkChoice, ChatDelta, ChatRequest, Message, TokenLogprob
from minivllm.serve.responses_protocol import (
    AllowedChoice,
    CustomChoice,
    FunctionChoice,
    FunctionTool,
    GrammarInput,
    Incomplete,
    InputItem,
    InputPart,
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    TextFormat,
    TextInput,
    TextTool,
)

NAMES = {  # a chat request's, and what they are called here
    "messages": "input",
    "max_tokens": "max_output_tokens",
    ".function.": ".",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
}
AS_IN_CHATS = (
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop",
    "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "structured_outputs",
    "chat_template_kwargs", "priority",
)  # fmt: skip


TEXTS = ("input_text", "output_text", "reasoning_text")  # types of parts
INPUT = {  # of a custom tool, as the function that the model is told of
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def prepare(body: ResponsesRequest, service: Service, earlier: Sequence[InputItem] = ()) -> Writer:
    """earlier: what comes before the input, of the responses that this one goes on from."""
    names = grammars(body) | NAMES
    with errors.renaming(names):
        job, shape = chat.prepare(as_chat(body, earlier), service)
    job.params = structured.renamed(job.params, names)
    job.id, job.ignored = new_id("resp"), {NAMES.get(name, name): why for name, why in job.ignored.items()}
    return Writer(job, shape, body)


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


# -------------------------------------------------------------------------------------------- the request, as a chat


def as_chat(body: ResponsesRequest, earlier: Sequence[InputItem] = ()) -> ChatRequest:
    """Raises BadRequest, naming the field."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    messages += conversation([*earlier, *items_of(body)], len(earlier))
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
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        logprobs=body.wants_logprobs or None,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        **{name: getattr(body, name) for name in AS_IN_CHATS},
    )


def items_of(body: ResponsesRequest) -> list[InputItem]:
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def conversation(items: Sequence[InputItem], num_earlier: int = 0) -> list[Message]:
    """Calls in a row, and the assistant's message and reasoning before them, are one message. num_earlier: of the items
    are of earlier requests."""
    made = Conversation()
    called: set[str] = set()
    for i, item in enumerate(items):
        path = f"input[{i - num_earlier}]"
        if item.type == "reasoning":
            made.think(text_of(item.content or "", f"{path}.content"))
        elif item.type == "message" and item.role == "assistant" and made.goes_on:
            made.say(text_of(item.content, f"{path}.content"))
        elif item.type == "message":
            made.add(Message(role=required(item, "role", path), content=text_of(item.content, f"{path}.content")))
        elif item.type in ("function_call", "custom_tool_call"):
            called.add(required(item, "call_id", path))
            function = protocol.CalledFunction(required(item, "name", path), arguments_of(item, path))
            made.call(protocol.CalledTool(item.call_id, function))
        elif item.type == "item_reference":
            raise BadRequest(f"{path}: nothing is kept that it could refer to; send the item itself", path)
        else:
            if required(item, "call_id", path) not in called:
                why = f'"{item.call_id}" is the call_id of no earlier call'
                raise BadRequest(f"{path}.call_id: {why}", f"{path}.call_id")
            text = text_of(required(item, "output", path), f"{path}.output")
            made.add(Message(role="tool", tool_call_id=item.call_id, content=text))
    return made.messages()


def arguments_of(call: InputItem, path: str) -> str:
    if call.type == "function_call":
        return required(call, "arguments", path)
    return json.dumps({"input": required(call, "input", path)}, ensure_ascii=False)


class Conversation:
    """Messages as they come. The thoughts and calls of the last one are gathered, and put together once."""

    def __init__(self) -> None:
        self.made: list[Message] = []
        self.thoughts: list[str] = []
        self.calls: list[protocol.CalledTool] = []

    @property
    def last(self) -> Message:
        return self.made[-1]

    @property
    def ends_in_thought(self) -> bool:
        """Whether the last message is of the assistant, who has said and called nothing yet."""
        return bool(self.thoughts and not self.last.content and not self.calls)

    def add(self, message: Message) -> None:
        self._settle()
        self.made.append(message)

    def think(self, thought: str) -> None:
        """Before what the assistant says, or calls, next."""
        if self.ends_in_thought:
            self.thoughts.append(thought)
        elif thought:
            self.add(Message(role="assistant", content=""))
            self.thoughts.append(thought)

    @property
    def goes_on(self) -> bool:
        """Whether what the assistant says now is of its last message: behind thinking, or calls without results."""
        return bool(self.ends_in_thought or self.calls)

    def say(self, text: str) -> None:
        """In the last message."""
        self.last.content = "\n".join(filter(None, [self.last.content, text]))

    def call(self, call: protocol.CalledTool) -> None:
        if not self.made or self.last.role != "assistant":
            self.add(Message(role="assistant", content=""))
        self.calls.append(call)

    def messages(self) -> list[Message]:
        self._settle()
        return self.made

    def _settle(self) -> None:
        if self.thoughts:
            self.last.reasoning_content = "\n".join(self.thoughts)
        if self.calls:
            self.last.tool_calls = self.calls
        self.thoughts, self.calls = [], []


def required(item: InputItem, name: str, path: str) -> Any:
    if (value := getattr(item, name)) is None:
        raise BadRequest(f'{path}.{name} is missing, and type is "{item.type}"', f"{path}.{name}")
    return value


def text_of(content: str | list[InputPart] | None, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise BadRequest(f"{path} is missing", path)
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text if part.type in TEXTS else None
        if text is None:
            where = f"{path}[{i}]"
            raise BadRequest(f"{where}: only texts are supported, got type {part.type}", where)
        texts.append(text)
    return "\n".join(texts)


def as_tool(tool: FunctionTool | TextTool) -> protocol.Tool:
    parameters = input_schema(tool.format) if isinstance(tool, TextTool) else tool.parameters
    function = protocol.Function(name=tool.name, description=tool.description, parameters=parameters)
    return protocol.Tool(type="function", function=function)


def input_schema(form: TextInput | GrammarInput | None) -> dict[str, Any]:
    """Of a custom tool's input. `^` and `$` at the ends of its expression say what is always so."""
    if not isinstance(form, GrammarInput):
        return INPUT
    inside = form.definition.removeprefix("^")
    if inside.endswith("$") and not is_escaped(inside):
        inside = inside[:-1]
    return INPUT | {"properties": {"input": {"type": "string", "pattern": f"^(?:{inside})$"}}}


def is_escaped(text: str) -> bool:
    """The last character, by the backslashes before it."""
    before = text[:-1]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def grammars(body: ResponsesRequest) -> dict[str, str]:
    """What a chat calls the grammars of custom tools, and what they are called here."""
    tools = enumerate(body.tools or ())
    held = [i for i, tool in tools if isinstance(tool, TextTool) and isinstance(tool.format, GrammarInput)]
    return {f"tools[{i}].function.parameters": f"tools[{i}].format.definition" for i in held}


def as_choice(choice: str | FunctionChoice | CustomChoice | AllowedChoice | None) -> Any:
    if isinstance(choice, FunctionChoice | CustomChoice):
        return protocol.NamedTool(function=protocol.FunctionName(choice.name))
    if isinstance(choice, AllowedChoice):
        tools = [protocol.FunctionReference("function", protocol.FunctionName(tool.name)) for tool in choice.tools]
        return protocol.AllowedTools(allowed_tools=protocol.ToolSubset(mode=choice.mode, tools=tools))
    return choice


def as_response_format(form: TextFormat | None) -> structured.ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return structured.ResponseFormat(type="json_object")
    if form.schema is None:
        raise BadRequest('text.format.schema is missing, and type is "json_schema"', "text.format.schema")
    schema = structured.JSONSchema(name=form.name or "answer", schema=form.schema)
    return structured.ResponseFormat(type="json_schema", json_schema=schema)


# -------------------------------------------------------------------------------------------------------- the answer


class Items:
    """A chat's deltas as output items, one open at a time, and the events that tell of it."""

    def __init__(self, response_id: str, custom: Collection[str] = ()):
        """custom: the names of the tools that are no functions."""
        self.output: list[OutputItem] = []
        self.open: OutputItem | None = None
        self.num_events = 0
        self.response_id, self.custom = response_id, custom

    def event(self, type: str, **fields: Any) -> ResponseEvent:
        self.num_events += 1
        return ResponseEvent(type=f"response.{type}", sequence_number=self.num_events - 1, **fields)

    def take(self, delta: ChatDelta, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[ResponseEvent]:
        if delta.reasoning:
            if not isinstance(item := self.open, OutputReasoning):
                item = OutputReasoning(id=self._id("rs"), content=[])
                yield from self._begin(item)
                item.content.append(ReasoningText())
                yield self.event("content_part.added", **self._part(), part=ReasoningText())
            item.content[0].text += delta.reasoning
            yield self.event("reasoning_text.delta", **self._part(), delta=delta.reasoning)
        if delta.content:
            if not isinstance(item := self.open, OutputMessage):
                item = yield from self.message()
            item.content[0].text += delta.content
            item.content[0].logprobs += logprobs
            yield self.event("output_text.delta", **self._part(), delta=delta.content, logprobs=list(logprobs))
        for part in delta.tool_calls or ():
            if part.id and part.function.name in self.custom:
                yield from self._begin(OutputCustomCall(id=self._id("ctc"), call_id=part.id, name=part.function.name))
            elif part.id:
                yield from self._begin(OutputCall(id=self._id("fc"), call_id=part.id, name=part.function.name))
            text = part.function.arguments
            if isinstance(self.open, OutputCustomCall):
                self.open.input += text  # as JSON, until it is whole
            elif text:
                assert isinstance(self.open, OutputCall), "a part without an id goes on with a call"
                self.open.arguments += text
                yield self.event("function_call_arguments.delta", **self._place(), delta=text)

    def message(self) -> Generator[ResponseEvent, None, OutputMessage]:
        """One that says nothing yet, the open item. An answer is one at least: sent back, it stands between two of the
        user's messages."""
        item = OutputMessage(id=self._id("msg"), content=[])
        yield from self._begin(item)
        item.content.append(OutputText())
        yield self.event("content_part.added", **self._part(), part=OutputText())
        return item

    def close(self, status: str = "completed") -> Iterator[ResponseEvent]:
        item = self.open
        if item is None:
            return
        item.status = status
        if isinstance(item, OutputMessage):
            (part,) = item.content
            yield self.event("output_text.done", **self._part(), text=part.text, logprobs=part.logprobs)
            yield self.event("content_part.done", **self._part(), part=part)
        elif isinstance(item, OutputReasoning):
            (part,) = item.content
            yield self.event("reasoning_text.done", **self._part(), text=part.text)
            yield self.event("content_part.done", **self._part(), part=part)
        elif isinstance(item, OutputCustomCall):
            item.input = input_of(item.input)
            yield self.event("custom_tool_call_input.delta", **self._place(), delta=item.input)
            yield self.event("custom_tool_call_input.done", **self._place(), input=item.input)
        else:
            done = {"name": item.name, "arguments": item.arguments}
            yield self.event("function_call_arguments.done", **self._place(), **done)
        yield self.event("output_item.done", output_index=len(self.output) - 1, item=item)
        self.open = None

    def _id(self, prefix: str) -> str:
        return item_id(prefix, self.response_id, f"o{len(self.output):x}")

    def _begin(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self.close()
        self.open = item
        self.output.append(item)
        yield self.event("output_item.added", output_index=len(self.output) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.open.id, "output_index": len(self.output) - 1}

    def _part(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}


def item_id(prefix: str, response_id: str, place: str) -> str:
    """Of an item of a response, which is found by it (response_shelf.py)."""
    return f"{prefix}_{response_id.partition('_')[2]}{place}"


def input_of(arguments: str) -> str:
    """Of a custom tool. What the model has written in another form is all of it."""
    try:
        found = json.loads(arguments)["input"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return arguments
    return found if isinstance(found, str) else arguments


class TextLogprobs:
    """The log-probabilities of a message's text. Tokens that have brought no text yet go with the next text; those of
    a call, or of anything else, with none."""

    def __init__(self) -> None:
        self.waiting: list[TokenLogprob] = []

    def of(self, choice: ChatChunkChoice) -> list[TokenLogprob]:
        found = [*self.waiting, *(choice.logprobs.content if choice.logprobs else ())]
        self.waiting = found if choice.delta in (ChatDelta(), ChatDelta(content="")) else []
        return found if choice.delta.content else []


class Writer:
    """One response as it comes into being. `keep` is awaited once it is whole, before anybody is told."""

    def __init__(self, job: Job, shape: ChatShape, body: ResponsesRequest):
        self.job, self.shape = job, shape
        self.items = Items(job.id, {tool.name for tool in body.tools or () if isinstance(tool, TextTool)})
        self.opening: Sequence[str] = ("created", "in_progress")  # events before the first output
        self.has_logprobs = body.wants_logprobs
        self.response = ResponseObject.of(
            body, id=job.id, model=shape.model, output=self.items.output, status="in_progress"
        )

    async def keep(self) -> None:
        """Nowhere, as long as nobody says where."""

    async def answer(self) -> ResponseObject:
        if self.has_logprobs:  # which are told apart by the deltas that they come with
            async for _ in self.events():
                pass
            return self.response
        (output,) = await final_outputs(self.job)
        choice = await whole_choice(self.job, self.shape, output)
        whole = protocol.ChatDelta(content=choice.message.content, tool_calls=as_parts(choice.message.tool_calls))
        whole.reasoning = choice.message.reasoning or None
        for _ in [*self.items.take(whole), *self.finish(choice.finish_reason)]:
            pass
        await self.keep()
        return self.response

    async def events(self) -> AsyncIterator[bytes]:
        opening, logprobs = self.opening, TextLogprobs()
        self.response.status = "in_progress"
        async with aclosing(self.job.outputs("delta")) as stream:
            async for _, output in stream:
                (out,) = output.outputs
                for name in opening:
                    yield self.told(name)
                opening = ()
                for choice in self.shape.deltas(0, out):
                    for event in self.items.take(choice.delta, logprobs.of(choice)):
                        yield encoded(event)
                if out.finish_reason is not None:
                    reason = self.shape.ending(0, out).finish_reason
        ending = [*self.finish(reason)]
        await self.keep()
        for event in ending:
            yield encoded(event)

    def told(self, name: str) -> bytes:
        """An event with the response as it is."""
        return encoded(self.items.event(name, response=self.response))

    def finish(self, finish_reason: str | None) -> Iterator[ResponseEvent]:
        response, used = self.response, self.job.usage
        response.status = "incomplete" if finish_reason == "length" else "completed"
        if not self.items.output:
            yield from self.items.message()
        yield from self.items.close(response.status)
        if response.status == "incomplete":
            response.incomplete_details = Incomplete("max_output_tokens")
        else:
            response.completed_at = protocol.now()
        response.usage = ResponseUsage(
            used.prompt_tokens, used.completion_tokens, used.total_tokens, used.prompt_tokens_details
        )
        response.usage.output_tokens_details = protocol.ReasoningTokens(self.job.num_thinking)
        response.metrics = self.job.timings
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
