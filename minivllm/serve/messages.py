"""/v1/messages, Anthropic's API: a request becomes a chat request, and the chat's answer a message of blocks.

So templates, tools, stop strings, thinking and structured output are those of /v1/chat/completions. A last message of
the assistant is a beginning that the answer goes on with. Messages of one role in a row are one turn. Thinking blocks
are signed, since clients send back only those that are, and nobody checks the signature.
"""

from __future__ import annotations

import hashlib
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
from minivllm.serve import bodies, chat, errors, generation, messages_protocol, protocol, structured
from minivllm.serve.bodies import taken, worked_out
from minivllm.serve.chat import ChatShape
from minivllm.serve.connection import EventStream, JSONAnswer, reply
from minivllm.serve.generation import Job, Service, attach, final_outputs, new_id, whole_choice
from minivllm.serve.messages_protocol import (
    AdaptiveThinking,
    AutoChoice,
    CountTokensRequest,
    CustomTool,
    DisabledThinking,
    EnabledThinking,
    InputTokens,
    MessageAnswer,
    MessageEvent,
    MessagesRequest,
    MessageTurn,
    MessageUsage,
    NoneChoice,
    OutputDetails,
    TextAnswer,
    TextBlock,
    ThinkingAnswer,
    ThinkingBetweenTools,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseAnswer,
    ToolUseBlock,
)
from minivllm.serve.protocol import NO_EFFORT, ChatChunkChoice, ChatRequest, Message
from minivllm.serve.reasoning.ask import SWITCHES
from minivllm.serve.tools.ask import asked

NAMES = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "response_format.json_schema": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
BILLING = "x-anthropic-billing-header"  # how a text begins that Claude Code sends for Anthropic's accounts
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(request: Request) -> ASGIApp:
    body, service = await taken(request, MessagesRequest), request.app.state.service
    service.check_model(body.model)
    job, shape = await worked_out(request, lambda: prepare(body, service))
    attach(job, request)
    if body.stream:
        return EventStream(events(job, shape), job.id, errors.message_event)
    return JSONAnswer(answer(job, shape), job.id)


def prepare(body: MessagesRequest, service: Service) -> tuple[Job, ChatShape]:
    asks = as_chat(body)
    if service.reasoning_parser is None:
        asks.thinking_token_budget = None
    with errors.renaming(NAMES):
        job, shape = chat.prepare(asks, service)
    job.params = structured.renamed(job.params, NAMES)
    job.id, job.ignored = new_id("msg").replace("-", "_"), ignored_thinking(asks, body, service)
    return job, shape


async def count_tokens(request: Request) -> Response:
    body, service = await taken(request, CountTokensRequest), request.app.state.service
    service.check_model(body.model)
    count, ignored = await worked_out(request, lambda: counted(body, service))
    bodies.note(request, ignored)
    return reply(InputTokens(count))


def counted(body: CountTokensRequest, service: Service) -> tuple[int, bodies.Ignored]:
    """The length of its prompt, and what it asks for in vain."""
    asks = as_chat(body)
    prompt = generation.tokenize(service, chat.render(asks, asked(asks), service), add_special_tokens=False)
    return len(prompt.token_ids), ignored_thinking(asks, body, service)


# -------------------------------------------------------------------------------------------- the request, as a chat


def as_chat(body: CountTokensRequest) -> ChatRequest:
    """Raises BadRequest, naming the field."""
    if not body.messages:
        raise BadRequest("messages is empty: give at least one", "messages")
    said = conversation(body.messages)
    if not said:
        raise BadRequest("messages: all of them are empty: give one some content", "messages")
    turns = [*system(body.system), *said]
    begun = turns[-1].role == "assistant"
    if begun and turns[-1].tool_calls:
        raise BadRequest("messages: the last one's tool_use has no tool_result", "messages")
    fields: dict[str, Any] = {"model": body.model, "messages": turns, **tool_fields(body), **thinking_fields(body)}
    fields["chat_template_kwargs"] = fields.get("chat_template_kwargs", {}) | (body.chat_template_kwargs or {})
    if begun:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.output_config is not None and (form := body.output_config.format) is not None:
        schema = structured.JSONSchema(name="answer", schema=form.schema)
        fields["response_format"] = structured.ResponseFormat(type="json_schema", json_schema=schema)
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "cache_salt")}
        fields["stop"] = body.stop_sequences or None
    return ChatRequest(**fields)


def system(given: str | list[TextBlock] | None) -> list[Message]:
    """Claude Code's text for Anthropic's accounts, another one in every request, is left out, as in vLLM: no prompt
    behind it would be found in the cache."""
    texts = [given or ""] if isinstance(given, str | None) else [block.text for block in given]
    text = "\n".join(text for text in texts if not text.startswith(BILLING))
    return [Message(role="system", content=text)] if text else []


def conversation(turns: Sequence[MessageTurn]) -> list[Message]:
    """Messages of the user in a row are one, and so are the assistant's up to one with calls."""
    called: set[str] = set()
    last_of_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
    rows: list[list[Message]] = []
    for i, turn in enumerate(turns):
        if turn.clear_at == "next_user_message" and i < last_of_user:
            continue
        for message in split(turn, f"messages[{i}]", called):
            before = rows[-1][-1] if rows else None
            same = before is not None and before.role == message.role
            goes_on = same and message.role in ("user", "assistant") and not before.tool_calls
            if goes_on:
                rows[-1].append(message)
            else:
                rows.append([message])
    return [as_one(row) for row in rows]


def as_one(row: Sequence[Message]) -> Message:
    if len(row) == 1:
        return row[0]
    thoughts = [message.reasoning_content for message in row if message.reasoning_content]
    return Message(
        role=row[0].role,
        content=("\n" if row[0].role == "user" else "").join(message.content for message in row),
        tool_calls=row[-1].tool_calls,
        reasoning_content="\n".join(thoughts) or None,
    )


def split(turn: MessageTurn, path: str, called: set[str]) -> Iterator[Message]:
    """One turn as a chat's messages: each tool result is one of its own. called: the ids of earlier calls."""
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
        return
    texts, calls, thoughts = [], [], []
    for j, block in enumerate(turn.content):
        where = f"{path}.content[{j}]"
        match block:
            case TextBlock():
                texts.append(block.text)
            case _ if turn.role == "system":
                raise BadRequest(f"{where}: a message of role system has texts alone", where)
            case ThinkingBlock() if turn.role == "assistant":
                thoughts.append(block.thinking)
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
    if texts or calls or thoughts:
        thought = "\n".join(thoughts) or None
        yield Message(role=turn.role, content="\n".join(texts), tool_calls=calls or None, reasoning_content=thought)


def result_text(block: ToolResultBlock) -> str:
    content = block.content or ""
    texts = [content] if isinstance(content, str) else [part.text for part in content if isinstance(part, TextBlock)]
    text = "\n".join(texts)
    return f"Error: {text}" if block.is_error else text


def thinking_fields(body: CountTokensRequest) -> dict[str, Any]:
    """Templates that have a switch for thinking are told; others read none of these variables."""
    match body.thinking:
        case DisabledThinking():
            return {"chat_template_kwargs": dict.fromkeys(SWITCHES, False), "include_reasoning": False}
        case EnabledThinking() | AdaptiveThinking() as asked_for:
            fields = {"chat_template_kwargs": dict.fromkeys(SWITCHES, True)}
            fields["include_reasoning"] = asked_for.display != "omitted"
            return fields | {"thinking_token_budget": getattr(asked_for, "budget_tokens", None)}
    return {}


def ignored_thinking(asks: ChatRequest, body: CountTokensRequest, service: Service) -> bodies.Ignored:
    """What was asked for about thinking, by its name here, that this model does not follow, and why."""
    ignored = {"output_config.effort": NO_EFFORT} if chat.ignored_effort(asks, service) else {}
    return ignored if follows(body.thinking, service) else {"thinking": NO_EFFORT, **ignored}


def follows(thinking: Any, service: Service) -> bool:
    thinks = service.reasoning_parser is not None
    match thinking:
        case None:
            return True
        case DisabledThinking():
            return not thinks or bool(service.engine.tokenizer.template_variables.intersection(SWITCHES))
    return thinks and not isinstance(thinking, ThinkingBetweenTools)


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
    made = usage(used.prompt_tokens, used.prompt_tokens_details.cached_tokens, used.completion_tokens)
    if job.thinking is not None:
        made.output_tokens_details = OutputDetails(job.num_thinking)
    return made


def stopped(finish_reason: str | None, out: CompletionOutput) -> dict[str, str | None]:
    if finish_reason == "stop" and isinstance(out.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": out.stop_reason}
    return {"stop_reason": STOP_REASONS.get(finish_reason), "stop_sequence": None}


async def answer(job: Job, shape: ChatShape) -> MessageAnswer:
    (output,) = await final_outputs(job)
    (out,) = output.outputs
    choice = await whole_choice(job, shape, output)
    text, calls = choice.message.content, choice.message.tool_calls or ()
    thought = choice.message.reasoning or ""
    content: list[Any] = [ThinkingAnswer(thought, signature(thought))] if thought else []
    content += [TextAnswer(text)] if text else []
    content += [as_block(call) for call in calls]
    ends = stopped(choice.finish_reason, out)
    return MessageAnswer(id=job.id, model=shape.model, content=content, usage=job_usage(job), **ends)


def signature(thought: str) -> str:
    return hashlib.sha256(thought.encode()).hexdigest()


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
        self.thought = ""  # of the block of thinking

    def take(self, choice: ChatChunkChoice) -> Iterator[MessageEvent]:
        if thought := choice.delta.reasoning:
            if self.open != "thinking":
                yield from self.begin(ThinkingAnswer(""))
            self.thought += thought
            yield self.delta({"type": "thinking_delta", "thinking": thought})
        if choice.delta.content:
            if self.open != "text":
                yield from self.begin(TextAnswer(""))
            yield self.delta({"type": "text_delta", "text": choice.delta.content})
        for part in choice.delta.tool_calls or ():
            if part.id:
                yield from self.begin(ToolUseAnswer(part.id, part.function.name))
            if part.function.arguments:
                yield self.delta({"type": "input_json_delta", "partial_json": part.function.arguments})

    def begin(self, block: TextAnswer | ThinkingAnswer | ToolUseAnswer) -> Iterator[MessageEvent]:
        yield from self.close()
        self.open, self.num_begun = block.type, self.num_begun + 1
        yield MessageEvent(type="content_block_start", index=self.num_begun - 1, content_block=block)

    def delta(self, delta: dict[str, Any]) -> MessageEvent:
        return MessageEvent(type="content_block_delta", index=self.num_begun - 1, delta=delta)

    def close(self) -> Iterator[MessageEvent]:
        if self.open == "thinking":
            yield self.delta({"type": "signature_delta", "signature": signature(self.thought)})
            self.thought = ""
        if self.open is not None:
            self.open = None
            yield MessageEvent(type="content_block_stop", index=self.num_begun - 1)


def event(data: messages_protocol.MessageEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data.type.encode(), msgspec.json.encode(data))
