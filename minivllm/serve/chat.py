"""/v1/chat/completions: messages through the model's chat template, answers as messages or their deltas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType

from minivllm.engine.output import CompletionOutput, Logprob, RequestOutput
from minivllm.errors import BadRequest
from minivllm.request import SamplingParams
from minivllm.serve.generation import (
    Job,
    Prompt,
    Service,
    check_context,
    finite,
    new_id,
    prompt_logprobs,
    tokenize,
    wants_tokens,
)
from minivllm.serve.protocol import (
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Message,
    TokenLogprob,
    TopLogprob,
    Usage,
    now,
)
from minivllm.serve.tools.answer import ToolAnswer
from minivllm.serve.tools.ask import ToolUse, asked, enforced
from minivllm.serve.tools.parsers import ArgumentsParser, ArrayParser, ToolParser
from minivllm.structured.params import StructuredParams

RESERVED = {"self", "template", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


async def prepare(body: ChatRequest, service: Service) -> tuple[Job, ChatShape]:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise BadRequest("max_tokens is the older name of max_completion_tokens: give one of them", "max_tokens")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, name)
    params = body.sampling(max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    use = asked(body)
    parser = find_parser(use, service)
    params = for_tools(params, use, parser, service)
    prompt = await tokenize(service, render(body, use, service), add_special_tokens=False)
    check_context(service, [prompt], max_tokens, "messages", name)
    job = Job(service, new_id("chatcmpl"), [prompt], params, body)
    return job, ChatShape(job.id, service, body, lambda: parser and ToolAnswer(parser(use.names), use.parallel))


def find_parser(use: ToolUse, service: Service) -> type[ToolParser] | None:
    """None: the request has no tools, or wants no calls. A forced call is JSON, whatever the model is used to."""
    if use.mode != "auto":
        return {"none": None, "required": ArrayParser, "named": ArgumentsParser}[use.mode]
    if service.tool_parser is None:
        why = "this model's chat template writes calls in a form that no parser here reads"
        raise BadRequest(f'{why}; start the server with --tool-call-parser, or use tool_choice "required"', "tools")
    return service.tool_parser


def for_tools(
    params: SamplingParams, use: ToolUse, parser: type[ToolParser] | None, service: Service
) -> SamplingParams:
    """With the grammar of a forced call, and with special tokens in the text if a call's markers are such."""
    if parser is not None and params.structured is not None:
        why = "an answer held to it could hold no calls as well"
        raise BadRequest(f'{params.structured.field}: {why}; use it with tool_choice "none"', params.structured.field)
    if (schema := enforced(use)) is not None:
        params = params.replace(structured=StructuredParams(json=schema, disable_any_whitespace=True, field=use.field))
    tokenizer = service.engine.tokenizer
    markers = [tokenizer.encode(marker, add_special_tokens=False) for marker in (parser.markers if parser else ())]
    hidden = any(len(ids) == 1 and ids[0] in tokenizer.special_ids for ids in markers)
    return params.replace(skip_special_tokens=False) if hidden else params


def render(body: ChatRequest, use: ToolUse, service: Service) -> str:
    if not body.messages:
        raise BadRequest("messages is empty: give at least one, such as a user's", "messages")
    goes_on = bool(body.continue_final_message)
    add_prompt = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    if goes_on and (add_prompt or body.messages[-1].role != "assistant"):
        why = "needs a last message of the assistant, and add_generation_prompt=false"
        raise BadRequest(f"continue_final_message {why}", "continue_final_message")
    if reserved := RESERVED & set(body.chat_template_kwargs or {}):
        raise BadRequest(f"chat_template_kwargs may not set {sorted(reserved)[0]}", "chat_template_kwargs")
    return service.engine.tokenizer.apply_chat_template(
        [as_template_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)],
        add_generation_prompt=add_prompt,
        continue_final_message=goes_on,
        tools=use.for_template(),
        **(body.chat_template_kwargs or {}),
    )


def as_template_message(message: Message, path: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        for i, part in enumerate(content):
            if part.type != "text" or part.text is None:
                where = f"{path}.content[{i}]"
                raise BadRequest(f'{where}: only parts of type "text", with a text, are supported', where)
        content = "\n".join(part.text for part in content)
    if content is None and not message.tool_calls:
        raise BadRequest(f"{path}.content is missing", f"{path}.content")
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [as_template_call(call) for call in message.tool_calls or ()],
    }
    return {"role": role, "content": content or ""} | {key: value for key, value in optional.items() if value}


def as_template_call(call: CalledTool) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


class ChatShape:
    def __init__(self, id: str, service: Service, body: ChatRequest, make_tool_answer: Callable[[], ToolAnswer | None]):
        self.id, self.model, self.body, self.created = id, service.answers_as(body), body, now()
        self.tokenizer = service.engine.tokenizer
        self.prompt_token_ids: list[int] | UnsetType = UNSET  # to go with the next chunk
        self.make_tool_answer = make_tool_answer
        self.tool_answers: dict[int, ToolAnswer | None] = {}  # of a stream, by choice

    def opening(self, choice: int, prompt: Prompt, output: RequestOutput) -> ChatChunkChoice:
        if self.body.return_token_ids and choice == 0:
            self.prompt_token_ids = prompt.token_ids
        return ChatChunkChoice(index=choice, delta=ChatDelta(role="assistant", content=""))

    def deltas(self, choice: int, out: CompletionOutput) -> list[ChatChunkChoice]:
        """One for text, one for each part of a call; tokens and logprobs go with the first."""
        if (answer := self._tool_answer(choice)) is not None:
            deltas = answer.deltas(out.text, finished=out.finished)
        else:
            deltas = [ChatDelta(content=out.text)] if out.text else []
        if not deltas and not wants_tokens(self.body, out):
            return []
        first, *more = deltas or [ChatDelta()]
        return [
            ChatChunkChoice(index=choice, delta=first, logprobs=self._logprobs(out), token_ids=self._token_ids(out)),
            *(ChatChunkChoice(index=choice, delta=delta) for delta in more),
        ]

    def ending(self, choice: int, out: CompletionOutput) -> ChatChunkChoice:
        answer, reason = self._tool_answer(choice), out.finish_reason
        reason = answer.finish_reason(reason) if answer else reason
        return ChatChunkChoice(index=choice, finish_reason=reason, stop_reason=out.stop_reason)

    def whole(self, choice: int, prompt: Prompt, output: RequestOutput, out: CompletionOutput) -> ChatChoice:
        message, reason = ChatMessage(out.text), out.finish_reason
        if (answer := self.make_tool_answer()) is not None:
            message, reason = answer.message(out.text), answer.finish_reason(reason)
        return ChatChoice(
            index=choice,
            message=message,
            logprobs=self._logprobs(out),
            finish_reason=reason,
            stop_reason=out.stop_reason,
            token_ids=self._token_ids(out),
        )

    def _tool_answer(self, choice: int) -> ToolAnswer | None:
        if choice not in self.tool_answers:
            self.tool_answers[choice] = self.make_tool_answer()
        return self.tool_answers[choice]

    def wrap(
        self,
        choices: list[Any],
        usage: Usage | None | UnsetType,
        outputs: list[RequestOutput] | None = None,
    ) -> ChatChunk | ChatCompletion:
        common = {"id": self.id, "model": self.model, "created": self.created, "choices": choices, "usage": usage}
        if outputs is None:
            prompt_token_ids, self.prompt_token_ids = self.prompt_token_ids, UNSET
            return ChatChunk(**common, prompt_token_ids=prompt_token_ids)
        if self.body.return_token_ids:
            common["prompt_token_ids"] = outputs[0].prompt_token_ids
        if self.body.prompt_logprobs is not None:
            common["prompt_logprobs"] = prompt_logprobs(outputs[0])
        return ChatCompletion(**common)

    def _logprobs(self, out: CompletionOutput) -> ChatLogprobs | None:
        if out.logprobs is None:
            return None
        return ChatLogprobs([self._position(*each) for each in zip(out.token_ids, out.logprobs, strict=True)])

    def _position(self, taken: int, position: dict[int, Logprob]) -> TokenLogprob:
        def triple(token: int) -> tuple[str, float, list[int]]:
            lp = position[token]
            return lp.decoded_token, finite(lp.logprob), list(self.tokenizer.token_bytes(token))

        likeliest = sorted(position, key=lambda token: -position[token].logprob)[: self.body.top_logprobs or 0]
        return TokenLogprob(*triple(taken), [TopLogprob(*triple(token)) for token in likeliest])

    def _token_ids(self, out: CompletionOutput) -> list[int] | UnsetType:
        return list(out.token_ids) if self.body.return_token_ids else UNSET
