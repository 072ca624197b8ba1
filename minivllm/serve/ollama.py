"""/api/chat and /api/generate, Ollama's: a request becomes a chat's or a completion's, its answer lines of JSON.

A stream is JSON objects, one a line; the last has done=true, the reason and the figures. Where Ollama has defaults of
its own (a stream, temperature 0.8), they hold. A request without messages or prompt only loads the model, which is
there.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from minivllm.engine.output import CompletionOutput, RequestOutput
from minivllm.errors import BadRequest
from minivllm.serve import chat, completions, errors, generation, protocol
from minivllm.serve.bodies import taken, worked_out
from minivllm.serve.chat import ChatShape
from minivllm.serve.connection import JSONAnswer, LineStream, reply
from minivllm.serve.generation import Job, Service, attach, final_outputs
from minivllm.serve.infill import infill_of
from minivllm.serve.logprobs import likely_tokens
from minivllm.serve.off_loop import by_size
from minivllm.serve.ollama_protocol import (
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaCall,
    OllamaCalledFunction,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from minivllm.serve.reasoning import ask as reasoning
from minivllm.serve.reasoning.ask import Thinking, with_thinking
from minivllm.serve.structured import JSONSchema, ResponseFormat, called
from minivllm.serve.tools.answer import Answer, PlainAnswer
from minivllm.serve.tools.ask import asked

NAMES = {
    "max_completion_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
}
LATEST = ":latest"  # the tag of a name without one


async def api_chat(request: Request) -> ASGIApp:
    body, service = await taken(request, OllamaChatRequest), request.app.state.service
    name = known_name(body.model, service)
    if not body.messages:
        empty = OllamaChatAnswer(model=body.model or service.model, message=OllamaAnswerMessage())
        return loaded(empty, body.keep_alive)
    job, shape = await worked_out(request, lambda: prepare_chat(body, name, service))
    attach(job, request)
    if body.stream is False:
        return JSONAnswer(chat_answer(job, shape, body), job.id)
    return LineStream(chat_lines(job, shape, body), job.id, errors.ollama_line)


async def api_generate(request: Request) -> ASGIApp:
    body, service = await taken(request, OllamaGenerateRequest), request.app.state.service
    name = known_name(body.model, service)
    if not body.prompt:
        return loaded(OllamaGenerateAnswer(model=body.model or service.model, response=""), body.keep_alive)
    job, answer = await worked_out(request, lambda: prepare_completion(body, name, service))
    attach(job, request)
    if body.stream is False:
        return JSONAnswer(text_answer(job, body, answer), job.id)
    return LineStream(text_lines(job, body, answer), job.id, errors.ollama_line)


def prepare_chat(body: OllamaChatRequest, name: str | None, service: Service) -> tuple[Job, ChatShape]:
    with errors.renaming(NAMES):
        asks = as_chat(body, name, conversation(body.messages), service)
        asks.tools = [protocol.Tool(type="function", function=tool.function) for tool in body.tools or ()] or None
        job, shape = chat.prepare(asks, service)
    if body.format:  # else a forced call's schema may hold the answer
        job.params = called(job.params, "format")
    return job, shape


def prepare_completion(body: OllamaGenerateRequest, name: str | None, service: Service) -> tuple[Job, Answer]:
    with errors.renaming(NAMES):
        asks, thought = as_completion(body, name, service)
        job, _ = completions.prepare(asks, service)
    job.params = called(job.params, "format")
    if thought is None:
        return job, PlainAnswer()
    job.params = with_thinking(job.params, thought, None, service.engine.tokenizer)
    job.find_answer = thought.reader
    return job, thought.answer(PlainAnswer())


def loaded(answer: OllamaAnswer, keep_alive: Any) -> Response:
    """To a request without a prompt. One that keeps the model for no time at all unloads it, by Ollama's API; here it
    stays, which the ignored field's header says."""
    answer.done, answer.done_reason = True, "unload" if _is_no_time(keep_alive) else "load"
    return reply(answer)


def _is_no_time(keep_alive: Any) -> bool:
    """0, "0", "0s", "0m0s"."""
    return re.fullmatch(r"[+-]?(0+(\.0*)?(ns|us|µs|ms|s|m|h)?)+", str(keep_alive)) is not None


def known_name(name: str | None, service: Service) -> str | None:
    """By the name that the server knows it by: "x:latest" is "x". Raises ApiError 404."""
    names = service.served
    if name is not None and name not in names and name.removesuffix(LATEST) in names:
        return name.removesuffix(LATEST)
    service.check_model(name)
    return name


# ------------------------------------------------------------------------------------------------------- the requests


def sampling(options: OllamaOptions | None) -> dict[str, Any]:
    """With Ollama's defaults, by the names of protocol.Sampling."""
    options = options or OllamaOptions()
    penalised = options.repeat_last_n != 0
    return {
        "temperature": 0.8 if options.temperature is None else options.temperature,
        "top_k": 40 if options.top_k is None else options.top_k,
        "top_p": 0.9 if options.top_p is None else options.top_p,
        "min_p": options.min_p,
        "seed": None if options.seed is None or options.seed < 0 else options.seed,
        "stop": options.stop or None,
        "repetition_penalty": options.repeat_penalty if penalised else None,
        "presence_penalty": options.presence_penalty if penalised else None,
        "frequency_penalty": options.frequency_penalty if penalised else None,
    }


def max_tokens(options: OllamaOptions | None, most: int) -> int:
    """At most `most`: Ollama lets one ask for more than the context has."""
    wanted = options.num_predict if options is not None and options.num_predict is not None else 0
    return min(wanted, most) if wanted > 0 else most


def response_format(given: Any) -> ResponseFormat | None:
    if given is None or given == "":
        return None
    if given == "json":
        return ResponseFormat(type="json_object")
    if not isinstance(given, dict):
        raise BadRequest('format must be "json" or a JSON Schema, an object', "format")
    schema = JSONSchema(name="answer", schema=given)
    return ResponseFormat(type="json_schema", json_schema=schema)


def thinking(think: bool | str | None) -> dict[str, Any] | None:
    """For the chat template."""
    if think is None:
        return None
    level = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {"enable_thinking": bool(think), **level}


def shared_fields(body: OllamaRequest, name: str | None) -> dict[str, Any]:
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")
    return {"model": name, "response_format": response_format(body.format), **sampling(body.options)}


def as_chat(
    body: OllamaRequest, name: str | None, messages: list[protocol.Message], service: Service
) -> protocol.ChatRequest:
    goes_on = messages[-1].role == "assistant" and not messages[-1].tool_calls
    return protocol.ChatRequest(
        **shared_fields(body, name),
        messages=messages,
        max_completion_tokens=max_tokens(body.options, service.engine.max_model_len),
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        chat_template_kwargs=thinking(body.think),
        continue_final_message=goes_on or None,
    )


def conversation(messages: Sequence[OllamaMessage]) -> list[protocol.Message]:
    calls = OpenCalls()
    return [as_message(message, f"messages[{i}]", calls) for i, message in enumerate(messages)]


def as_message(message: OllamaMessage, path: str, calls: OpenCalls) -> protocol.Message:
    role = message.role.lower()
    made = protocol.Message(role=role, content=message.content or "", reasoning_content=message.thinking)
    if message.tool_calls:
        made.tool_calls = [
            protocol.CalledTool(
                calls.add(call.id, call.function.name),
                protocol.CalledFunction(call.function.name, json.dumps(call.function.arguments, ensure_ascii=False)),
            )
            for call in message.tool_calls
        ]
    if role == "tool":
        made.tool_call_id = calls.answered(message, path)
    return made


class OpenCalls:
    """Calls that no result has come for: Ollama's may have no ids."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # by id
        self.of_tool: defaultdict[str, dict[str, None]] = defaultdict(dict)  # the ids, by name
        self.num_made = 0

    def add(self, id: str | None, name: str) -> str:
        self.num_made += 1
        id = id or f"call{self.num_made:05}"  # nine letters and digits, as Mistral's templates want them
        if id in self.names:
            del self.of_tool[self.names[id]][id]
        self.names[id] = name
        self.of_tool[name][id] = None
        return id

    def answered(self, message: OllamaMessage, path: str) -> str:
        """The id of the call that this result is of: the one it names, or the first of its tool, or the first."""
        open_ones = self.of_tool[message.tool_name] if message.tool_name else self.names
        id = message.tool_call_id or next(iter(open_ones), None)
        if id not in open_ones:
            raise BadRequest(f"{path}: no earlier call of the assistant waits for this result", path)
        del self.of_tool[self.names.pop(id)][id]
        return id


def as_completion(
    body: OllamaGenerateRequest, name: str | None, service: Service
) -> tuple[protocol.CompletionRequest, Thinking | None]:
    """With what tells thinking from the answer, where the chat template has made the prompt."""
    thought = None
    if body.raw and (body.system or body.context):
        raise BadRequest("raw=true takes the prompt as it is: no system and no context", "raw")
    fields = shared_fields(body, name)
    if body.suffix:
        infill = infill_of(service.engine.tokenizer, "suffix")
        text, special = infill.prompt(body.prompt, body.suffix), True
        fields["stop_token_ids"] = infill.ends
    elif body.raw:
        text, special = body.prompt, True
    else:
        system = [protocol.Message(role="system", content=body.system)] if body.system else []
        asks = as_chat(body, name, [*system, protocol.Message(role="user", content=body.prompt)], service)
        text, special = chat.render(asks, asked(asks), service), False
        thought = reasoning.thinking(asks, text, service.reasoning_parser)
    prompt = [*(body.context or ()), *generation.tokenize(service, text, special).token_ids]
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = max_tokens(body.options, service.engine.max_model_len)
    return protocol.CompletionRequest(**fields, prompt=prompt, max_tokens=most, logprobs=logprobs), thought


# --------------------------------------------------------------------------------------------------------- the answers


def figures(job: Job, output: RequestOutput, finish_reason: str | None) -> dict[str, Any]:
    """What a last line has beside its text."""
    times = output.metrics
    return {
        "done": True,
        "done_reason": "length" if finish_reason == "length" else "stop",
        "total_duration": nanoseconds(time.monotonic() - job.arrival_time),
        "load_duration": 0,
        "prompt_eval_count": job.usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(times.ttft or 0.0) if times else 0,
        "eval_count": job.usage.completion_tokens,
        "eval_duration": nanoseconds(times.last_token_time - times.first_token_time) if times else 0,
    }


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


async def chat_answer(job: Job, shape: ChatShape, body: OllamaChatRequest) -> OllamaChatAnswer:
    output, _ = await last_output(job)
    choice = await generation.whole_choice(job, shape, output)
    message = OllamaAnswerMessage(content=choice.message.content or "", thinking=choice.message.reasoning or UNSET)
    for call in choice.message.tool_calls or ():
        add_call(message, call)
    return OllamaChatAnswer(
        model=body.model or shape.model,
        message=message,
        logprobs=choice.logprobs.content if choice.logprobs else UNSET,
        **figures(job, output, choice.finish_reason),
    )


async def last_output(job: Job) -> tuple[RequestOutput, CompletionOutput]:
    (output,) = await final_outputs(job)
    return output, output.outputs[0]


def add_call(message: OllamaAnswerMessage, call: protocol.ToolCall) -> None:
    """A forced or broken call that is no JSON has no arguments to speak of; it is shown as text."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        message.content += call.function.arguments
        return
    calls = message.tool_calls or []
    calls.append(OllamaCall(call.id, OllamaCalledFunction(call.function.name, arguments, len(calls))))
    message.tool_calls = calls


async def chat_lines(job: Job, shape: ChatShape, body: OllamaChatRequest) -> AsyncIterator[bytes]:
    model, calls = body.model or shape.model, Calls()
    async with aclosing(job.outputs("delta")) as stream:
        async for _, output in stream:
            (out,) = output.outputs
            for choice in shape.deltas(0, out):
                logprobs = choice.logprobs.content if choice.logprobs else UNSET
                for message in calls.take(choice.delta, logprobs):
                    yield line(OllamaChatAnswer(model=model, message=message, logprobs=logprobs))
            if out.finish_reason is not None:
                for message in calls.end():
                    yield line(OllamaChatAnswer(model=model, message=message))
                last, reason = output, shape.ending(0, out).finish_reason
    yield line(OllamaChatAnswer(model=model, message=OllamaAnswerMessage(), **figures(job, last, reason)))


class Calls:
    """A chat's deltas as messages, in which every call is whole."""

    def __init__(self) -> None:
        self.open: protocol.ToolCall | None = None
        self.num_told = 0

    def take(self, delta: protocol.ChatDelta, logprobs: Any) -> Iterator[OllamaAnswerMessage]:
        if delta.content or delta.reasoning or (logprobs and not delta.tool_calls):
            yield OllamaAnswerMessage(content=delta.content or "", thinking=delta.reasoning or UNSET)
        for part in delta.tool_calls or ():
            if part.id:
                yield from self.end()
                self.open = protocol.ToolCall(part.id, protocol.FunctionCall(part.function.name))
            self.open.function.arguments += part.function.arguments

    def end(self) -> Iterator[OllamaAnswerMessage]:
        if self.open is not None:
            message, call, self.open = OllamaAnswerMessage(), self.open, None
            add_call(message, call)
            for called in message.tool_calls or ():
                called.function.index = self.num_told
                self.num_told += 1
            yield message


async def text_answer(job: Job, body: OllamaGenerateRequest, answer: Answer) -> OllamaGenerateAnswer:
    output, out = await last_output(job)
    message = await by_size(len(out.text), lambda: answer.message(out.text), job.client)
    return OllamaGenerateAnswer(
        model=body.model or job.model,
        response=message.content or "",
        thinking=message.reasoning or UNSET,
        logprobs=likely(job, out, body),
        context=UNSET if body.raw else [*job.prompts[0].token_ids, *out.token_ids],
        **figures(job, output, out.finish_reason),
    )


async def text_lines(job: Job, body: OllamaGenerateRequest, answer: Answer) -> AsyncIterator[bytes]:
    model, context = body.model or job.model, list(job.prompts[0].token_ids)
    async with aclosing(job.outputs("delta")) as stream:
        async for _, output in stream:
            (out,) = output.outputs
            context += out.token_ids
            logprobs = likely(job, out, body)
            for delta in answer.deltas(out.text, out.finished) or [protocol.ChatDelta()] * bool(logprobs):
                told = {"response": delta.content or "", "thinking": delta.reasoning or UNSET}
                yield line(OllamaGenerateAnswer(model=model, **told, logprobs=logprobs))
                logprobs = UNSET
    ends = figures(job, output, out.finish_reason)
    yield line(OllamaGenerateAnswer(model=model, response="", context=UNSET if body.raw else context, **ends))


def likely(job: Job, out: CompletionOutput, body: OllamaRequest) -> list[protocol.TokenLogprob] | UnsetType:
    if out.logprobs is None:
        return UNSET
    found = likely_tokens(out, job.service.engine.tokenizer, body.top_logprobs or 0)
    return [
        protocol.TokenLogprob(*taken[1:], [protocol.TopLogprob(*each[1:]) for each in likeliest])
        for taken, likeliest in found
    ]


def line(data: Struct) -> bytes:
    return msgspec.json.encode(data) + b"\n"
