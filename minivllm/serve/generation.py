"""From a parsed request to its answer: what /v1/chat/completions and /v1/completions share.

A `Job` is one HTTP request: some prompts, n choices each. A `Shape` turns the engine's outputs into the endpoint's
JSON; it is all that the two endpoints do differently. Choice number = prompt number x n + the choice's index.

A job's engine requests live exactly as long as its iterator: closing it, for whatever reason, aborts them and frees
their blocks. `watched` (serve/connection.py) closes it when the client leaves.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

import minivllm
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.audio import KEY as AUDIO
from minivllm.engine.metrics import Metrics
from minivllm.engine.output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from minivllm.engine.prepare import check_prompt_logprobs, num_logprobs
from minivllm.engine.prompt_embeds import KEY as PROMPT_EMBEDS
from minivllm.engine.tokenizer import LONGEST_TOKEN
from minivllm.errors import BadRequest
from minivllm.plan import LEADS_NOWHERE, NO_DISTRIBUTION, NO_LOGITS, NO_MEMORY, TOO_SLOW
from minivllm.registry import did_you_mean
from minivllm.request import BeamSearchParams, Beside, SamplingParams
from minivllm.serve import bodies, errors
from minivllm.serve.connection import encoded
from minivllm.serve.control_tokens import AsTokens, ControlTokens, plain
from minivllm.serve.deadline import Deadline
from minivllm.serve.keys import salted
from minivllm.serve.ledger import Ledger, OwnLedger
from minivllm.serve.limits import Demand, Limits, demand
from minivllm.serve.off_loop import by_size
from minivllm.serve.protocol import (
    Answer,
    CompletionRequest,
    PromptLogprob,
    PromptLogprobs,
    ReasoningTokens,
    Sampling,
    Usage,
)
from minivllm.serve.reasoning.answer import ThinkingTokens
from minivllm.serve.reasoning.reader import ReasoningReader
from minivllm.serve.request_limits import RequestLimits
from minivllm.serve.shares import LongAnswers, has_part, most_answer_bytes
from minivllm.serve.telemetry import CONTEXT_HEADERS, NoTracing, Tracing
from minivllm.serve.timings import NoTimings, RequestTimings, Timings, without_nulls
from minivllm.serve.tools.parsers import ToolParser

PER_CHOICE = 16  # that making a choice takes as long as, in log-probabilities
PER_TOKEN = 8  # that telling thinking from the answer takes as long as, in characters that are parsed
ENDED_AT_ONCE = 32  # prompts of a request that nobody waits for any more
DONE = b"data: [DONE]\n\n"


class Prompt(NamedTuple):
    token_ids: list[int]  # placeholders, where it is given as vectors
    text: str
    beside: Beside = Beside()

    @property
    def given(self) -> dict[str, Any]:
        """As the engine takes it."""
        if self.beside.token_ids:  # placeholders
            return {PROMPT_EMBEDS: self.beside}
        audio = {AUDIO: {"audio": self.beside}} if self.beside.items else {}
        return {"prompt_token_ids": self.token_ids, **audio}


@dataclass
class Service:
    """What every request needs."""

    engine: AsyncLLM
    metrics: Metrics
    names: Sequence[str]  # of the model; answers bear the first
    tool_parser: type[ToolParser] | None = None  # None: this model's calls cannot be read
    reasoning_parser: type[ReasoningReader] | None = None  # None: nor is its thinking told from its answers
    max_waiting: int | None = None
    tracing: Tracing | NoTracing = field(default_factory=NoTracing)
    timings: Timings | NoTimings = field(default_factory=NoTimings)
    control_tokens: ControlTokens = field(default_factory=AsTokens)  # what becomes of them in a client's words
    trust_templates: bool = False  # a request may bring its own chat template
    takes_embeds: bool = False  # and a prompt as vectors
    request_limits: RequestLimits = RequestLimits()  # of what one may cost (price.py)
    told: set[tuple[str, str]] = field(default_factory=set)  # path and field: what the log has said is ignored
    ledger: Ledger = field(default_factory=OwnLedger)  # of what clients hold
    limits: Limits = field(default_factory=Limits)
    client: str = ""  # on whose account it serves, where that is not a job's to say (pooling.service_for)

    @property
    def num_open(self) -> int:
        """Sequences whose answers are not complete."""
        return self.ledger.sequences.total()

    @property
    def long_answers(self) -> LongAnswers:
        return LongAnswers(self.ledger.answer_bytes)

    def admit(self, client: str, asked: int) -> None:
        """Raises ApiError 429 while as many sequences wait as may. Those that the last step left waiting are counted,
        and, since a burst can come between two steps, all that are open above a full batch. A queue that others have
        filled is not full for who has and asks for less than an equal part of it. Raises BadRequest for what would not
        fit into an empty one."""
        if self.max_waiting is None:
            return
        stats, scheduler = self.engine.stats, self.engine.config.scheduler
        most = len(stats.parts) * scheduler.max_num_seqs + self.max_waiting
        if asked > most:
            raise BadRequest(f"{asked} sequences in one request; this server has places for {most} (--max-waiting)")
        if stats.num_waiting < max(1, self.max_waiting) and self.num_open + asked <= most:
            return
        held = self.ledger.sequences
        is_alone = held.num_clients() <= (held.of(client) > 0)
        if (is_alone and scheduler.policy != "fair") or not has_part(held, client, asked, most):
            raise errors.queue_full()

    def take(self, client: str, asked: Demand) -> int:
        """A place for a request of this client, until its sequences are given back to the ledger. -> the tokens that it
        has of the client's bucket (Limits.settle). Raises as `admit` and Limits.take do."""
        held = self.ledger.sequences
        with held.alone():
            self.admit(client, asked.sequences)
            num_tokens = self.limits.take(client, asked, held.of(client))
            held.add(client, asked.sequences)
        return num_tokens

    def admit_answer(self, client: str, num_bytes: int) -> None:
        """Raises ApiError 429 for a long answer while others that are being made may take all that there is."""
        if self.max_waiting is not None and not self.long_answers.has_room(client, num_bytes, self.most_answer_bytes):
            raise errors.answers_full()

    @property
    def most_answer_bytes(self) -> int:
        """Of all answers together, a client's equal part aside."""
        return most_answer_bytes(self.request_limits.answer_bytes, self.engine.max_model_len)

    @property
    def model(self) -> str:
        return self.names[0]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of all that answers depend on beside the request: OpenAI's system_fingerprint."""
        config = msgspec.json.encode([minivllm.__version__, self.names, list(self.engine.decisions)], enc_hook=str)
        return f"fp_{hashlib.sha256(config).hexdigest()[:10]}"

    @property
    def served(self) -> list[str]:
        """What `model` may be: the model's names, and the adapters'."""
        return [*self.names, *(adapter.name for adapter in self.engine.list_loras())]

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a name that neither the model nor an adapter has."""
        names = self.served
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
    tenant: str = ""  # whose part of the prefix cache it uses (keys.Keys.tenant); "": everybody's
    client: str = ""  # whose share of the engine it takes (keys.Keys.share_of)
    ignored: dict[str, str] = field(default_factory=dict)  # fields that this model has no use for, and why
    thinking: ThinkingTokens | None = None  # what counts the tokens of a model that thinks
    find_answer: Callable[[], ReasoningReader] | None = None  # in one text of such a model: what stops look at
    usage: Usage = field(default_factory=Usage)
    num_generated: Counter[int] = field(default_factory=Counter)  # by choice
    deadline: Deadline | None = None  # of its HTTP request
    is_admitted: bool = False  # its place is taken already (`reserve`)
    num_bytes: int = 0  # that the answer may take (price.py)
    num_taken: int = 0  # tokens that count as its client's, as long as its place is taken
    made: list[RequestMetrics] = field(default_factory=list)  # of the engine's requests
    timings: RequestTimings | None | UnsetType = UNSET  # once it has ended, if the server tells of them

    @property
    def operation(self) -> str:
        """By OpenTelemetry's name."""
        return "text_completion" if isinstance(self.body, CompletionRequest) else "chat"

    @property
    def model(self) -> str:
        return self.service.answers_as(self.body)

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.params.num_sequences

    def usage_before(self, num_last: int) -> Usage:
        """As if it had ended before its last tokens; `usage` counts a prompt once it is answered."""
        num_prompt = sum(len(p.token_ids) for p in self.prompts)
        num_completion = self.usage.completion_tokens - num_last
        details = self.usage.prompt_tokens_details, self.usage.completion_tokens_details
        return Usage(num_prompt, num_completion, num_prompt + num_completion, *details)

    @property
    def num_thinking(self) -> int:
        details = self.usage.completion_tokens_details
        return 0 if details is UNSET else details.reasoning_tokens

    def choice(self, prompt: int, index: int) -> int:
        return prompt * self.params.n + index

    async def outputs(self, kind: str) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(prompt number, output) as they come. kind: "delta" or "final"."""
        self.reserve()
        unfinished, reason = dict.fromkeys(range(len(self.prompts))), "abort"
        try:
            async with aclosing(merge([self._generate(i, kind) for i in range(len(self.prompts))])) as merged:
                async for i, output in merged:
                    raise_if_failed(output, self.params)
                    if self.score_only:
                        drop_answer(output)
                    self._count(i, output, await self._num_thinking(i, output))
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
            self.release()
            self.timings = self.service.timings.of(self)
            for i in unfinished:
                self.service.metrics.on_request_end(reason)
                self.service.tracing.end(self, self._request_id(i), reason, None, 0)

    def reserve(self) -> None:
        """Take its place among those that are served, if it has none yet. Raises ApiError 429."""
        if not self.is_admitted:
            service, demand = self.service, self._demand()
            with service.ledger.sequences.alone():
                service.admit_answer(self.client, self.num_bytes)
                self.num_taken = service.take(self.client, demand)
                service.long_answers.take(self.client, self.num_bytes)
            self.is_admitted = True

    def release(self) -> None:
        if self.is_admitted:
            self.service.long_answers.give_back(self.client, self.num_bytes)
            self.service.ledger.sequences.add(self.client, -self.num_sequences)
            self.service.limits.settle(self.client, self.num_taken, self._num_made())
            self.is_admitted = False

    def _demand(self) -> Demand:
        lengths, params = [len(prompt.token_ids) for prompt in self.prompts], self.params
        most = self.service.engine.max_model_len
        return demand(lengths, params.num_sequences, params.max_tokens, most)

    def _num_made(self) -> int:
        """Tokens, also those that nobody has read. How many a search has made is known at its end alone; one that is
        left before counts whole."""
        if isinstance(self.params, BeamSearchParams) and not all(metrics.finished_time for metrics in self.made):
            return self.num_taken
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        return num_prompt + sum(metrics.num_generation_tokens for metrics in self.made)

    def _request_id(self, prompt: int) -> str:
        """What the engine calls it. An id that a client has chosen is its own: another may have the same."""
        own = f"@{self.client}" if self.body.request_id and self.client else ""
        return f"{self.id}-{prompt}{own}"

    def _generate(self, prompt: int, kind: str) -> AsyncGenerator[RequestOutput, None]:
        return self.service.engine.generate(
            self.prompts[prompt].given,
            self.params,
            self._request_id(prompt),
            priority=self.body.priority or 0,
            cache_salt=salted(self.tenant, self.body.cache_salt),
            output_kind=kind,
            lora_request=self.service.adapter_of(self.body) or None,
            client=self.client,
            on_start=self.made.append,
            find_answer=self.find_answer,
        )

    async def _num_thinking(self, prompt: int, output: RequestOutput) -> int | None:
        """Of its tokens. None: nobody tells them apart."""
        if (thinking := self.thinking) is None:
            return None

        def count() -> int:
            return sum(thinking.count(self.choice(prompt, out.index), out.token_ids) for out in output.outputs)

        return await by_size(PER_TOKEN * sum(len(out.token_ids) for out in output.outputs), count, self.client)

    def _count(self, prompt: int, output: RequestOutput, num_thinking: int | None) -> None:
        for out in output.outputs:
            self.num_generated[self.choice(prompt, out.index)] += len(out.token_ids)
            self.usage.completion_tokens += len(out.token_ids)
        if num_thinking is not None:
            self.usage.completion_tokens_details = ReasoningTokens(self.num_thinking + num_thinking)
        if output.finished:
            num_prompt = len(self.prompts[prompt].token_ids)
            self.usage.prompt_tokens += num_prompt
            self.usage.prompt_tokens_details.cached_tokens += output.num_cached_tokens or 0
            generated = [self.num_generated[self.choice(prompt, i)] for i in range(self.params.n)]
            reason = output.outputs[-1].finish_reason
            asked = self.params.n, self.params.max_tokens
            self.service.metrics.on_request_end(reason, output.metrics, num_prompt, max(generated), *asked)
            self.service.tracing.end(self, self._request_id(prompt), reason, output, sum(generated))
        self.usage.total_tokens = self.usage.prompt_tokens + self.usage.completion_tokens


def attach(job: Job, request: Request) -> None:
    """The job is this HTTP request's work: its line in the log counts it, its key says whose cache it shares and whose
    share of the engine it takes, and its headers whose trace it belongs to."""
    request.state.job = job
    bodies.note(request, job.ignored)
    job.tenant, job.client = getattr(request.state, "tenant", ""), getattr(request.state, "client", "")
    job.deadline = getattr(request.state, "deadline", None)
    job.trace_context = {name: value for name in CONTEXT_HEADERS if (value := request.headers.get(name))}


class Shape(Protocol):
    """One endpoint's JSON. An object serves one job, so it may remember what it has sent of each choice."""

    def opening(self, choice: int, prompt: Prompt, output: RequestOutput) -> Struct | None: ...
    def deltas(self, choice: int, out: CompletionOutput) -> list[Struct]: ...
    def ending(self, choice: int, out: CompletionOutput) -> Struct: ...
    def whole(self, choice: int, prompt: Prompt, output: RequestOutput, out: CompletionOutput) -> Struct: ...

    def wrap(
        self, choices: list[Any], usage: Usage | None | UnsetType, outputs: list[RequestOutput] | None = None
    ) -> Answer:
        """A chunk of a stream; with `outputs`, one a prompt, the whole answer."""
        ...


async def final_outputs(job: Job) -> list[RequestOutput]:
    """One a prompt, once all are there."""
    outputs: dict[int, RequestOutput] = {}
    async with aclosing(job.outputs("final")) as stream:
        async for i, output in stream:
            outputs[i] = output
    return [outputs[i] for i in range(len(job.prompts))]


async def answer(job: Job, shape: Shape) -> Answer:
    ordered = await final_outputs(job)

    def made() -> Answer:
        choices = [
            shape.whole(job.choice(i, out.index), job.prompts[i], output, out)
            for i, output in enumerate(ordered)
            for out in output.outputs
        ]
        whole = shape.wrap(choices, job.usage, ordered)
        whole.metrics = job.timings
        return whole

    return await by_size(sum(map(size_of, ordered)) + PER_CHOICE * job.num_sequences, made, job.client)


async def whole_choice(job: Job, shape: Shape, output: RequestOutput) -> Any:
    """Of a job that has one."""
    (out,) = output.outputs
    return await by_size(size_of(output), partial(shape.whole, 0, job.prompts[0], output, out), job.client)


def size_of(output: RequestOutput) -> int:
    """What a whole answer is made of, in units of off_loop.SHORT: log-probabilities, and characters, which are
    parsed."""
    return num_reported(output) + sum(len(out.text) for out in output.outputs)


def num_reported(output: RequestOutput) -> int:
    """Log-probabilities, of each of which an answer makes an object or more."""
    of_prompt = entries(output.prompt_logprobs)
    return sum(of_prompt + entries(out.logprobs) for out in output.outputs)


def entries(positions: Sequence[Mapping[int, Logprob] | None] | None) -> int:
    """As many as the last position's for each."""
    return len(positions) * len(positions[-1] or ()) if positions else 0


async def events(job: Job, shape: Shape) -> AsyncIterator[bytes]:
    """Server-sent events in OpenAI's order: each choice's opening, and text up to its ending; usage, if asked for;
    [DONE]."""
    opened: set[int] = set()
    with_usage = bool(job.body.stream_options and job.body.stream_options.include_usage)
    every_chunk = with_usage and bool(job.body.stream_options.continuous_usage_stats)

    def usage(untold: int = 0) -> Usage | None | UnsetType:
        """untold: tokens that are counted already, and whose text comes with a later chunk."""
        return job.usage_before(untold) if every_chunk else None if with_usage else UNSET

    async with aclosing(job.outputs("delta")) as stream:
        async for i, output in stream:
            for out in output.outputs:
                choice = job.choice(i, out.index)
                if choice not in opened:
                    opened.add(choice)
                    opening = partial(shape.opening, choice, job.prompts[i], output)
                    if (told := await by_size(num_reported(output), opening, job.client)) is not None:
                        yield await long_event(shape.wrap([told], usage(len(out.token_ids))), job.client)
                deltas = shape.deltas(choice, out)
                if out.finish_reason is not None:
                    deltas = with_ending(deltas, shape.ending(choice, out))
                for delta in deltas:
                    yield event(shape.wrap([delta], usage()))
    if with_usage:
        used = shape.wrap([], job.usage)
        used.metrics = without_nulls(job.timings)
        yield event(used)
    yield DONE


def with_ending(deltas: list[Any], ending: Any) -> list[Any]:
    """The last token's chunk says why the text ends, as vLLM's does: a chunk of its own only if there is none."""
    if not deltas:
        return [ending]
    deltas[-1].finish_reason, deltas[-1].stop_reason = ending.finish_reason, ending.stop_reason
    return deltas


def is_shown(out: CompletionOutput) -> bool:
    """Whether a stream has an event for it: for each step that brought tokens, even if their text is held back, so that
    clients may count (vLLM's streams likewise). The ending stands for a last token without text."""
    return bool(out.text or (out.token_ids and not out.finished))


def wants_tokens(body: Sampling, out: CompletionOutput) -> bool:
    """Tokens that show nothing need no event, unless they are asked for."""
    return bool(out.token_ids) and (out.logprobs is not None or bool(body.return_token_ids))


A = TypeVar("A", bound=Struct)


def with_nulls(answer: A, names: Iterable[str]) -> A:
    """Of a whole answer: null for what it does not have, as in OpenAI's and vLLM's. Streams leave such fields out."""
    for name in names:
        if getattr(answer, name) is UNSET:
            setattr(answer, name, None)
    return answer


def event(data: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(data)


async def long_event(data: Any, client: str) -> bytes:
    return b"data: %b\n\n" % b"".join(await encoded(data, client))


def raise_if_failed(output: RequestOutput, params: SamplingParams | BeamSearchParams) -> None:
    """An engine-side failure or abort is no answer: the client is told, with a status that says whose fault it is."""
    if output.error == NO_DISTRIBUTION and isinstance(params, SamplingParams) and params.restricts:
        raise BadRequest("no token may follow: what the request allows and what it forbids leave nothing to choose")
    is_of_grammar = output.error and output.error.startswith((TOO_SLOW, LEADS_NOWHERE))
    if is_of_grammar and isinstance(params, SamplingParams) and params.structured:
        raise params.structured.error(output.error)
    if output.error and output.error.startswith(NO_LOGITS):
        raise BadRequest(output.error)
    if output.error:
        errors.logger.error("request %s: %s", output.request_id, output.error)
        if output.error == NO_MEMORY:
            raise errors.out_of_memory()
        raise errors.ApiError(500, "the engine could not finish this request", code="internal_error")
    if any(out.finish_reason == "abort" for out in output.outputs):
        raise errors.closing()


def drop_answer(output: RequestOutput) -> None:
    for out in output.outputs:
        out.text, out.token_ids, out.logprobs = "", [], out.logprobs and []


async def merge(streams: list[AsyncGenerator[RequestOutput, None]]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The items of all streams as they come, each with its stream's number. Closing it closes them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((number, item))

    tasks: list[asyncio.Task] = []

    async def begin() -> None:
        for i, stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(i, stream)))
            tasks[-1].add_done_callback(queue.put_nowait)
            await asyncio.sleep(0)  # each prompt is prepared in a turn of its own: thousands would hold up the loop

    beginning = asyncio.create_task(begin())
    try:
        live = len(streams)
        while live:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                live -= 1
                item.result()
            else:
                yield item
    finally:
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        await end([task for task in tasks if not task.done()])
        for stream in streams[len(tasks) :]:
            await stream.aclose()


async def end(tasks: list[asyncio.Task]) -> None:
    """Cancel them, a few in a turn of the event loop: the end of each takes its time."""
    try:
        for i in range(0, len(tasks), ENDED_AT_ONCE):
            some = tasks[i : i + ENDED_AT_ONCE]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()


# --------------------------------------------------------------------------------------------------- before the engine


def new_id(prefix: str, chosen: str | None = None) -> str:
    """chosen: by the client; None: one that nobody has."""
    return f"{prefix}-{chosen or uuid.uuid4().hex}"


def truncated(prompt: Prompt, body: Sampling, max_tokens: int | None, service: Service) -> Prompt:
    """As `truncate_prompt_tokens` and `truncation_side` ask."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == 0:
        raise BadRequest("truncate_prompt_tokens=0 leaves no prompt", "truncate_prompt_tokens")
    if most == -1:
        most = max(1, service.engine.max_model_len - (max_tokens or 1))
    if len(prompt.token_ids) <= most:
        return prompt
    token_ids = prompt.token_ids[:most] if body.truncation_side == "right" else prompt.token_ids[-most:]
    return Prompt(token_ids, service.engine.tokenizer.decode(token_ids, skip_special_tokens=False))


def tokenize(service: Service, text: str, add_special_tokens: bool) -> Prompt:
    if len(text) > LONGEST_TOKEN * service.engine.max_model_len:  # counting its tokens would take minutes
        limit = service.engine.max_model_len
        raise errors.context_length(f"a prompt of {len(text):,} characters is over this model's {limit} tokens", None)
    return Prompt(service.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens), plain(text))


def check_context(service: Service, prompts: list[Prompt], max_tokens: int | None, prompt_name: str, max_name: str):
    """A prompt must leave room for an answer, which then ends where the context does: clients ask for as many tokens as
    they would like. Only a limit that no prompt leaves room for is an error. Raises ApiError 400, naming the field."""
    limit = service.engine.max_model_len
    for prompt in prompts:
        check_length(service, len(prompt.token_ids), prompt_name)
    if max_tokens is not None and max_tokens > limit:
        raise errors.context_length(f"{max_name} is {max_tokens}; this model's context is {limit} tokens", max_name)


def check_logprobs(service: Service, asked: Mapping[str, int | None], prompts: list[Prompt]) -> None:
    """As the engine will, but by the names of the request's fields, and over all of its prompts. asked: by field.
    Raises BadRequest."""
    vocab_size, most = service.engine.tokenizer.vocab_size, service.engine.config.engine.max_logprobs
    found = {name: num_logprobs(name, value, vocab_size, most) for name, value in asked.items()}
    check_prompt_logprobs(sum(len(prompt.token_ids) for prompt in prompts), found["prompt_logprobs"])


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
