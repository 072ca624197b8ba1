"""What a step's tokens make of a request: its deltas, and its end."""

from __future__ import annotations

from typing import Any

from minivllm.plan import Delta, StepOutput
from minivllm.request import Request


def take_tokens(req: Request, tokens: list[int], out: StepOutput, max_model_len: int) -> Delta:
    """Append what was sampled, up to and including a token that ends the request."""
    delta = new_delta(req, num_cached_tokens=req.num_cached_tokens)
    for token in tokens:
        req.token_ids.append(token)
        delta.token_ids.append(token)
        delta.finish_reason, delta.stop_reason = end_of(req, token, max_model_len)
        if delta.finish_reason is not None:
            break
    if req.id in out.logprobs:
        delta.logprobs = out.logprobs[req.id][: len(delta.token_ids)]
    return delta


def take_vector(req: Request, out: StepOutput) -> Delta:
    """A prompt that has become a vector ends with that."""
    vector = out.pooled[req.id].tobytes()
    return new_delta(req, finish_reason="stop", num_cached_tokens=req.num_cached_tokens, pooled=vector)


def end_of(req: Request, token: int, max_model_len: int) -> tuple[str | None, int | None]:
    """(finish_reason, stop_reason) once `token` is the request's newest; (None, None) while it goes on."""
    params, num_tokens = req.params, len(req.token_ids)
    num_output = num_tokens - req.num_prompt_tokens
    if num_output >= params.min_tokens:
        if token in params.eos_token_ids:
            return "stop", None
        if token in params.core_stop_token_ids:
            return "stop", token
    if num_output == params.max_tokens or num_tokens >= max_model_len:
        return "length", None
    return None, None


def take_prompt_logprobs(req: Request, delta: Delta | None, start: int, chunk: list) -> Delta:
    """Add the part of a chunk's that no earlier step reported: a preemption computes them again."""
    new = chunk[req.num_prompt_logprobs - start :]
    req.num_prompt_logprobs += len(new)
    delta = delta or new_delta(req)
    delta.prompt_logprobs = new
    return delta


def failed(req: Request, error: str) -> Delta:
    return new_delta(req, finish_reason="error", error=error)


def new_delta(req: Request, **changed: Any) -> Delta:
    return Delta(req.id, [], arrival_time=req.arrival_time, **changed)
