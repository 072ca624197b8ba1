"""Before a request enters the engine: everything that the engine core, which has no tokenizer, must find decided."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest, NeverFits
from minivllm.request import MAX_SEED, SamplingParams, check_min_tokens

MAX_PROMPT_LOGPROBS = (
    2**22
)  # that one prompt, or all prompts of an HTTP request, may ask for: each is an object in JSON


def resolve(
    params: SamplingParams, tokenizer: TextTokenizer | None, vocab_size: int | None, max_logprobs: int = -1
) -> SamplingParams:
    """What does not depend on the prompt, decided once for all prompts of a request: eos_token_ids and
    bad_words_token_ids, and log-probabilities of all tokens (-1) as a number.

    tokenizer None: token ids in, token ids out. vocab_size: of the model, which may have more than the tokenizer; None:
    ids are not looked at. max_logprobs: of a position; -1: no limit. Raises BadRequest for ids outside of the
    vocabulary and too many log-probabilities.
    """
    if vocab_size is not None:
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
        _check_ids("begin_suppress_tokens", params.begin_suppress_tokens or (), vocab_size)
        _check_ids("logit_bias", params.logit_bias or (), vocab_size)
        _check_ids("logprob_token_ids", params.logprob_token_ids or (), vocab_size)
    if tokenizer is None and (params.stop or params.bad_words):
        raise BadRequest("stop strings and bad_words need a tokenizer, and this model has none", "stop")
    logprobs = num_logprobs("logprobs", params.logprobs, vocab_size, max_logprobs)
    of_prompt = num_logprobs("prompt_logprobs", params.prompt_logprobs, vocab_size, max_logprobs)
    return params.with_values(
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
        eos_token_ids=() if params.ignore_eos or tokenizer is None else tokenizer.eos_token_ids,
        bad_words_token_ids=tokenizer.bad_words_token_ids(params.bad_words) if params.bad_words else (),
    )


def fitted(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    max_model_len: int,
    rng: random.Random,
    vocab_size: int | None = None,
) -> SamplingParams:
    """Resolved parameters with what each prompt has of its own: a seed, and max_tokens cut to the room that is left (a
    server may rather refuse it). Raises BadRequest, also for ids outside of the vocabulary, an empty prompt, and too
    many log-probabilities; NeverFits for a prompt that leaves no room in the context."""
    _check_prompt(prompt_token_ids, max_model_len)
    if vocab_size is not None:
        _check_ids("prompt", prompt_token_ids, vocab_size)
    check_prompt_logprobs(len(prompt_token_ids), params.prompt_logprobs)
    room = max_model_len - len(prompt_token_ids)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    check_min_tokens(params.min_tokens, max_tokens)
    seed = rng.getrandbits(62) if params.seed is None else params.seed
    return params.with_values(seed=seed, max_tokens=max_tokens)


def children(params: SamplingParams) -> list[SamplingParams]:
    """The requests that one prompt becomes with n or best_of above 1: seeds seed, seed + 1 ... Only the first scores
    the prompt, so that the others may find it in the prefix cache. Greedy ones come out equal, as in OpenAI's API."""
    if params.num_sequences == 1:
        return [params]
    logprobs = 0 if params.selects and params.logprobs is None else params.logprobs  # what is selected by
    first = params.with_values(n=1, best_of=None, logprobs=logprobs)
    others = first.with_values(prompt_logprobs=None)
    return [first, *(others.with_values(seed=_wrap(params.seed + i)) for i in range(1, params.num_sequences))]


def num_logprobs(name: str, asked: int | None, vocab_size: int | None, most: int) -> int | None:
    """With -1 resolved. most: engine.max_logprobs. Raises BadRequest, naming the field."""
    if asked == -1:
        if vocab_size is None:
            raise BadRequest(f"{name}=-1 needs a vocabulary of known size", name)
        asked = vocab_size
    if asked is not None and -1 < most < asked:
        raise BadRequest(f"{name} is {asked}; {most} at most here (--max-logprobs)", name)
    return asked


def check_prompt_logprobs(num_tokens: int, num_each: int | None) -> None:
    """num_each: of the likeliest tokens, beside each of the prompt's; None: nothing is asked for."""
    if num_each is not None and num_tokens * (num_each + 1) > MAX_PROMPT_LOGPROBS:
        what = f"{num_tokens} tokens of prompt with {num_each + 1} log-probabilities each"
        raise BadRequest(f"{what} are over {MAX_PROMPT_LOGPROBS:,}: ask for fewer", "prompt_logprobs")


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
