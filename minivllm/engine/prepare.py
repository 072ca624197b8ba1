"""Before a request enters the engine: everything that the engine core, which has no tokenizer, must find decided."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest, NeverFits
from minivllm.request import MAX_SEED, SamplingParams


def prepare(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    tokenizer: TextTokenizer | None,
    max_model_len: int,
    rng: random.Random,
    vocab_size: int | None = None,
) -> SamplingParams:
    """The same parameters with seed, max_tokens, eos_token_ids and bad_words_token_ids filled in.

    vocab_size: of the model, if it has more token ids than the tokenizer. tokenizer None: token ids in, token ids out.
    Raises BadRequest for ids outside of the vocabulary, an empty prompt, and n > 1 without randomness; NeverFits for a
    prompt that leaves no room in the context. max_tokens is cut to that room (a server may rather refuse it).
    """
    _check_prompt(prompt_token_ids, max_model_len)
    vocab_size = vocab_size or (tokenizer.vocab_size if tokenizer else None)
    if vocab_size is not None:
        _check_ids("prompt", prompt_token_ids, vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
        _check_ids("logit_bias", params.logit_bias or (), vocab_size)
    if params.num_sequences > 1 and params.greedy:
        name = "n" if params.n > 1 else "best_of"
        raise BadRequest(
            f"{name} must be 1 when using greedy sampling (temperature 0), got {params.num_sequences}", name
        )
    if tokenizer is None and (params.stop or params.bad_words):
        raise BadRequest("stop strings and bad_words need a tokenizer, and this model has none", "stop")
    room = max_model_len - len(prompt_token_ids)
    return params.replace(
        seed=rng.getrandbits(62) if params.seed is None else params.seed,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        eos_token_ids=() if params.ignore_eos or tokenizer is None else tokenizer.eos_token_ids,
        bad_words_token_ids=tokenizer.bad_words_token_ids(params.bad_words) if params.bad_words else (),
    )


def children(params: SamplingParams) -> list[SamplingParams]:
    """The requests that one prompt becomes with n or best_of above 1: seeds seed, seed + 1 ... Only the first scores
    the prompt, so that the others may find it in the prefix cache."""
    if params.num_sequences == 1:
        return [params]
    logprobs = 0 if params.selects and params.logprobs is None else params.logprobs  # what is selected by
    first = params.replace(n=1, best_of=None, logprobs=logprobs)
    others = first.replace(prompt_logprobs=None)
    return [first, *(others.replace(seed=_wrap(params.seed + i)) for i in range(1, params.num_sequences))]


def _check_prompt(prompt_token_ids: Sequence[int], max_model_len: int) -> None:
    length = len(prompt_token_ids)
    if not length:
        raise BadRequest("the prompt has no tokens", "prompt")
    if length >= max_model_len:
        raise NeverFits(
            f"the prompt has {length} tokens, and with at least one token of output it must fit in the context of "
            f"{max_model_len} tokens: shorten it",
            "prompt",
        )


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise BadRequest(f"{param}: {token_id!r} is no token id of this model (0 to {vocab_size - 1})", param)


def _wrap(seed: int) -> int:
    return seed if seed <= MAX_SEED else seed - 2 * (MAX_SEED + 1)
