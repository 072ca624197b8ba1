"""Beam search over any engine: the bookkeeping of one prompt's beams, and the loop that feeds an engine with them.

A step asks the engine for one token of each running beam, with the log-probabilities of the likeliest 2 * width, as
requests of their own (vLLM V1's way): what the beams share is found by the prefix cache, so only the tail of each one
is computed again. The rules are those of transformers' `generate(num_beams=...)`:

- of all continuations of all running beams, the best 2 * width are looked at, so that width of them remain even if each
  beam's likeliest one ends it;
- one that ends counts only among the best width; its score is the sum of its log-probabilities divided by the number of
  generated tokens to the power of length_penalty;
- `early_stopping` True stops at width finished beams; False goes on while the best running beam, at its present length,
  would still beat the worst finished one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from minivllm.errors import BadRequest
from minivllm.plan import PositionLogprobs
from minivllm.request import MAX_LOGPROBS, SamplingParams


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Names as in vLLM's class of the same name, and early_stopping as in transformers."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_LOGPROBS // 2:
            raise BadRequest(f"beam_width must be 1 to {MAX_LOGPROBS // 2}, got {self.beam_width}", "beam_width")
        if self.max_tokens < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")

    @property
    def step(self) -> SamplingParams:
        """What one step asks of the engine for each beam."""
        num_logprobs = 2 * self.beam_width
        return SamplingParams(temperature=0.0, seed=0, max_tokens=1, ignore_eos=True, logprobs=num_logprobs)


class Beam(NamedTuple):
    token_ids: tuple[int, ...]  # generated, without the prompt
    logprob: float  # the sum


class FinishedBeam(NamedTuple):
    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: str  # stop | length


@dataclass(slots=True)
class BeamSearch:
    """The beams of one prompt. max_tokens may be cut to what the context leaves."""

    params: BeamSearchParams
    prompt_token_ids: list[int]
    eos_token_ids: Sequence[int]
    max_tokens: int
    running: list[Beam] = field(default_factory=lambda: [Beam((), 0.0)])
    finished: list[FinishedBeam] = field(default_factory=list)  # best first

    @property
    def done(self) -> bool:
        return not self.running

    def advance(self, continuations: Sequence[PositionLogprobs]) -> None:
        """continuations[i]: the likeliest next tokens of running[i]."""
        width, candidates = self.params.beam_width, []
        for beam, tokens in zip(self.running, continuations, strict=True):
            # The token taken stands first and again among the likeliest: a dictionary keeps one of them.
            for token, logprob in {token: logprob for token, logprob, _ in tokens}.items():
                candidates.append(Beam((*beam.token_ids, token), beam.logprob + logprob))
        candidates.sort(key=lambda beam: -beam.logprob)
        length = len(candidates[0].token_ids)
        self.running = []
        for rank, beam in enumerate(candidates[: 2 * width]):
            ends = beam.token_ids[-1] in self.eos_token_ids
            if ends or length == self.max_tokens:
                if rank < width:
                    self._finish(beam, "stop" if ends else "length")
            elif len(self.running) < width:
                self.running.append(beam)
        if self.running and self._cannot_improve(length):
            self.running = []

    def _finish(self, beam: Beam, reason: str) -> None:
        score = self._score(beam.logprob, len(beam.token_ids))
        self.finished.append(FinishedBeam(beam.token_ids, beam.logprob, score, reason))
        self.finished.sort(key=lambda finished: -finished.score)
        del self.finished[self.params.beam_width :]

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self.params.length_penalty

    def _cannot_improve(self, length: int) -> bool:
        if len(self.finished) < self.params.beam_width:
            return False
        return self.params.early_stopping or self._score(self.running[0].logprob, length) <= self.finished[-1].score


def search(searches: Sequence[BeamSearch], ask: Callable[[list[list[int]]], list[PositionLogprobs]]) -> None:
    """Run all searches to their ends. ask: prompts -> the likeliest next tokens of each, in one batch."""
    while live := [search for search in searches if not search.done]:
        prompts = [search.prompt_token_ids + list(beam.token_ids) for search in live for beam in search.running]
        answers = iter(ask(prompts))
        for one in live:
            one.advance([next(answers) for _ in one.running])
