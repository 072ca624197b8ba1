"""The log-probabilities of an output's tokens, as the APIs that are not OpenAI's have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from minivllm.engine.output import CompletionOutput
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.serve.generation import finite


class Likely(NamedTuple):
    id: int
    token: str
    logprob: float
    bytes: list[int]


def likely_tokens(
    out: CompletionOutput, tokenizer: TextTokenizer, num_top: int
) -> Iterator[tuple[Likely, list[Likely]]]:
    """Of each token that was taken: what it is, and the likeliest `num_top` at its place."""
    for taken, position in zip(out.token_ids, out.logprobs or (), strict=True):
        found = {
            t: Likely(t, lp.decoded_token, finite(lp.logprob), list(tokenizer.token_bytes(t)))
            for t, lp in position.items()
        }
        likeliest = sorted(found.values(), key=lambda each: -each.logprob)[:num_top]
        yield found[taken], likeliest
