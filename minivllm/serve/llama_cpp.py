"""llama.cpp's own endpoints: /completion and /infill, whose requests become completions; /apply-template, /props and
/slots.

Where llama.cpp has defaults of its own (temperature 0.8, as many tokens as there is room for), they hold. A stream ends
with an event that has all of a whole answer but its text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import minivllm
from minivllm.engine.output import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.errors import BadRequest
from minivllm.request import SamplingParams
from minivllm.serve import chat, completions, errors, generation, price
from minivllm.serve.bodies import taken, worked_out
from minivllm.serve.connection import EventStream, JSONAnswer, reply
from minivllm.serve.control_tokens import plain
from minivllm.serve.generation import PER_CHOICE, Job, Service, attach, event, final_outputs, num_reported
from minivllm.serve.infill import infill_of
from minivllm.serve.llama_cpp_protocol import (
    InfillRequest,
    LlamaAnswer,
    LlamaChunk,
    LlamaCompletionRequest,
    LlamaProb,
    LlamaProbs,
    LlamaProps,
    LlamaSlot,
    LlamaTimings,
    Templated,
    TemplateRequest,
)
from minivllm.serve.logprobs import likely_tokens
from minivllm.serve.off_loop import by_size
from minivllm.serve.protocol import TEXT_ONLY, ChatRequest, CompletionRequest, StructuredOutputs
from minivllm.serve.structured import called
from minivllm.serve.tools.ask import asked

NAMES = {"repetition_penalty": "repeat_penalty"}
# What switches a sampler off, and its letter where samplers are given as one text.
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
LETTERS = {"k": "top_k", "p": "top_p", "m": "min_p", "t": "temperature", "e": "penalties"}
PENALTIES = {
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
NEVER = -100.0  # what a logit may be lowered by at most


async def completion(request: Request) -> ASGIApp:
    body, service = await taken(request, LlamaCompletionRequest), request.app.state.service
    service.check_model(body.model)
    if body.prompt is None:
        raise BadRequest("prompt is missing", "prompt")
    return await answered(body, lambda: prompts_of(body, service), [], request)


async def infill(request: Request) -> ASGIApp:
    body, service = await taken(request, InfillRequest), request.app.state.service
    service.check_model(body.model)
    if not isinstance(body.prompt, str | None):
        raise BadRequest("prompt is the beginning of the middle: a text", "prompt")
    made = infill_of(service.engine.tokenizer, "input_suffix")

    def prompts() -> list[list[int]]:
        extra = tuple((file.filename, file.text) for file in body.input_extra or ())
        text = made.prompt(body.input_prefix, body.input_suffix, body.prompt or "", extra)
        return [tokens_of(text, service, "input_prefix")]

    return await answered(body, prompts, made.ends, request)


async def answered(
    body: LlamaCompletionRequest, prompts: Callable[[], list[list[int]]], ends: list[int], request: Request
) -> ASGIApp:
    service = request.app.state.service
    job = await worked_out(request, lambda: prepare(body, prompts(), ends, service))
    attach(job, request)
    shape = LlamaShape(job, body)
    return EventStream(shape.events(), job.id, error_event) if body.stream else JSONAnswer(shape.whole(), job.id)


def prepare(body: LlamaCompletionRequest, prompts: list[list[int]], ends: list[int], service: Service) -> Job:
    with errors.renaming(NAMES):
        job, _ = completions.prepare(as_completion(body, prompts, ends, service), service)
    job.params = called(job.params, "grammar" if body.grammar else "json_schema")
    return job


def error_event(error: errors.ApiError) -> bytes:
    return b"data: %b\n\n" % errors.body(error)


# ------------------------------------------------------------------------------------------------------------ requests


def separate(prompt: str | list[Any] | dict[str, Any]) -> list[Any]:
    """One prompt or several: a list with a token in it is one, of tokens and texts."""
    if not isinstance(prompt, list):
        return [prompt]
    if not prompt:
        raise BadRequest("prompt is empty", "prompt")
    return [prompt] if any(isinstance(part, int) for part in prompt) else prompt


def prompts_of(body: LlamaCompletionRequest, service: Service) -> list[list[int]]:
    parts = separate(body.prompt)
    price.check_sequences(len(parts), 1, service.request_limits, "prompt")
    return [tokens_of(part, service, "prompt") for part in parts]


def tokens_of(prompt: Any, service: Service, param: str) -> list[int]:
    """A text; tokens and texts mixed, of which a first text gets the special tokens that begin a sequence; or an object
    with a text. Raises BadRequest."""
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise BadRequest(f"multimodal_data is not supported: {TEXT_ONLY}", param)
        prompt = prompt.get("prompt_string")
    parts = prompt if isinstance(prompt, list) else [prompt]
    if len(parts) > service.engine.max_model_len:
        generation.check_length(service, len(parts), param)
    found: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            found += generation.tokenize(service, part, add_special_tokens=i == 0).token_ids
            if len(found) >= service.engine.max_model_len:  # the rest would be tokenised for nothing
                generation.check_length(service, len(found), param)
        elif isinstance(part, int) and not isinstance(part, bool):
            found.append(part)
        else:
            raise BadRequest(f"{param} must be texts and tokens, got {type(part).__name__}", param)
    return found


def as_completion(
    body: LlamaCompletionRequest, prompts: list[list[int]], ends: list[int], service: Service
) -> CompletionRequest:
    most = service.engine.max_model_len
    wanted = body.n_predict if body.n_predict is not None else body.max_tokens
    max_tokens = most if wanted is None or wanted < 0 else min(wanted, most)
    return CompletionRequest(
        **sampling(body),
        model=body.model,
        prompt=prompts,
        max_tokens=max_tokens,
        echo=max_tokens == 0 or None,
        n=body.n_cmpl or body.n,
        stop=body.stop or None,
        stop_token_ids=ends or None,
        ignore_eos=body.ignore_eos,
        logprobs=body.n_probs or None,
        logit_bias=biases(body.logit_bias, service),
        structured_outputs=structured(body),
        stream=body.stream,
    )


def sampling(body: LlamaCompletionRequest) -> dict[str, Any]:
    """With llama.cpp's defaults, by the names of protocol.Sampling; what `samplers` lacks is off."""
    given = {
        "temperature": 0.8 if body.temperature is None else max(0.0, body.temperature),
        "top_k": 40 if body.top_k is None else max(0, body.top_k),
        "top_p": 0.95 if body.top_p is None else body.top_p,
        "min_p": 0.05 if body.min_p is None else body.min_p,
        "seed": None if body.seed is None or body.seed < 0 else body.seed,
    }
    used = samplers(body.samplers)
    if body.repeat_last_n != 0 and (used is None or "penalties" in used):
        given |= {name: getattr(body, other) for name, other in PENALTIES.items()}
    return given | {name: off for name, off in OFF.items() if used is not None and name not in used}


def samplers(given: str | list[str] | None) -> set[str] | None:
    """None: all."""
    if given is None:
        return None
    return {LETTERS.get(letter, "") for letter in given} if isinstance(given, str) else set(given)


def structured(body: LlamaCompletionRequest) -> StructuredOutputs | None:
    if body.grammar:
        return StructuredOutputs(grammar=body.grammar)
    return None if body.json_schema is None else StructuredOutputs(json=body.json_schema)


def biases(given: Any, service: Service) -> dict[int, float] | None:
    found: dict[int, float] = {}
    for token, bias in given.items() if isinstance(given, dict) else given or ():
        if bias is True:
            raise BadRequest("logit_bias: a bias is a number, or false", "logit_bias")
        for token_id in bias_tokens(token, service):
            found[token_id] = NEVER if bias is False else bias
    return found or None


def bias_tokens(token: int | str, service: Service) -> list[int]:
    if isinstance(token, int):
        return [token]
    if token.isascii() and token.isdecimal() and len(token) < 10:  # a key of an object
        return [int(token)]
    return service.engine.tokenizer.encode(token[: generation.LONGEST_TOKEN], add_special_tokens=False)


# ------------------------------------------------------------------------------------------------------------- answers


class LlamaShape:
    """The JSON of one job."""

    def __init__(self, job: Job, body: LlamaCompletionRequest):
        self.job, self.body, self.tokenizer = job, body, job.service.engine.tokenizer

    async def whole(self) -> Any:
        outputs = await final_outputs(self.job)

        def made() -> list[Any]:
            return [
                self.picked(self.last(i, output, out, len(out.token_ids), out.text))
                for i, output in enumerate(outputs)
                for out in output.outputs
            ]

        size = sum(map(num_reported, outputs)) + PER_CHOICE * self.job.num_sequences
        results = await by_size(size, made, self.job.client)
        return results[0] if len(results) == 1 else results

    async def events(self) -> AsyncIterator[bytes]:
        num_tokens: dict[int, int] = defaultdict(int)  # by choice
        texts: dict[int, str] = defaultdict(str)
        async with aclosing(self.job.outputs("delta")) as stream:
            async for i, output in stream:
                for out in output.outputs:
                    choice = self.job.choice(i, out.index)
                    num_tokens[choice] += len(out.token_ids)
                    texts[choice] += out.text
                    if out.text or out.logprobs:
                        yield event(self.chunk(i, out, num_tokens[choice]))
                    if out.finish_reason is not None:
                        last = self.last(i, output, out, num_tokens[choice], texts[choice])
                        last.content, last.tokens, last.completion_probabilities = "", [], UNSET
                        yield event(self.picked(last))

    def chunk(self, prompt: int, out: CompletionOutput, num_tokens: int) -> LlamaChunk:
        return LlamaChunk(
            index=self.job.choice(prompt, out.index),
            content=out.text,
            tokens=list(out.token_ids),
            tokens_predicted=num_tokens,
            tokens_evaluated=len(self.job.prompts[prompt].token_ids),
            completion_probabilities=self.probabilities(out),
        )

    def last(
        self, prompt: int, output: RequestOutput, out: CompletionOutput, num_tokens: int, text: str
    ) -> LlamaAnswer:
        asked_of, most = self.job.prompts[prompt], self.job.service.engine.max_model_len
        stopped = out.finish_reason == "stop"
        word = out.stop_reason if stopped and isinstance(out.stop_reason, str) else ""
        return LlamaAnswer(
            index=self.job.choice(prompt, out.index),
            content=out.text,
            tokens=list(out.token_ids) if self.body.return_tokens else [],
            tokens_predicted=num_tokens,
            tokens_evaluated=len(asked_of.token_ids),
            completion_probabilities=self.probabilities(out),
            model=self.job.model,
            prompt=asked_of.text,
            generation_settings=settings(self.job),
            has_new_line="\n" in text,
            truncated=not stopped and len(asked_of.token_ids) + num_tokens >= most,
            stop_type="word" if word else "eos" if stopped else "limit",
            stopping_word=word,
            tokens_cached=output.num_cached_tokens or 0,
            timings=timings(len(asked_of.token_ids), output.num_cached_tokens or 0, num_tokens, output.metrics),
        )

    def probabilities(self, out: CompletionOutput) -> list[LlamaProbs] | UnsetType:
        if out.logprobs is None:
            return UNSET
        found = likely_tokens(out, self.tokenizer, self.body.n_probs or 0)
        return [LlamaProbs(*taken, [LlamaProb(*each) for each in likeliest]) for taken, likeliest in found]

    def picked(self, result: LlamaAnswer) -> Any:
        """With response_fields only those, named as they were asked for."""
        if not self.body.response_fields:
            return result
        data = msgspec.to_builtins(result)
        found = {path: inside(data, path.split("/")) for path in self.body.response_fields}
        return {path: value for path, value in found.items() if value is not UNSET}


def inside(data: Any, path: list[str]) -> Any:
    for name in path:
        if not isinstance(data, dict) or name not in data:
            return UNSET
        data = data[name]
    return data


def timings(num_prompt: int, num_cached: int, num_tokens: int, times: RequestMetrics | None) -> LlamaTimings:
    first = (times.ttft or 0.0) * 1e3 if times else 0.0
    rest = (times.last_token_time - times.first_token_time) * 1e3 if times else 0.0
    num_computed = num_prompt - num_cached
    return LlamaTimings(
        cache_n=num_cached,
        prompt_n=num_computed,
        prompt_ms=first,
        prompt_per_token_ms=over(first, num_computed),
        prompt_per_second=over(num_computed * 1e3, first),
        predicted_n=num_tokens,
        predicted_ms=rest,
        predicted_per_token_ms=over(rest, num_tokens - 1),  # the first token is the prompt's
        predicted_per_second=over((num_tokens - 1) * 1e3, rest),
    )


def over(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def settings(job: Job) -> dict[str, Any]:
    """generation_settings: what the engine does, by llama.cpp's names."""
    params, stream = job.params, bool(job.body.stream)
    assert isinstance(params, SamplingParams), "llama.cpp has no beam search"
    held_to = params.structured
    return {
        **{name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")},
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repeat_last_n": -1,
        "stop": list(params.stop),
        "n_predict": 0 if job.score_only else params.max_tokens,
        "max_tokens": 0 if job.score_only else params.max_tokens,
        "n_probs": params.logprobs or 0,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in (params.logit_bias or {}).items()],
        "grammar": held_to.grammar or "" if held_to else "",
        "stream": stream,
        "n_ctx": job.service.engine.max_model_len,
        "model": job.model,
    }


# -------------------------------------------------------------------------------------------------- what the server is


async def apply_template(request: Request) -> Response:
    body, service = await taken(request, TemplateRequest), request.app.state.service
    service.check_model(body.model)
    names = set(TemplateRequest.__struct_fields__) - {"chat_template"}
    asks = ChatRequest(**{name: getattr(body, name) for name in names})
    return await worked_out(request, lambda: reply(Templated(plain(chat.render(asks, asked(asks), service)))))


async def props(request: Request) -> Response:
    service = request.app.state.service
    engine, tokenizer = service.engine, service.engine.tokenizer
    params = {**sampling(LlamaCompletionRequest()), "n_predict": -1, "max_tokens": -1, "stop": [], "n_probs": 0}
    about = LlamaProps(
        default_generation_settings={"n_ctx": engine.max_model_len, "params": params},
        total_slots=num_slots(service),
        model_alias=service.model,
        model_path=engine.config.model.path,
        chat_template=tokenizer.chat_template or "",
        chat_template_caps={"supports_tools": tokenizer.tool_template is not None},
        modalities={"vision": False, "audio": False},
        bos_token=tokenizer.special_tokens.get("bos_token", ""),
        eos_token=tokenizer.special_tokens.get("eos_token", ""),
        build_info=f"minivllm {minivllm.__version__}",
    )
    return reply(about)


def num_slots(service: Service) -> int:
    return service.engine.config.scheduler.max_num_seqs * len(service.engine.stats.parts)


async def slots(request: Request) -> Response:
    """As many as sequences may run at once, the first of them busy: none belongs to a request."""
    service = request.app.state.service
    engine, total = service.engine, num_slots(service)
    busy = min(engine.stats.num_running, total)
    if busy == total and "fail_on_no_slot" in request.query_params:
        raise errors.ApiError(503, "all slots are busy", code="no_slot")
    drafts = engine.config.spec_decode.method != "none"
    return reply([LlamaSlot(i, engine.max_model_len, i < busy, drafts) for i in range(total)])
