"""From the engine core's deltas to what a client sees: text, log-probabilities, finish reasons, timings.

Stop strings are found here, since the core knows no text: such a request ends at once for its client, and its id is
handed back to be aborted in the core; what the core still sends for it is ignored. Tokens after the one that completed
the stop string are cut, so the output does not depend on how many tokens a step brought.

n > 1: the core sees n requests; their outputs are the choices of one RequestOutput. best_of > n: it sees best_of, of
which the n likeliest are returned. Names and shapes are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from minivllm.engine.detokenizer import AnswerFinder, Detokenizer, NullDetokenizer
from minivllm.engine.tokenizer import TextTokenizer
from minivllm.errors import BadRequest
from minivllm.plan import Delta, PositionLogprobs
from minivllm.request import SamplingParams

Kind = Literal["cumulative", "delta", "final"]


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOfToken = dict[int, Logprob]  # the token taken first, then the likeliest ones, best first
Named = dict[str, list[LogprobsOfToken]]  # of prompts, by the engine core's id


@dataclass(slots=True)
class CompletionOutput:
    """One choice. For kind "delta" text, token_ids and logprobs hold only what is new."""

    index: int  # of the choice, from 0
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # of all tokens so far; None unless asked for logprobs or best_of
    # One a token: {token id: Logprob(logprob, rank, decoded_token)}, the token taken first, then the likeliest ones.
    logprobs: list[LogprobsOfToken] | None = None
    finish_reason: str | None = None  # stop | length | abort | error; None: not finished
    stop_reason: int | str | None = None  # the stop token or string; None: an end of sequence, or another reason

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds, on the clock of the `now` arguments. Times that have not come yet are 0."""

    arrival_time: float
    scheduled_time: float = 0.0  # when the first step began that had a choice of it; AsyncLLM's alone
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    finished_time: float = 0.0
    num_generation_tokens: int = 0  # of all choices
    itls: list[float] = field(default_factory=list)  # between two steps that brought tokens; all choices one by one
    num_choices: int = 1
    num_joins: int = 0  # how often a choice has entered the batch: once, and again behind each preemption

    @property
    def num_preemptions(self) -> int:
        """Of all choices."""
        return max(0, self.num_joins - self.num_choices)

    @property
    def ttft(self) -> float | None:
        """From arrival to the first token."""
        return self.first_token_time - self.arrival_time if self.first_token_time else None

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first of each choice."""
        num_later = self.num_generation_tokens - self.num_choices
        return sum(self.itls) / num_later if num_later > 0 and self.itls else None

    @property
    def e2e(self) -> float | None:
        """From arrival to the end of the last choice."""
        return self.finished_time - self.arrival_time if self.finished_time else None


@dataclass(slots=True)
class RequestOutput:
    """All choices of one request, as far as they have come."""

    request_id: str
    prompt: str | None  # None: it came as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOfToken | None] | None = None  # one a prompt token; None for the first
    outputs: list[CompletionOutput] = field(default_factory=list)  # one a choice; with best_of and beams best first
    finished: bool = False  # all choices have ended
    num_cached_tokens: int = 0  # of the prompt: found in the prefix cache, and not computed
    metrics: RequestMetrics | None = None
    error: str | None = None  # why a choice ended with finish_reason "error"


class _Choice:
    """One request of the engine core, and which part of its output has been handed out."""

    def __init__(self, parent: _Parent, index: int, detokenizer: Detokenizer | NullDetokenizer):
        self.parent = parent
        self.index = index
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []
        self.logprobs: list[LogprobsOfToken] | None = [] if parent.params.num_logprobs is not None else None
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.in_core = True  # the engine core has not ended it, nor been told to
        self.last_token_time = 0.0
        self.new_texts: list[str] = []
        self.num_sent = 0  # tokens handed out, for kind "delta"

    def take(self, delta: Delta, now: float) -> None:
        hides_stop_token = delta.finish_reason == "stop" and not self.parent.params.include_stop_str_in_output
        num_before = self.detokenizer.num_tokens
        shown = delta.token_ids[:-1] if hides_stop_token else delta.token_ids
        self.new_texts.append(self.detokenizer.push(shown, finished=delta.finish_reason is not None))
        token_ids = delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self.detokenizer.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", self.detokenizer.stopped_by
            token_ids = token_ids[: self.detokenizer.num_tokens - num_before]
        self.token_ids += token_ids
        if delta.logprobs is not None:
            self._take_logprobs(delta.logprobs[: len(token_ids)])
        if token_ids:
            self._take_time(len(token_ids), now)

    def end(self, reason: str) -> None:
        """Ended from outside: the text that was held back is shown."""
        self.new_texts.append(self.detokenizer.push((), finished=True))
        self.finish_reason = reason

    def output(self, only_new: bool) -> CompletionOutput:
        start, text = (self.num_sent, "".join(self.new_texts)) if only_new else (0, self.detokenizer.text)
        self.num_sent = len(self.token_ids)
        self.new_texts.clear()
        reports = self.logprobs is not None or self.parent.params.selects
        logprobs = None if self.logprobs is None else self.logprobs[:]
        if only_new and logprobs:
            self.logprobs = []  # a stream keeps none that it has sent: they are many times its text
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[start:],
            cumulative_logprob=self.cumulative_logprob if reports else None,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _take_logprobs(self, positions: list[PositionLogprobs]) -> None:
        for entries in positions:
            self.cumulative_logprob += entries[0][1]
            if self.logprobs is not None:
                self.logprobs.append(self.parent.as_dict(entries))

    def _take_time(self, num_tokens: int, now: float) -> None:
        metrics = self.parent.metrics
        metrics.num_generation_tokens += num_tokens
        metrics.first_token_time = metrics.first_token_time or now
        if self.last_token_time:
            metrics.itls.append(now - self.last_token_time)
        self.last_token_time = metrics.last_token_time = now


class _Parent:
    """One request of a client."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: TextTokenizer | None,
        arrival_time: float,
        kind: Kind,
        find_answer: Callable[[], AnswerFinder] | None,
    ):
        self.id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.tokenizer = tokenizer if params.detokenize else None
        self.kind = kind
        self.find_answer = find_answer
        self.metrics = RequestMetrics(arrival_time)
        self.choices: dict[str, _Choice] = {}
        self.num_live = 0  # choices that have not finished
        self.prompt_logprobs: list[LogprobsOfToken | None] | None = None if params.prompt_logprobs is None else [None]
        self.sent_prompt_logprobs = False
        self.num_cached_tokens = 0
        self.error: str | None = None

    def add_choice(self, child_id: str) -> _Choice:
        detokenizer = (
            NullDetokenizer()
            if self.tokenizer is None
            else Detokenizer(self.tokenizer, self.params, self.prompt_token_ids, self.find_answer)
        )
        choice = self.choices[child_id] = _Choice(self, len(self.choices), detokenizer)
        self.metrics.num_choices = self.num_live = len(self.choices)
        return choice

    @property
    def finished(self) -> bool:
        return self.num_live == 0

    def take_first_choice(self, delta: Delta, named: list[LogprobsOfToken]) -> None:
        """What all choices share is taken from the first one's deltas. named: the delta's prompt_logprobs."""
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        if named and self.prompt_logprobs is not None:
            missing = len(self.prompt_token_ids) - len(self.prompt_logprobs)
            self.prompt_logprobs += named[:missing]

    def as_dict(self, entries: PositionLogprobs) -> LogprobsOfToken:
        text = self.tokenizer.token_text if self.tokenizer is not None else lambda token: None
        return {token: Logprob(logprob, rank, text(token)) for token, logprob, rank in entries}

    def output(self, touched: Sequence[_Choice]) -> RequestOutput:
        """Kind "delta": only the choices touched, and what is new of them. With best_of: the best ones, whole."""
        only_new = self.kind == "delta" and not self.params.selects
        choices = sorted(touched, key=lambda c: c.index) if only_new else list(self.choices.values())
        outputs = [choice.output(only_new) for choice in choices]
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._whole_prompt_logprobs(only_new),
            outputs=best(outputs, self.params.n) if self.params.selects else outputs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            error=self.error,
        )

    def _whole_prompt_logprobs(self, once: bool) -> list[LogprobsOfToken | None] | None:
        found = self.prompt_logprobs
        if found is None or len(found) < len(self.prompt_token_ids) or (once and self.sent_prompt_logprobs):
            return None
        self.sent_prompt_logprobs = True
        return found


def best(outputs: list[CompletionOutput], n: int) -> list[CompletionOutput]:
    """The n likeliest, best first, numbered anew."""
    chosen = sorted(outputs, key=lambda out: -out.cumulative_logprob)[:n]
    for index, out in enumerate(chosen):
        out.index = index
    return chosen


class OutputProcessor:
    def __init__(self, tokenizer: TextTokenizer | None):
        self._tokenizer = tokenizer
        self._parents: dict[str, _Parent] = {}
        self._choices: dict[str, _Choice] = {}  # by the id that the engine core knows

    def __len__(self) -> int:
        return len(self._parents)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        child_ids: Sequence[str],
        arrival_time: float,
        kind: Kind = "cumulative",
        find_answer: Callable[[], AnswerFinder] | None = None,
    ) -> None:
        """Expect outputs. child_ids: the params.num_sequences ids that the engine core will use. params: resolved.
        find_answer: for a model that thinks, of each output.

        kind: each output holds everything so far, only what is new, or ("final") there is one output, at the end.
        """
        if request_id in self._parents or any(child_id in self._choices for child_id in child_ids):
            raise BadRequest(f'request id "{request_id}" is in use', "request_id")
        parent = _Parent(request_id, prompt, prompt_token_ids, params, self._tokenizer, arrival_time, kind, find_answer)
        self._parents[request_id] = parent
        for child_id in child_ids:
            self._choices[child_id] = parent.add_choice(child_id)

    def parent_of(self, child_id: str) -> str | None:
        """The request that an id of the engine core belongs to."""
        choice = self._choices.get(child_id)
        return None if choice is None else choice.parent.id

    def metrics_of(self, request_id: str) -> RequestMetrics:
        """Of a request that is expected; they are kept up to date until it ends."""
        return self._parents[request_id].metrics

    def named(self, deltas: Sequence[Delta]) -> Named:
        """What a step says of prompts' log-probabilities, for `process`. They may be a hundred thousand, so this may be
        called in a thread of its own."""
        found: Named = {}
        for delta in deltas:
            if delta.prompt_logprobs and (choice := self._choices.get(delta.req_id)) is not None:
                found[delta.req_id] = [choice.parent.as_dict(entries) for entries in delta.prompt_logprobs]
        return found

    def scheduled(self, req_ids: Iterable[str], begin: float) -> None:
        """A step that began then had these for the first time, or again behind a preemption. May be called in a thread
        of its own."""
        for req_id in req_ids:
            if (choice := self._choices.get(req_id)) is not None:
                metrics = choice.parent.metrics
                metrics.scheduled_time = metrics.scheduled_time or max(begin, metrics.arrival_time)
                metrics.num_joins += 1

    def process(
        self, deltas: Sequence[Delta], now: float, named: Named | None = None
    ) -> tuple[list[RequestOutput], list[str]]:
        """One step's deltas -> (outputs for clients, in the order of the deltas; ids to abort in the engine core)."""
        named = self.named(deltas) if named is None else named
        touched: dict[str, dict[str, _Choice]] = {}
        aborts: list[str] = []
        for delta in deltas:
            choice = self._choices.get(delta.req_id)
            if choice is None or delta.arrival_time != choice.parent.metrics.arrival_time:
                continue  # of a request that was aborted, perhaps with the id of one that lives
            choice.in_core = choice.in_core and delta.finish_reason is None
            if choice.finish_reason is not None:
                continue
            parent = choice.parent
            if choice.index == 0:
                parent.take_first_choice(delta, named.get(delta.req_id, []))
            parent.error = parent.error or delta.error
            choice.take(delta, now)
            parent.num_live -= choice.finish_reason is not None
            if delta.token_ids or choice.finish_reason is not None:
                touched.setdefault(parent.id, {})[delta.req_id] = choice
            if choice.finish_reason is not None and choice.in_core:
                choice.in_core = False
                aborts.append(delta.req_id)
        outputs = [self._emit(self._parents[id], list(choices.values()), now) for id, choices in touched.items()]
        return [output for output in outputs if output is not None], aborts

    def abort(self, request_id: str) -> list[str]:
        """Forget a request whose client has left; the ids to abort in the engine core. Unknown ids are no error."""
        parent = self._parents.get(request_id)
        if parent is None:
            return []
        self._forget(parent)
        return [child_id for child_id, choice in parent.choices.items() if choice.in_core]

    def aborted(self, request_id: str, now: float | None = None) -> RequestOutput | None:
        """The last output of a request that somebody else ends (reason "abort"). It stays known until `abort`."""
        return self._end(request_id, "abort", None, now)

    def failed(self, request_id: str, error: str, now: float | None = None) -> RequestOutput | None:
        """The last output of a request that the engine cannot serve on (reason "error")."""
        return self._end(request_id, "error", error, now)

    def check(self) -> None:
        """Every choice belongs to a known request, whose count of unfinished ones is right."""
        for parent in self._parents.values():
            assert parent.num_live == sum(c.finish_reason is None for c in parent.choices.values())
        assert set(self._choices) == {id for parent in self._parents.values() for id in parent.choices}
        assert all(self._choices[id] is choice for p in self._parents.values() for id, choice in p.choices.items())

    def _end(self, request_id: str, reason: str, error: str | None, now: float | None) -> RequestOutput | None:
        parent = self._parents.get(request_id)
        if parent is None or parent.finished:
            return None
        live = [choice for choice in parent.choices.values() if choice.finish_reason is None]
        for choice in live:
            choice.end(reason)
        parent.num_live = 0
        parent.error = error
        parent.metrics.finished_time = parent.metrics.last_token_time if now is None else now
        return parent.output(live)

    def _emit(self, parent: _Parent, touched: list[_Choice], now: float) -> RequestOutput | None:
        if parent.finished:
            parent.metrics.finished_time = now
            self._forget(parent)
        elif parent.kind == "final" or parent.params.selects:
            return None
        return parent.output(touched)

    def _forget(self, parent: _Parent) -> None:
        del self._parents[parent.id]
        for child_id in parent.choices:
            del self._choices[child_id]
