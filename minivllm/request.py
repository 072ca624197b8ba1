"""A request and the sampling parameters it came with. Knows nothing of schedulers, blocks or tensors.

`num_computed_tokens` is the only progress variable: there is no stored phase. A request with computed < num_tokens - 1
is being prefilled, one with computed == num_tokens - 1 is decoding, and preemption is computed = 0. (vLLM V1,
`v1/core/sched/scheduler.py`, the note on its scheduling algorithm.)

While steps are in flight (planned, their output not known yet) `num_in_flight` says how far they will bring it:

    | num_computed_tokens | num_in_flight |  where the next plan goes on
    | K and V are there   | on their way  |

The last of these may be a token that nobody has seen: it is being sampled, and its place is all that a plan needs.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, cast

import msgspec

from minivllm.errors import BadRequest
from minivllm.structured.params import StructuredParams

MAX_LOGPROBS = 20  # OpenAI's bound on top_logprobs; engine.max_logprobs may be another
MAX_LOGPROB_TOKEN_IDS = 128  # vLLM's
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 8192  # of all of them: each may become a state of an automaton
MAX_STOP_TOKEN_IDS = 1024  # each is looked at after each token
MAX_BAD_WORDS = 1000
MAX_WORD_CHARS = 65_536  # of all bad words
MAX_LENGTH_PENALTY = 10.0  # a length to this power is a number yet
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """How to choose the tokens of one request. Names and meanings follow vLLM's class of the same name. A value out of
    its range raises BadRequest.

    temperature 0 is greedy. top_k 0 or -1 keeps the whole vocabulary. `stop` strings end the text before the match
    (after it with include_stop_str_in_output); `stop_token_ids` end it with the token kept in token_ids but not in the
    text. `logprobs`/`prompt_logprobs`: how many of the likeliest tokens to report beside the one taken, -1: all.
    `logprob_token_ids`: report these tokens in the place of the likeliest.

    `seed`: the same seed, prompt and model give the same tokens whatever else is in the batch. None draws one from the
    engine's own generator (`EngineConfig.model.seed`).

    `best_of`: generate so many, return the n with the highest cumulative log-probability, best first (vLLM V0's). They
    come once, at the end, since which ones they are is not known before.

    `structured`: what the output must look like (structured/params.py). How it meets min_tokens, ignore_eos and
    stop_token_ids: sampling/grammar_mask.py.

    Of equal values of a list the first is kept.

    eos_token_ids and bad_words_token_ids are filled in by the engine's front end, which has the tokenizer. What it made
    of an object it keeps in its __dict__, which is neither copied nor sent.
    """

    n: int = 1  # completions of the prompt, 1 to 128
    best_of: int | None = None  # n to 128
    temperature: float = 1.0  # logits are divided by it; at least 0
    top_p: float = 1.0  # keep the likeliest tokens that together have this probability; above 0, at most 1
    top_k: int = 0  # keep so many of the likeliest tokens
    min_p: float = 0.0  # keep tokens at least this share as likely as the likeliest; 0 to 1
    seed: int | None = None
    presence_penalty: float = 0.0  # taken from the logit of a token that the output has; -2 to 2
    frequency_penalty: float = 0.0  # taken from it as often as the output has the token; -2 to 2
    repetition_penalty: float = 1.0  # divides a logit above 0, multiplies one below, of prompt and output; 0.01 to 100
    max_tokens: int | None = 16  # of one output; None: as many as the context has room for
    min_tokens: int = 0  # of one output: neither a stop token nor an end of sequence before
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False  # go on after an end-of-sequence token
    bad_words: Sequence[str] | None = ()  # texts that the output must not hold
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit; -100 to 100
    allowed_token_ids: Sequence[int] | None = None  # no token but these
    begin_suppress_tokens: Sequence[int] | None = ()  # not these as the first token of an output
    # natural logarithms of the model's own distribution, before all of the above; -1 to engine.max_logprobs
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # likewise
    logprob_token_ids: Sequence[int] | None = None  # 128 at most
    detokenize: bool = True  # False: token ids alone, the text stays empty
    skip_special_tokens: bool = True  # in the text
    include_stop_str_in_output: bool = False
    structured: StructuredParams | None = None
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        force = msgspec.structs.force_setattr
        force(self, "stop", (self.stop,) if isinstance(self.stop, str) else _unique("stop", self.stop))
        for name in ("stop_token_ids", "bad_words", "begin_suppress_tokens"):
            force(self, name, _unique(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            force(self, "allowed_token_ids", _unique("allowed_token_ids", self.allowed_token_ids))
        force(self, "logprob_token_ids", _unique("logprob_token_ids", self.logprob_token_ids) or None)
        if self.logit_bias is not None:  # JSON has only string keys
            force(self, "logit_bias", _int_keys(self.logit_bias))
        self._check()

    def _check(self) -> None:
        _number("n", self.n, low=1, high=128, integer=True)
        if self.best_of is not None:
            _number("best_of", self.best_of, low=self.n, high=128, integer=True)
        _number("temperature", self.temperature, low=0.0, high=1e6)
        _number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _number("top_k", self.top_k, low=-1, high=2**31 - 1, integer=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)  # fp32 logits stay finite
        if self.seed is not None:
            _number("seed", self.seed, low=-MAX_SEED - 1, high=MAX_SEED, integer=True)
        if self.max_tokens is not None:
            _number("max_tokens", self.max_tokens, low=1, integer=True)
        _number("min_tokens", self.min_tokens, low=0, integer=True)
        check_min_tokens(self.min_tokens, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _number(name, value, low=-1, integer=True)
        for name, most in (("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS), ("stop_token_ids", MAX_STOP_TOKEN_IDS)):
            if (num := len(getattr(self, name) or ())) > most:
                raise BadRequest(f"at most {most} token ids in {name}, got {num}", name)
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise BadRequest(f"{name} must hold non-empty strings, got {text!r}", name)
        _few("stop", cast(Sequence[str], self.stop), "stop strings", MAX_STOP_STRINGS, MAX_STOP_CHARS)
        _few("bad_words", cast(Sequence[str], self.bad_words), "bad words", MAX_BAD_WORDS, MAX_WORD_CHARS)
        if self.stop and not self.detokenize:
            raise BadRequest("stop strings need detokenize=True", "stop")
        for token, bias in (self.logit_bias or {}).items():
            _number(f"logit_bias[{token}]", bias, low=-100.0, high=100.0, param="logit_bias")
        if self.structured is not None and not isinstance(self.structured, StructuredParams):
            raise BadRequest(f"structured must be StructuredParams(...), got {self.structured!r}", "structured")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise BadRequest("allowed_token_ids must not be empty", "allowed_token_ids")

    @property
    def num_sequences(self) -> int:
        return self.best_of or self.n

    @property
    def selects(self) -> bool:
        """Whether more is generated than returned."""
        return self.num_sequences > self.n

    @property
    def restricts(self) -> bool:
        """Whether it may leave no token to choose."""
        return bool(self.allowed_token_ids or self.bad_words or self.structured)

    @cached_property
    def answer_stop_token_ids(self) -> frozenset[int]:
        """Those of stop_token_ids that end the answer alone and not what comes before it, such as thinking: the engine
        core has no text, so its client looks for them (engine/detokenizer.py)."""
        has_more = self.structured is not None and self.structured.prelude is not None and self.detokenize
        return frozenset(self.stop_token_ids or ()) if has_more else frozenset()

    @cached_property
    def core_stop_token_ids(self) -> frozenset[int]:
        """The others, at which the engine core ends an output."""
        return frozenset(self.stop_token_ids or ()) - self.answer_stop_token_ids

    def biases_to_end(self, eos_token_ids: Container[int]) -> dict[int, float]:
        """By token, the biases that make an end of the output likelier. eos_token_ids: those of the resolved params."""
        ends = self.stop_token_ids or ()
        biases = (self.logit_bias or {}).items()
        return {token: bias for token, bias in biases if bias > 0 and (token in eos_token_ids or token in ends)}

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that may end an output."""
        return frozenset((*self.eos_token_ids, *(self.stop_token_ids or ())))

    @property
    def num_logprobs(self) -> int | None:
        """How many tokens are reported beside the one taken; None: not even its own."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # below this 1/temperature overflows fp32 logits

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with other values, which are checked again."""
        return msgspec.structs.replace(self, **changes)

    def with_values(self, **changes: Any) -> SamplingParams:
        """A copy with other values, which are known to be right. It costs the same however long the lists are, which
        both share."""
        same = copy(self)
        for name, value in changes.items():
            msgspec.structs.force_setattr(same, name, value)
        return same


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Keep the beam_width likeliest completions. Names as in vLLM's class of the same name; length_penalty and
    early_stopping mean what they mean in transformers' `generate(num_beams=...)`.

    A step looks at the 2 * beam_width likeliest tokens of each beam, and MAX_LOGPROBS of them can be reported.
    """

    beam_width: int  # 1 to 10
    max_tokens: int  # of one completion
    ignore_eos: bool = False  # go on after an end-of-sequence token
    length_penalty: float = 1.0  # a completion's score is its log-probability / its length to this power
    early_stopping: bool = False  # stop at beam_width completions, and do not ask whether a better one may come

    def __post_init__(self) -> None:
        _number("beam_width", self.beam_width, low=1, high=MAX_LOGPROBS // 2, integer=True)
        _number("max_tokens", self.max_tokens, low=1, integer=True)
        _number("length_penalty", self.length_penalty, low=-MAX_LENGTH_PENALTY, high=MAX_LENGTH_PENALTY)

    @property
    def n(self) -> int:
        """How many outputs a request has, as in SamplingParams."""
        return self.beam_width

    @property
    def num_sequences(self) -> int:
        return self.beam_width

    @property
    def step(self) -> SamplingParams:
        """What a beam asks of each step: the likeliest token, and the log-probabilities of its rivals."""
        return SamplingParams(
            temperature=0.0,
            seed=0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=2 * self.beam_width,
        )


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request asks for whose prompt becomes a vector or a score, and no token. The name is vLLM's; what the
    model is served for (model.task) is its engine's, for all requests."""

    second: int | None = None  # a pair of texts in one sequence: where the second one begins
    dimensions: int | None = None  # only so many numbers of the vector (Matryoshka)
    use_activation: bool | None = None  # whether the model's last step, unit length or sigmoid, is taken; None: its own


AS_IT_IS = PoolingParams()


def check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens})", "min_tokens")


def before_an_end(drafts: Sequence[int], ends: Container[int]) -> list[int]:
    """Drafts up to the first that would end its request."""
    return list(takewhile(lambda token: token not in ends, drafts))


def _number(name: str, value: Any, *, low: float, high: float = math.inf, low_open=False, integer=False, param=None):
    kinds = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise BadRequest(f"{name} must be {'an integer' if integer else 'a number'}, got {value!r}", param or name)
    # An integer may be too large to be a float, which is what isfinite makes of it.
    finite = isinstance(value, int) or math.isfinite(value)
    if not finite or value < low or value > high or (low_open and value == low):
        bound = f"{'above' if low_open else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
        raise BadRequest(f"{name} must be {bound}, got {_shown(value)}", param or name)


def _shown(value: float) -> str:
    """Python refuses to write out integers of thousands of digits."""
    return repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of over 40 digits"


def _unique(name: str, values: Iterable[Any] | None) -> tuple:
    try:
        return tuple(dict.fromkeys(values or ()))
    except TypeError:
        raise BadRequest(f"{name} must be a list of plain values, got {type(values).__name__}", name) from None


def _few(name: str, texts: Sequence[str], what: str, most: int, most_chars: int) -> None:
    if len(texts) > most:
        raise BadRequest(f"at most {most} {what}, got {len(texts)}", name)
    if (num_chars := sum(map(len, texts))) > most_chars:
        raise BadRequest(f"at most {most_chars} characters in all {what}, got {num_chars}", name)


def _int_keys(bias: dict) -> dict[int, float]:
    if wrong := [repr(key) for key in bias if not _is_int(key)]:
        raise BadRequest(f"logit_bias: its keys are token ids, integers; not {', '.join(wrong)}", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def _is_int(key: Any) -> bool:
    try:
        int(key)
    except (TypeError, ValueError):
        return False
    return True


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions of a prompt where no token stands: those of token_ids there are placeholders."""

    offset: int
    length: int
    digest: str  # of what stands there and of how it is made ready: equal digests, equal inputs of the model

    @property
    def end(self) -> int:
        return self.offset + self.length


class Beside(NamedTuple):
    """What a prompt has beside its tokens."""

    token_ids: Sequence[int] = ()  # placeholders, which stand before them
    items: tuple[Item, ...] = ()
    contents: Mapping[str, bytes] = {}  # of the items, by digest


# Of a request that ends with a vector: what a scheduler shall take the vector for, one token behind the prompt.
NO_TOKENS = SamplingParams(max_tokens=1, seed=0, detokenize=False)


class EngineRequest(msgspec.Struct, array_like=True, gc=False):
    """What crosses from a client into the engine core: tokens, not text."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams  # resolved: seed, max_tokens and eos_token_ids are set
    arrival_time: float = 0.0  # seconds, the clock of the engine
    priority: int = 0  # smaller is served earlier
    adapter: str = ""
    cache_salt: str = ""  # requests share prefix-cache blocks only within one salt
    group: str = ""  # requests that are sequences of one prompt (n > 1) name the same group, and arrive together
    beam: BeamSearchParams | None = None  # then `group` names the request, whose outputs are its sequence_ids
    client: str = ""  # whose share of the engine it takes, where scheduler.policy is fair
    items: tuple[Item, ...] = ()  # in the order of their places, which do not overlap
    pooling: PoolingParams | None = None  # then params are NO_TOKENS, and it ends with a vector
    contents: dict[str, bytes] = {}  # of the items, by digest: rows of float32 numbers, as they lie in memory


class Sibling(msgspec.Struct, array_like=True, gc=False):
    """Another sequence of a request's prompt: what it does not share with it."""

    id: str
    seed: int

    def beside(self, first: EngineRequest) -> EngineRequest:
        """The whole request. Only the first of a prompt's sequences scores the prompt."""
        params = first.params.with_values(seed=self.seed, prompt_logprobs=None)
        return msgspec.structs.replace(first, id=self.id, params=params)


def sequence_ids(request_id: str, n: int) -> list[str]:
    """What the engine core calls the n outputs of one request."""
    return [request_id] if n == 1 else [f"{request_id}#{i}" for i in range(n)]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence inside the engine. Only `Scheduler.update` advances num_computed_tokens and appends tokens."""

    id: str
    params: SamplingParams
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    arrival_time: float = 0.0
    priority: int = 0
    adapter: str = ""
    cache_salt: str = ""
    group: str = ""
    beam: BeamSearchParams | None = None
    client: str = ""
    items: tuple[Item, ...] = ()
    pooling: PoolingParams | None = None
    num_computed_tokens: int = 0  # tokens whose K and V are in the cache
    num_in_flight: int = 0  # tokens behind them whose K and V steps in flight compute; 0 between synchronous steps
    num_cached_tokens: int = 0  # of these, how many the prefix cache gave at the first admission
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # prompt positions whose log-probabilities have been reported
    drafts: list[int] = field(default_factory=list)  # guesses of what follows token_ids; never part of them
    order: tuple = ()  # service order, unique; the scheduler's policy sets it once
    block_keys: list = field(default_factory=list)  # of each full block; the prefix index fills it

    @classmethod
    def make(cls, er: EngineRequest) -> Request:
        return cls(
            id=er.id,
            params=er.params,
            token_ids=list(er.prompt_token_ids),
            num_prompt_tokens=len(er.prompt_token_ids),
            arrival_time=er.arrival_time,
            priority=er.priority,
            adapter=er.adapter,
            cache_salt=er.cache_salt,
            group=er.group,
            beam=er.beam,
            client=er.client,
            items=er.items,
            pooling=er.pooling,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """Those that are known, and those that steps in flight sample."""
        return max(len(self.token_ids), self.num_computed_tokens + self.num_in_flight + 1)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def num_final_slots(self, max_model_len: int) -> int:
        """KV slots if it runs to its max_tokens. The last token of all is never fed back, so it needs none."""
        return min(self.num_prompt_tokens + (self.params.max_tokens or max_model_len), max_model_len) - 1
