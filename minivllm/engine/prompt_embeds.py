"""Prompts given as vectors ("prompt embeddings", vLLM's prompt_embeds): what stands for a token is sent instead of it.

They come before the tokens of a prompt, where it has some (a soft prompt), or alone. In the engine their positions hold
a placeholder and are one item (request.Item): the digest of the numbers is in the block keys, and the numbers are
carried to the workers once, as float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from minivllm.errors import BadRequest
from minivllm.request import Beside, Item, SamplingParams

PLACEHOLDER = 0  # the token id that is told where there is no token
MOST = 1e4  # that a number may be; embeddings are far below, and no dtype overflows here
KEY = "prompt_embeds"


def embeds_of(prompt: Any, width: int, max_length: int) -> Beside:
    """Of a prompt dictionary, which may hold what this has made; nothing of any other prompt. width: numbers a
    position, 0: this model takes none. Raises BadRequest."""
    if not isinstance(prompt, Mapping) or KEY not in prompt:
        return Beside()
    if isinstance(prompt[KEY], Beside):
        return prompt[KEY]
    if not width:
        raise BadRequest("this model takes no prompt embeddings", KEY)
    rows = as_rows(prompt[KEY], width, max_length)
    digest, content = f"embeds:{hashlib.sha256(rows.data).hexdigest()}", rows.tobytes()
    return Beside([PLACEHOLDER] * len(rows), (Item(0, len(rows), digest),), {digest: content})


def as_rows(given: Any, width: int, max_length: int) -> np.ndarray:
    """A tensor or an array [length, width], or [1, length, width] -> float32, contiguous. Raises BadRequest."""
    if hasattr(given, "detach"):  # a tensor of torch, which this file does not import
        if not given.is_floating_point() or str(given.layout) != "torch.strided":
            raise BadRequest(f"{KEY} must be a dense tensor of floating-point numbers", KEY)
        _check_shape(tuple(given.shape), width, max_length)
        given = given.detach().to("cpu").float().numpy()
    if not isinstance(given, np.ndarray) or given.dtype.kind != "f":
        raise BadRequest(f"{KEY} must be a tensor of floating-point numbers, got {type(given).__name__}", KEY)
    _check_shape(given.shape, width, max_length)
    rows = np.ascontiguousarray(given.reshape(-1, width), "<f4")
    if not (np.abs(rows) <= MOST).all():  # NaN is not, either
        raise BadRequest(f"{KEY} must hold numbers from -{MOST:,.0f} to {MOST:,.0f}", KEY)
    return rows


def _check_shape(shape: tuple[int, ...], width: int, max_length: int) -> None:
    length = shape[-2] if len(shape) in (2, 3) else 0
    if shape not in ((length, width), (1, length, width)) or not length:
        raise BadRequest(f"{KEY} must be of shape [length, {width}], got {list(shape)}", KEY)
    if length > max_length:
        raise BadRequest(f"{KEY} holds {length} positions; the context has {max_length}", KEY)


def check_params(params: SamplingParams) -> None:
    """What needs to know the prompt's tokens does not go with vectors. Raises BadRequest."""
    if params.prompt_logprobs is not None:
        raise BadRequest(f"prompt_logprobs does not go with {KEY}: there are no tokens to score", "prompt_logprobs")
    if params.repetition_penalty != 1.0:
        raise BadRequest(f"repetition_penalty does not go with {KEY}: it is of a prompt's tokens", "repetition_penalty")
