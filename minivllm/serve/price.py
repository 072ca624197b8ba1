"""What a request may cost at worst, known before anything of it runs. What is too dear is a 400 that names the field
and the limit.

sequences   prompts x n, or best_of                                                        --max-request-sequences
tokens      of the prompts, and of each sequence at its longest                            --max-request-tokens
bytes       of the answer: each position has its text and, for each choice, its reported   --max-answer-bytes
            log-probabilities; and of the lists and texts that come with the request, for each of its prompts
lists       tokens that they name and letters of bad words, for each sequence              MAX_LISTED

Bytes are those of JSON at the usual length of a token, which is a few letters; what the server holds meanwhile is some
times as much. What several may take together is said in shares.py. Costs are arithmetic: nothing here looks at a
prompt's tokens or a list's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from minivllm.errors import BadRequest
from minivllm.request import SamplingParams
from minivllm.serve.protocol import CompletionRequest
from minivllm.serve.request_limits import RequestLimits
from minivllm.serve.shares import ENTRY_BYTES, TOKEN_BYTES, most_answer_bytes

if TYPE_CHECKING:
    from minivllm.serve.generation import Job

MAX_LISTED = 2**20
NAMED_BYTES = 32  # a log-probability in the lists that echo a prompt: "text":-1.2345678901234567
LISTED_BYTES = 64  # a value of a list, in the front end and in the core
CHAR_BYTES = 4  # a character of a text, likewise, at most
LISTS = ("allowed_token_ids", "logit_bias", "stop_token_ids", "bad_words")


class Names(NamedTuple):
    """What an endpoint calls the fields that make a request dear."""

    prompt: str
    max_tokens: str
    logprobs: str


def check(job: Job, names: Names) -> None:
    """Raises BadRequest for a request that is too dear; another's job knows from now on how many bytes it may take."""
    limits = job.service.request_limits
    check_sequences(len(job.prompts), job.params.num_sequences, limits, names.prompt)
    lengths = [len(prompt.token_ids) for prompt in job.prompts]
    outputs = [job.params.num_sequences * longest(job, length) for length in lengths]
    check_tokens(sum(lengths), sum(outputs), limits, names)
    lists = listed(job)
    check_lists(lists, job.num_sequences)
    parts = answer_parts(job, lengths, outputs, names)
    parts |= {name: LISTED_BYTES * num * len(lengths) for name, num in lists.items()}
    parts |= {name: num * len(lengths) for name, num in texts(job).items()}
    check_bytes(parts, most_answer_bytes(limits.answer_bytes, job.service.engine.max_model_len))
    job.num_bytes = sum(parts.values())


def check_sequences(num_prompts: int, each: int, limits: RequestLimits, prompt_name: str) -> None:
    """each: outputs of a prompt. To be asked before the prompts are looked at. Raises BadRequest."""
    if (num := num_prompts * each) > limits.sequences:
        what = f"{num_prompts} prompt{'s' * (num_prompts > 1)} with {each} outputs each are {num} sequences"
        name = prompt_name if num_prompts > 1 else "n"
        raise BadRequest(f"{what}; {limits.sequences} at most in one request (--max-request-sequences)", name)


def check_tokens(num_prompt: int, num_output: int, limits: RequestLimits, names: Names) -> None:
    if (num := num_prompt + num_output) > limits.tokens:
        what = f"prompts of {num_prompt:,} tokens and outputs of up to {num_output:,} are {num:,}"
        name = names.prompt if num_prompt > num_output else names.max_tokens
        raise BadRequest(f"{what}; {limits.tokens:,} at most in one request (--max-request-tokens)", name)


def check_lists(lists: dict[str, int], num_sequences: int) -> None:
    for name, num in lists.items():
        if num * num_sequences > MAX_LISTED:
            what = f"{name} of {num:,} for each of {num_sequences} sequences are {num * num_sequences:,}"
            raise BadRequest(f"{what}; {MAX_LISTED:,} at most in one request", name)


def check_bytes(parts: dict[str, int], most: int) -> None:
    """parts: by the field that asks for them."""
    if (num := sum(parts.values())) > most:
        name = max(parts, key=parts.__getitem__)
        what = f"the answer may take {num:,} bytes, {parts[name]:,} of them because of {name}"
        raise BadRequest(f"{what}; {most:,} at most in one request (--max-answer-bytes)", name)


def longest(job: Job, length: int) -> int:
    """An output behind a prompt of that length."""
    room = job.service.engine.max_model_len - length
    return 0 if job.score_only else min(job.params.max_tokens or room, room)


def listed(job: Job) -> dict[str, int]:
    """How long the lists are that a request brings."""
    params = job.params
    if not isinstance(params, SamplingParams):
        return {}
    found = {name: len(getattr(params, name) or ()) for name in LISTS}
    return found | {"bad_words": sum(map(len, params.bad_words))}


def texts(job: Job) -> dict[str, int]:
    """Bytes of the texts that cross to the core with each prompt, by the field that brought them."""
    params = job.params
    if not isinstance(params, SamplingParams):
        return {}
    stop, held = CHAR_BYTES * sum(map(len, params.stop or ())), params.structured
    return {"stop": stop} | ({} if held is None else {held.field: len(msgspec.msgpack.encode(held))})


def answer_parts(job: Job, lengths: Sequence[int], outputs: Sequence[int], names: Names) -> dict[str, int]:
    """Bytes of the answer, by the field that asks for them. lengths: of the prompts; outputs: of all sequences of each,
    in tokens."""
    body, num_each = job.body, job.params.num_sequences
    is_completion = isinstance(body, CompletionRequest)
    num_prompt, num_output = sum(lengths), sum(outputs)
    echoed = num_each * num_prompt if is_completion and body.echo else 0
    repeated = num_each * num_prompt if is_completion else num_prompt  # what is told of the prompt in each choice
    ids = (repeated + num_output) if body.return_token_ids else 0
    reported, of_prompt = num_reported(job)
    entry = NAMED_BYTES if echoed else ENTRY_BYTES  # without echo it may be llama.cpp's or Ollama's form
    return {
        names.max_tokens: TOKEN_BYTES * (echoed + num_output + ids),
        names.logprobs: entry * (echoed + num_output) * reported,
        "prompt_logprobs": ENTRY_BYTES * repeated * of_prompt,
    }


def num_reported(job: Job) -> tuple[int, int]:
    """Log-probabilities at a position: of an output, or of a prompt that is echoed with it; of a prompt by itself. The
    token that was taken is one more."""
    params, body = job.params, job.body
    if not isinstance(params, SamplingParams):
        return 0, 0
    vocab_size = job.service.engine.tokenizer.vocab_size

    def entries(asked: int | None) -> int:
        return 0 if asked is None else 2 + (vocab_size if asked == -1 else asked)

    return entries(params.num_logprobs), entries(body.prompt_logprobs)
