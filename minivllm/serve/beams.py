"""Beam search over HTTP: vLLM's `use_beam_search`, where `n` is the beam width and all beams are returned, best first.

Beams are known at the end, so they do not go with stream=true (vLLM sends one event then). What shapes the choice of
single tokens has no place in a search for the likeliest text, and is refused by name rather than ignored.
"""

from __future__ import annotations

from typing import Any

from minivllm.errors import BadRequest
from minivllm.request import MAX_LOGPROBS, BeamSearchParams, SamplingParams
from minivllm.serve.protocol import Sampling

MAX_WIDTH = MAX_LOGPROBS // 2
HONOURED = {"n", "max_tokens", "ignore_eos", "seed"}  # a search draws nothing, so that any seed gives what it promises
REFUSED = {*SamplingParams.__struct_fields__, "stream", "top_logprobs", "tools", "thinking_token_budget"} - HONOURED
ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {  # beside null, false and nothing at all
    "temperature": (0, 1),  # vLLM V0 insisted on the 0
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
}


def beam_search(body: Sampling, max_tokens: int) -> BeamSearchParams:
    """Raises BadRequest, naming the field, for what beams cannot honour."""
    for name in sorted(REFUSED & set(body.__struct_fields__)):
        value = getattr(body, name)
        nothing = value is None or value is False or value in ASKS_FOR_NOTHING.get(name, ("", [], {}))
        if not nothing or (name == "skip_special_tokens" and value is False):
            raise BadRequest(f"{name} does not go with use_beam_search", name)
    if (structured := body.structured()) is not None:
        name = structured.field.partition(".")[0]
        raise BadRequest(f"{name} does not go with use_beam_search", name)
    width = 1 if body.n is None else body.n
    if not 1 <= width <= MAX_WIDTH:
        raise BadRequest(f"n, the beam width, must be at least 1 and at most {MAX_WIDTH}, got {width}", "n")
    if max_tokens < 1:
        raise BadRequest("max_tokens must be at least 1 with use_beam_search", "max_tokens")
    return BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=bool(body.early_stopping),
    )
