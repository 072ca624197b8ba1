"""Between generate.proto's messages and what the HTTP server has: a request of /v1/completions, and its outputs."""

from __future__ import annotations

from typing import Any

import msgspec

from minivllm.engine.output import CompletionOutput
from minivllm.errors import BadRequest
from minivllm.serve.bodies import parse
from minivllm.serve.generation import Job
from minivllm.serve.protocol import CompletionRequest
from minivllm.serve.rpc.schema import message


def completion_request(request: Any) -> CompletionRequest:
    """Raises BadRequest, naming the field."""
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        raise BadRequest("the prompt is missing: give text or tokens", "prompt")
    body: dict[str, Any] = {
        "prompt": request.text if prompt == "text" else list(request.tokens.ids),
        **{field.name: _plain(value) for field, value in request.sampling.ListFields()},
    }
    for name in ("model", "priority", "cache_salt"):
        if value := getattr(request, name):
            body[name] = value
    if (kind := request.structured.WhichOneof("kind")) is not None:
        value = getattr(request.structured, kind)
        body["structured_outputs"] = {kind: list(value.texts) if kind == "choice" else value}
    if request.stream:
        body["stream"] = True
    return parse(msgspec.json.encode(body), CompletionRequest)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else list(value)


def response(job: Job, prompt: int, outputs: list[CompletionOutput], is_last: bool) -> Any:
    """outputs: with what is new of each choice. is_last: then the whole request is accounted for."""
    told = message("GenerateResponse")(id=job.id)
    for out in outputs:
        told.outputs.append(
            message("Output")(
                index=job.choice(prompt, out.index),
                text=out.text,
                token_ids=out.token_ids,
                logprobs=[_taken(position) for position in out.logprobs or ()],
                finish_reason=out.finish_reason or "",
                stop_reason="" if out.stop_reason is None else str(out.stop_reason),
            )
        )
    if is_last:
        told.usage.prompt_tokens = job.usage.prompt_tokens
        told.usage.completion_tokens = job.usage.completion_tokens
        told.usage.cached_tokens = job.usage.prompt_tokens_details.cached_tokens
    return told


def _taken(position: dict) -> float:
    """The log-probability of the token that was taken: it stands first."""
    return next(iter(position.values())).logprob
