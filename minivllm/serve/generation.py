"""From a parsed request to its answer: what /v1/chat/completions and /v1/completions share.

A `Job` is one HTTP request: some prompts, n choices each. A `Shape` turns the engine's outputs into the endpoint's
JSON; it is all that the two endpoints do differently. Choice number = prompt number x n + the choice's index.

A job's engine requests live exactly as long as its iterator: closing it, for whatever reason, aborts them and frees
their blocks. `watched` (serve/connection.py) closes it when the client leaves.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.metrics import Metrics
from minivllm.engine.output import CompletionOutput, RequestOutput
from minivllm.engine.tokenizer import LONG_TEXT
from minivllm.errors import BadRequest
from minivllm.plan import NO_DISTRIBUTION
from minivllm.registry import did_you_mean
from minivllm.request import BeamSearchParams, SamplingParams
from minivllm.serve import errors
from minivllm.serve.protocol import CompletionRequest, PromptLogprob, PromptLogprobs, Sampling, Usage
from minivllm.serve.telemetry import CONTEXT_HEADERS, NoTracing, Tracing
from minivllm.serve.tools.parsers import ToolParser

LONGEST_TOKEN = 256  # characters: no vocabulary has longer ones
DONE = b"data: [DONE]\n\n"


class Prompt(NamedTuple):
    token_ids: list[int]
    text: str


@dataclass(slots=True)
class Service:
    """What every request needs."""

    engine: AsyncLLM
    metrics: Metrics
    names: Sequence[str]  # of the model; answers bear the first
    tool_parser: type[ToolParser] | None = None  # None: this model's calls cannot be read
    max_waiting: int | None = None
    tracing: Tracing | NoTracing = field(default_factory=NoTracing)
    num_open: int = 0  # sequences asked of the engine, whose answers are not complete

    def admit(self) -> None:
        """Raises ApiError 429 while as many sequences wait as may. Those that the last step left waiting are counted,
        and, since a burst can come between two steps, all that are open above a full batch."""
        if self.max_waiting is None:
            return
        stats = self.engine.stats
        full = len(stats.parts) * self.engine.config.scheduler.max_num_seqs
        if self.num_open >= full + self.max_waiting or stats.num_waiting >= max(1, self.max_waiting):
            raise errors.queue_full()

    @property
    def model(self) -> str:
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a name that neither the model nor an adapter has."""
        names = [*self.names, *(adapter.name for adapter in self.engine.list_loras())]
        if name is not None and name not in names:
            message = f'the model "{name}" is not served here.{did_you_mean(name, names)} Served: {", ".join(names)}'
            raise errors.ApiError(404, message, code="model_not_found", param="model")

    def adapter_of(self, body: Sampling) -> str:
        """The LoRA adapter that a request's `model` names; "" for the model itself. The engine knows if it is there."""
        return "" if body.model is None or body.model in self.names else body.model

    def answers_as(self, body: Sampling) -> str:
        return self.adapter_of(body) or self.model


@dataclass(slots=True)
class Job:
    service: Service
    id: str
    prompts: list[Prompt]
    params: SamplingParams | BeamSearchParams
    body: Sampling
    score_only: bool = False  # the prompt's logprobs are wanted, no token of an answer
    trace_context: Mapping[str, str] = field(default_factory=dict)  # of the client's headers (telemetry.py)
    arrival_time: float = field(default_factory=time.monotonic)
    tenant: str = ""  # whose part of the prefix cache it uses (guard.Keys.tenant); "": everybody's
    usage: Usage = field(default_factory=Usage)
    num_generated: Counter[int] = field(default_factory=Counter)  # by choice

    @property
    def operation(self) -> str:
        """By OpenTelemetry's name."""
        return "text_completion" if isinstance(self.body, CompletionRequest) else "chat"

    @property
    def model(self) -> str:
        return self.service.answers_as(self.body)

    def choice(self, prompt: int, index: int) -> int:
        return prompt * self.params.n + index

    async def outputs(self, kind: str) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(prompt number, output) as they come. kind: "delta" or "final"."""
        self.service.admit()
        unfinished, reason = dict.fromkeys(range(len(self.prompts))), "abort"
        num_sequences = len(unfinished) * self.params.num_sequences
        self.service.num_open += num_sequences
        try:
            async with aclosing(merge([self._generate(i, kind) for i in range(len(self.prompts))])) as merged:
                async for i, output in merged:
                    raise_if_failed(output, self.params)
                    if self.score_only:
                        drop_answer(output)
                    self._count(i, output)
                    if output.finished:
                        del unfinished[i]
                    yield i, output
        except BadRequest:
            unfinished.clear()  # refused: it has never been a request of the engine
            raise
        except Exception:
            reason = "error"
            raise
        finally:
            self.service.num_open -= num_sequences
            for i in unfinished:
                self.service.metrics.on_request_end(reason)
                self.service.tracing.end(self, self._request_id(i), reason, None, 0)

    def _request_id(self, prompt: int) -> str:
        """What the engine calls it."""
        return f"{self.id}-{prompt}"

    def _generate(self, prompt: int, kind: str) -> AsyncIterator[RequestOutput]:
        return self.service.engine.generate(
            {"prompt_token_ids": self.prompts[prompt].token_ids},
            self.params,
            self._request_id(prompt),
            priority=self.body.priority or 0,
            cache_salt=self.tenant + (self.body.cache_salt or ""),
            output_kind=kind,
            lora_request=self.service.adapter_of(self.body) or None,
        )

    def _count(self, prompt: int, output: RequestOutput) -> None:
        for out in output.outputs:
            self.num_generated[self.choice(prompt, out.index)] += len(out.token_ids)
            self.usage.completion_tokens += len(out.token_ids)
        if output.finished:
            num_prompt = len(self.prompts[prompt].token_ids)
            self.usage.prompt_tokens += num_prompt
            self.usage.prompt_tokens_details.cached_tokens += output.num_cached_tokens or 0
            generated = [self.num_generated[self.choice(prompt, i)] for i in range(self.params.n)]
            reason = output.outputs[-1].finish_reason
            self.service.metrics.on_request_end(reason, output.metrics, num_prompt, max(generated))
            self.service.tracing.end(self, self._request_id(prompt), reason, output, sum(generated))
        self.usage.total_tokens = self.usage.prompt_tokens + self.usage.completion_tokens


def attach(job: Job, request: Request) -> None:
    """The job is this HTTP request's work: its line in the log counts it, its key says whose cache it shares, and its
    headers whose trace it belongs to."""
    request.state.job = job
    job.tenant = getattr(request.state, "tenant", "")
    job.trace_context = {name: value for name in CONTEXT_HEADERS if (value := request.headers.get(name))}


class Shape(Protocol):
    """One endpoint's JSON. An object serves one job, so it may remember what it has sent of each choice."""

    def opening(self, choice: int, prompt: Prompt, output: RequestOutput) -> Struct | None: ...
    def deltas(self, choice: int, out: CompletionOutput) -> list[Struct]: ...
    def ending(self, choice: int, out: CompletionOutput) -> Struct: ...
    def whole(self, choice: int, prompt: Prompt, output: RequestOutput, out: CompletionOutput) -> Struct: ...

    def wrap(
        self, choices: list[Any], usage: Usage | None | UnsetType, outputs: list[RequestOutput] | None = None
    ) -> Struct:
        """A chunk of a stream; with `outputs`, one a prompt, the whole answer."""
        ...


async def answer(job: Job, shape: Shape) -> Struct:
    outputs: dict[int, RequestOutput] = {}
    async with aclosing(job.outputs("final")) as stream:
        async for i, output in stream:
            outputs[i] = output
    ordered = [outputs[i] for i in range(len(job.prompts))]
    choices = [
        shape.whole(job.choice(i, out.index), job.prompts[i], output, out)
        for i, output in enumerate(ordered)
        for out in output.outputs
    ]
    return shape.wrap(choices, job.usage, ordered)


async def events(job: Job, shape: Shape) -> AsyncIterator[bytes]:
    """Server-sent events in OpenAI's order: each choice's opening, text and ending; usage, if asked for; [DONE]."""
    opened: set[int] = set()
    with_usage = bool(job.body.stream_options and job.body.stream_options.include_usage)
    null = None if with_usage else UNSET
    async with aclosing(job.outputs("delta")) as stream:
        async for i, output in stream:
            for out in output.outputs:
                choice = job.choice(i, out.index)
                if choice not in opened:
                    opened.add(choice)
                    if (opening := shape.opening(choice, job.prompts[i], output)) is not None:
                        yield event(shape.wrap([opening], null))
                for delta in shape.deltas(choice, out):
                    yield event(shape.wrap([delta], null))
                if out.finish_reason is not None:
                    yield event(shape.wrap([shape.ending(choice, out)], null))
    if with_usage:
        yield event(shape.wrap([], job.usage))
    yield DONE


def wants_tokens(body: Sampling, out: CompletionOutput) -> bool:
    """Tokens without text need no event, unless they are asked for."""
    return bool(out.token_ids) and (out.logprobs is not None or bool(body.return_token_ids))


def event(data: Struct) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(data)


def raise_if_failed(output: RequestOutput, params: SamplingParams | BeamSearchParams) -> None:
    """An engine-side failure or abort is no answer: the client is told, with a status that says whose fault it is."""
    if output.error == NO_DISTRIBUTION and isinstance(params, SamplingParams) and params.restricts:
        raise BadRequest("no token may follow: what the request allows and what it forbids leave nothing to choose")
    if output.error:
        errors.logger.error("request %s: %s", output.request_id, output.error)
        raise errors.ApiError(500, "the engine could not finish this request", code="internal_error")
    if any(out.finish_reason == "abort" for out in output.outputs):
        raise errors.closing()


def drop_answer(output: RequestOutput) -> None:
    for out in output.outputs:
        out.text, out.token_ids, out.logprobs = "", [], out.logprobs and []


async def merge(streams: list[AsyncIterator[RequestOutput]]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The items of all streams as they come, each with its stream's number. Closing it closes them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue = asyncio.Queue()

    async def pump(number: int, stream: AsyncIterator[RequestOutput]) -> None:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((number, item))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        live = len(tasks)
        while live:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                live -= 1
                item.result()
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --------------------------------------------------------------------------------------------------- before the engine


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


async def tokenize(service: Service, text: str, add_special_tokens: bool) -> Prompt:
    if len(text) > LONGEST_TOKEN * service.engine.max_model_len:  # counting its tokens would take minutes
        limit = service.engine.max_model_len
        raise errors.context_length(f"a prompt of {len(text):,} characters is over this model's {limit} tokens", None)
    encode = partial(service.engine.tokenizer.encode, text, add_special_tokens=add_special_tokens)
    # A long text would hold up every stream; the tokenizer gives the interpreter's lock back while it works.
    token_ids = await asyncio.to_thread(encode) if len(text) > LONG_TEXT else encode()
    return Prompt(token_ids, text)


def check_context(service: Service, prompts: list[Prompt], max_tokens: int | None, prompt_name: str, max_name: str):
    """Prompt and answer must fit the context. Raises ApiError 400 with both numbers, naming the field to change."""
    limit = service.engine.max_model_len
    for prompt in prompts:
        length = len(prompt.token_ids)
        check_length(service, length, prompt_name)
        if max_tokens is not None and length + max_tokens > limit:
            total = f"{length} (prompt) + {max_tokens} ({max_name}) = {length + max_tokens} tokens"
            fix = f"Ask for {limit - length} at most."
            raise errors.context_length(f"{total}; this model's context is {limit} tokens. {fix}", max_name)


def check_length(service: Service, length: int, prompt_name: str) -> None:
    """length: of a prompt, in tokens. Raises ApiError 400."""
    limit = service.engine.max_model_len
    if not length:
        raise BadRequest("the prompt has no tokens", prompt_name)
    if length >= limit:
        room = f"this model's context is {limit} tokens, at least one of which must be left for the answer"
        raise errors.context_length(f"the prompt is {length} tokens; {room}. Shorten the prompt.", prompt_name)


def finite(logprob: float) -> float:
    """JSON has no infinity. OpenAI says -9999 for what cannot happen."""
    return max(logprob, -9999.0)


def prompt_logprobs(output: RequestOutput) -> PromptLogprobs:
    return [
        position and {t: PromptLogprob(finite(lp.logprob), lp.rank, lp.decoded_token) for t, lp in position.items()}
        for position in output.prompt_logprobs or []
    ]
