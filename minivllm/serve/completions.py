"""/v1/completions: text or token ids in, text out. The older of OpenAI's two endpoints; evaluation harnesses live on
its `echo` with `logprobs`, which gives the log-probability of every token of the prompt."""

from __future__ import annotations

import codecs
from collections import defaultdict

from msgspec import UNSET, UnsetType

from minivllm.engine.output import CompletionOutput, Logprob, RequestOutput
from minivllm.engine.prompt_embeds import KEY, check_params, embeds_of
from minivllm.errors import BadRequest
from minivllm.request import BeamSearchParams, SamplingParams
from minivllm.serve import price
from minivllm.serve.beams import beam_search
from minivllm.serve.generation import (
    Job,
    Prompt,
    Service,
    check_context,
    check_length,
    check_logprobs,
    finite,
    is_shown,
    new_id,
    prompt_logprobs,
    tokenize,
    truncated,
    wants_tokens,
    with_nulls,
)
from minivllm.serve.prompt_embeds import read_embeds
from minivllm.serve.protocol import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    LegacyLogprobs,
    PromptLogprobs,
    Usage,
    now,
)

DEFAULT_MAX_TOKENS = 16
NAMES = price.Names("prompt", "max_tokens", "logprobs")
Positions = list[dict[int, Logprob] | None]


def prepare(body: CompletionRequest, service: Service) -> tuple[Job, CompletionShape]:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens=0 asks for nothing; with echo=true it scores the prompt", "max_tokens")
    if body.logprob_token_ids and (body.logprobs is None or max_tokens == 0):
        raise BadRequest("logprob_token_ids needs logprobs, and max_tokens above 0", "logprob_token_ids")
    params: SamplingParams | BeamSearchParams = body.sampling(max(1, max_tokens), body.logprobs)
    if body.use_beam_search:
        params = beam_search(body, max_tokens)
    elif body.stream and params.selects:
        raise BadRequest("best_of above n does not go with stream=true: the best are known at the end", "best_of")
    elif body.echo and body.logprobs is not None:
        params = params.replace(prompt_logprobs=larger(body.logprobs, body.prompt_logprobs or 0))
    embeds = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds or []
    given = as_list(body.prompt) if body.prompt or not embeds else []
    price.check_sequences(len(embeds) + len(given), params.num_sequences, service.request_limits, "prompt")
    prompts = as_vectors(embeds, body, params, service) if embeds else []
    prompts += [as_prompt(item, body, max_tokens, service) for item in given]
    check_context(service, prompts, max_tokens, "prompt", "max_tokens")
    of_prompt = None if isinstance(params, BeamSearchParams) else params.prompt_logprobs
    check_logprobs(service, {"logprobs": body.logprobs, "prompt_logprobs": of_prompt}, prompts)
    job = Job(service, new_id("cmpl", body.request_id), prompts, params, body, score_only=max_tokens == 0)
    price.check(job, NAMES)
    return job, CompletionShape(job.id, service, body)


def larger(*nums: int) -> int:
    """Of numbers of log-probabilities, where -1 is all."""
    return -1 if -1 in nums else max(nums)


def as_vectors(
    embeds: list[str], body: CompletionRequest, params: SamplingParams | BeamSearchParams, service: Service
) -> list[Prompt]:
    """Raises BadRequest, also for what needs to know a prompt's tokens."""
    if not service.takes_embeds:
        raise BadRequest("this server takes no prompt_embeds: start it with --enable-prompt-embeds", KEY)
    if not (width := service.engine.info.get("embed_size", 0)):
        raise BadRequest("this model takes no prompt_embeds", KEY)
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise BadRequest(f"{name} does not go with prompt_embeds: they have no tokens", name)
    check_params(params.step if isinstance(params, BeamSearchParams) else params)
    most = service.engine.max_model_len
    found = (embeds_of({KEY: read_embeds(text, width, most)}, width, most) for text in embeds)
    return [Prompt(each.token_ids, "", each) for each in found]


def as_list(prompt: str | list[str | int | list[int]] | None, name: str = "prompt") -> list[str | list[int]]:
    """One prompt or several, by OpenAI's four forms. name: of the field."""
    if prompt is None:
        raise BadRequest(f"{name} is missing", name)
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        what = "is empty" if not prompt else "mixes types: give texts, or token ids, or lists of token ids"
        raise BadRequest(f"{name} {what}", name)
    return [prompt] if kinds == {int} else prompt


def as_prompt(item: str | list[int], body: CompletionRequest, max_tokens: int, service: Service) -> Prompt:
    """Raises ApiError 400 for one that is too long: those behind it are not looked at."""
    if isinstance(item, str):
        prompt = tokenize(service, item, add_special_tokens=body.add_special_tokens is not False)
        prompt = truncated(prompt, body, max_tokens, service)
        check_length(service, len(prompt.token_ids), "prompt")
        return prompt
    check_length(service, len(item), "prompt")
    check_ids(item, service, "prompt")
    prompt = Prompt(item, service.engine.tokenizer.decode(item, skip_special_tokens=False))
    return truncated(prompt, body, max_tokens, service)


def check_ids(token_ids: list[int], service: Service, param: str) -> None:
    vocab_size = service.engine.tokenizer.vocab_size
    if (wrong := next((token for token in token_ids if not 0 <= token < vocab_size), None)) is not None:
        raise BadRequest(f"token id {wrong} is not in the vocabulary of {vocab_size}", param)


class CompletionShape:
    def __init__(self, id: str, service: Service, body: CompletionRequest):
        self.id, self.model, self.body, self.created = id, service.answers_as(body), body, now()
        self.tokenizer, self.fingerprint = service.engine.tokenizer, service.fingerprint
        self.offsets: dict[int, Offset] = defaultdict(Offset)  # by choice
        self.names: dict[int, str] = {}  # of tokens
        # By prompt, for all of its choices; a stream brings them once, with the first.
        self.echoed: dict[int, tuple[LegacyLogprobs, Offset]] = {}
        self.scored: dict[int, PromptLogprobs] = {}

    def opening(self, choice: int, prompt: Prompt, output: RequestOutput) -> CompletionChoice | None:
        if not (self.body.echo or self.body.return_token_ids):
            return None
        made = CompletionChoice(index=choice)
        if self.body.echo:
            made.text, made.logprobs = prompt.text, self._prompt_logprobs(choice, prompt, output)
        if self.body.return_token_ids:
            made.prompt_token_ids, made.token_ids = prompt.token_ids, []
        return made

    def deltas(self, choice: int, out: CompletionOutput) -> list[CompletionChoice]:
        return [self._delta(choice, out)] if is_shown(out) or wants_tokens(self.body, out) else []

    def _delta(self, choice: int, out: CompletionOutput) -> CompletionChoice:
        return CompletionChoice(
            index=choice, text=out.text, logprobs=self._logprobs(choice, out), token_ids=self._token_ids(out)
        )

    def ending(self, choice: int, out: CompletionOutput) -> CompletionChoice:
        reasons = {"finish_reason": out.finish_reason, "stop_reason": out.stop_reason}
        return CompletionChoice(index=choice, token_ids=self._token_ids(out), **reasons)

    def whole(self, choice: int, prompt: Prompt, output: RequestOutput, out: CompletionOutput) -> CompletionChoice:
        opening, made = self.opening(choice, prompt, output), self._delta(choice, out)
        made.finish_reason, made.stop_reason = out.finish_reason, out.stop_reason
        if opening is not None:
            made.text = opening.text + made.text
            made.logprobs = joined(opening.logprobs, made.logprobs)
            made.prompt_token_ids = opening.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            number = self._prompt_number(choice)
            made.prompt_logprobs = self.scored[number] = self.scored.get(number) or prompt_logprobs(output)
        return with_nulls(made, ("token_ids", "prompt_token_ids", "prompt_logprobs"))

    def wrap(
        self,
        choices: list[CompletionChoice],
        usage: Usage | None | UnsetType,
        outputs: list[RequestOutput] | None = None,
    ) -> Completion:
        common = {"id": self.id, "model": self.model, "created": self.created, "system_fingerprint": self.fingerprint}
        made = Completion(**common, choices=choices, usage=usage)
        return made if outputs is None else with_nulls(made, ("service_tier", "kv_transfer_params"))

    def _token_ids(self, out: CompletionOutput) -> list[int] | UnsetType:
        return list(out.token_ids) if self.body.return_token_ids else UNSET

    def _prompt_logprobs(self, choice: int, prompt: Prompt, output: RequestOutput) -> LegacyLogprobs | None:
        if self.body.logprobs is None:
            return None
        number = self._prompt_number(choice)
        if number not in self.echoed:
            offset = Offset()
            legacy = self._legacy(offset, prompt.token_ids, output.prompt_logprobs, frozenset())
            self.echoed[number] = legacy, offset
        legacy, offset = self.echoed[number]
        self.offsets[choice] = offset.copy()
        return legacy

    def _prompt_number(self, choice: int) -> int:
        return choice // (self.body.n or 1)

    def _logprobs(self, choice: int, out: CompletionOutput) -> LegacyLogprobs | None:
        hidden = frozenset() if self.body.skip_special_tokens is False else self.tokenizer.special_ids
        if out.logprobs is None:
            return None
        return self._legacy(self.offsets[choice], out.token_ids, out.logprobs, hidden)

    def _legacy(
        self, offset: Offset, tokens: list[int], positions: Positions, hidden: frozenset[int]
    ) -> LegacyLogprobs:
        """hidden: tokens that the text does not show. A prompt's first token has no log-probability. Of a position the
        token itself comes first, then the likeliest, as in vLLM."""
        legacy = LegacyLogprobs()
        for token, position in zip(tokens, positions, strict=True):
            likely = sorted((position or {}).items(), key=lambda item: (item[0] != token, -item[1].logprob))
            legacy.tokens.append(self._name(token))
            legacy.token_logprobs.append(finite(position[token].logprob) if position else None)
            legacy.top_logprobs.append({self._name(t): finite(lp.logprob) for t, lp in likely} or None)
            shown = b"" if token in hidden else self.tokenizer.token_bytes(token)
            legacy.text_offset.append(offset.advance(shown))
        return legacy

    def _name(self, token: int) -> str:
        if (name := self.names.get(token)) is None:
            name = self.names[token] = self._find_name(token)
        return name

    def _find_name(self, token: int) -> str:
        """The token's text. A part of a character is named as OpenAI does, "bytes:\\xe2": as U+FFFD, all such tokens
        would be one key of top_logprobs."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
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

    def copy(self) -> Offset:
        made = Offset()
        made.num_chars = self.num_chars
        made.decoder.setstate(self.decoder.getstate())
        return made

    def advance(self, token_bytes: bytes) -> int:
        begin = self.num_chars
        self.num_chars += len(self.decoder.decode(token_bytes))
        return begin


def joined(first: LegacyLogprobs | None, second: LegacyLogprobs | None) -> LegacyLogprobs | None:
    if first is None or second is None:
        return first or second
    return LegacyLogprobs(*(getattr(first, name) + getattr(second, name) for name in LegacyLogprobs.__struct_fields__))
