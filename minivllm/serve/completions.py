"""/v1/completions: text or token ids in, text out. The older of OpenAI's two endpoints; evaluation harnesses live on
its `echo` with `logprobs`, which gives the log-probability of every token of the prompt."""

from __future__ import annotations

import codecs
from collections import defaultdict

from msgspec import UNSET, UnsetType

from minivllm.engine.output import CompletionOutput, Logprob, RequestOutput
from minivllm.errors import BadRequest
from minivllm.request import BeamSearchParams, SamplingParams
from minivllm.serve.beams import beam_search
from minivllm.serve.generation import (
    Job,
    Prompt,
    Service,
    check_context,
    check_length,
    finite,
    new_id,
    prompt_logprobs,
    tokenize,
    wants_tokens,
)
from minivllm.serve.protocol import Completion, CompletionChoice, CompletionRequest, LegacyLogprobs, Usage, now

DEFAULT_MAX_TOKENS = 16
MAX_SEQUENCES = 2048  # of one request
Positions = list[dict[int, Logprob] | None]


async def prepare(body: CompletionRequest, service: Service) -> tuple[Job, CompletionShape]:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens=0 asks for nothing; with echo=true it scores the prompt", "max_tokens")
    params: SamplingParams | BeamSearchParams = body.sampling(max(1, max_tokens), body.logprobs)
    if body.use_beam_search:
        params = beam_search(body, max_tokens)
    elif body.stream and params.selects:
        raise BadRequest("best_of above n does not go with stream=true: the best are known at the end", "best_of")
    elif body.echo and body.logprobs is not None:
        params = params.replace(prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    given = as_list(body.prompt)
    if (num_sequences := len(given) * params.num_sequences) > MAX_SEQUENCES:
        what = f"{len(given)} prompts with {params.num_sequences} outputs each are {num_sequences} sequences"
        raise BadRequest(f"{what}; {MAX_SEQUENCES} at most in one request", "prompt")
    prompts = [await as_prompt(item, service) for item in given]
    check_context(service, prompts, max_tokens, "prompt", "max_tokens")
    job = Job(service, new_id("cmpl"), prompts, params, body, score_only=max_tokens == 0)
    return job, CompletionShape(job.id, service, body)


def as_list(prompt: str | list[str | int | list[int]], name: str = "prompt") -> list[str | list[int]]:
    """One prompt or several, by OpenAI's four forms. name: of the field."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        what = "is empty" if not prompt else "mixes types: give texts, or token ids, or lists of token ids"
        raise BadRequest(f"{name} {what}", name)
    return [prompt] if kinds == {int} else prompt


async def as_prompt(item: str | list[int], service: Service) -> Prompt:
    if isinstance(item, str):
        return await tokenize(service, item, add_special_tokens=True)
    check_length(service, len(item), "prompt")
    check_ids(item, service, "prompt")
    return Prompt(item, service.engine.tokenizer.decode(item, skip_special_tokens=False))


def check_ids(token_ids: list[int], service: Service, param: str) -> None:
    vocab_size = service.engine.tokenizer.vocab_size
    if (wrong := next((token for token in token_ids if not 0 <= token < vocab_size), None)) is not None:
        raise BadRequest(f"token id {wrong} is not in the vocabulary of {vocab_size}", param)


class CompletionShape:
    def __init__(self, id: str, service: Service, body: CompletionRequest):
        self.id, self.model, self.body, self.created = id, service.answers_as(body), body, now()
        self.tokenizer = service.engine.tokenizer
        self.offsets: dict[int, Offset] = defaultdict(Offset)  # by choice
        self.positions: dict[int, Positions] = {}  # prompt logprobs, by prompt

    def opening(self, choice: int, prompt: Prompt, output: RequestOutput) -> CompletionChoice | None:
        if not (self.body.echo or self.body.return_token_ids):
            return None
        made = CompletionChoice(index=choice)
        if self.body.echo:
            made.text, made.logprobs = prompt.text, self._prompt_logprobs(choice, prompt, output)
        if self.body.return_token_ids:
            made.prompt_token_ids = prompt.token_ids
        return made

    def deltas(self, choice: int, out: CompletionOutput) -> list[CompletionChoice]:
        return [self._delta(choice, out)] if out.text or wants_tokens(self.body, out) else []

    def _delta(self, choice: int, out: CompletionOutput) -> CompletionChoice:
        return CompletionChoice(
            index=choice, text=out.text, logprobs=self._logprobs(choice, out), token_ids=self._token_ids(out)
        )

    def ending(self, choice: int, out: CompletionOutput) -> CompletionChoice:
        return CompletionChoice(index=choice, finish_reason=out.finish_reason, stop_reason=out.stop_reason)

    def whole(self, choice: int, prompt: Prompt, output: RequestOutput, out: CompletionOutput) -> CompletionChoice:
        opening, made = self.opening(choice, prompt, output), self._delta(choice, out)
        made.finish_reason, made.stop_reason = out.finish_reason, out.stop_reason
        if opening is not None:
            made.text = opening.text + made.text
            made.logprobs = joined(opening.logprobs, made.logprobs)
            made.prompt_token_ids = opening.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            made.prompt_logprobs = prompt_logprobs(output)
        return made

    def wrap(
        self,
        choices: list[CompletionChoice],
        usage: Usage | None | UnsetType,
        outputs: list[RequestOutput] | None = None,
    ) -> Completion:
        return Completion(id=self.id, model=self.model, created=self.created, choices=choices, usage=usage)

    def _token_ids(self, out: CompletionOutput) -> list[int] | UnsetType:
        return list(out.token_ids) if self.body.return_token_ids else UNSET

    def _prompt_logprobs(self, choice: int, prompt: Prompt, output: RequestOutput) -> LegacyLogprobs | None:
        if self.body.logprobs is None:
            return None
        # A stream brings them once, for the first of the n choices.
        number = choice // (self.body.n or 1)
        positions = self.positions.setdefault(number, output.prompt_logprobs)
        return self._legacy(choice, prompt.token_ids, positions, frozenset())

    def _logprobs(self, choice: int, out: CompletionOutput) -> LegacyLogprobs | None:
        hidden = frozenset() if self.body.skip_special_tokens is False else self.tokenizer.special_ids
        return None if out.logprobs is None else self._legacy(choice, out.token_ids, out.logprobs, hidden)

    def _legacy(self, choice: int, tokens: list[int], positions: Positions, hidden: frozenset[int]) -> LegacyLogprobs:
        """hidden: tokens that the text does not show. A prompt's first token has no log-probability."""
        legacy = LegacyLogprobs()
        for token, position in zip(tokens, positions, strict=True):
            likely = sorted(position.items(), key=lambda item: -item[1].logprob) if position else []
            legacy.tokens.append(self._name(token))
            legacy.token_logprobs.append(finite(position[token].logprob) if position else None)
            legacy.top_logprobs.append({self._name(t): finite(lp.logprob) for t, lp in likely} or None)
            shown = b"" if token in hidden else self.tokenizer.token_bytes(token)
            legacy.text_offset.append(self.offsets[choice].advance(shown))
        return legacy

    def _name(self, token: int) -> str:
        """The token's text. A part of a character is named as OpenAI does, "bytes:\\xe2": as U+FFFD, all such tokens
        would be one key of top_logprobs."""
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Offset:
    """Where the next token begins in the text. A token that ends inside a character begins where the character will."""

    def __init__(self) -> None:
        self.num_chars = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, token_bytes: bytes) -> int:
        begin = self.num_chars
        self.num_chars += len(self.decoder.decode(token_bytes))
        return begin


def joined(first: LegacyLogprobs | None, second: LegacyLogprobs | None) -> LegacyLogprobs | None:
    if first is None or second is None:
        return first or second
    return LegacyLogprobs(*(getattr(first, name) + getattr(second, name) for name in LegacyLogprobs.__struct_fields__))
