"""The rules of beam search for one prompt: which beams go on, which have ended. Those of transformers'
`generate(num_beams=...)`:

- of all continuations of all running beams, the best 2 * width are looked at, so that width of them remain even if each
  beam's likeliest one ends it;
- one that ends counts only among the best width; its score is the sum of its log-probabilities divided by the number of
  generated tokens to the power of length_penalty;
- `early_stopping` True stops at width finished beams; False goes on while the best running beam, at its present length,
  would still beat the worst finished one.

Nothing here knows where the log-probabilities come from (scheduler/beam.py) or where K and V lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minivllm.plan import PositionLogprobs
from minivllm.request import BeamSearchParams


class Beam(NamedTuple):
    token_ids: tuple[int, ...]  # generated, without the prompt
    logprobs: tuple[tuple[float, int], ...]  # of each of them: log-probability and rank
    logprob: float  # the sum
    parent: int  # which beam of the step before it continues


class FinishedBeam(NamedTuple):
    beam: Beam
    score: float
    finish_reason: str  # stop | length


@dataclass(slots=True)
class BeamSearch:
    """The beams of one prompt. max_tokens may be less than what the parameters ask for: what the context leaves."""

    params: BeamSearchParams
    eos_token_ids: Sequence[int]
    max_tokens: int
    running: list[Beam] = field(default_factory=lambda: [Beam((), (), 0.0, 0)])
    finished: list[FinishedBeam] = field(default_factory=list)  # best first

    @property
    def done(self) -> bool:
        return not self.running

    def advance(self, continuations: Sequence[PositionLogprobs]) -> None:
        """continuations[i]: the likeliest next tokens of running[i]."""
        width, candidates = self.params.beam_width, []
        for parent, (beam, tokens) in enumerate(zip(self.running, continuations, strict=True)):
            # The token taken stands first and again among the likeliest: a dictionary keeps one of them.
            for token, (logprob, rank) in {token: (logprob, rank) for token, logprob, rank in tokens}.items():
                logprobs = (*beam.logprobs, (logprob, rank))
                candidates.append(Beam((*beam.token_ids, token), logprobs, beam.logprob + logprob, parent))
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
        self.finished.append(FinishedBeam(beam, self._score(beam.logprob, len(beam.token_ids)), reason))
        self.finished.sort(key=lambda finished: -finished.score)
        del self.finished[self.params.beam_width :]

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self.params.length_penalty

    def _cannot_improve(self, length: int) -> bool:
        if len(self.finished) < self.params.beam_width:
            return False
        return self.params.early_stopping or self._score(self.running[0].logprob, length) <= self.finished[-1].score
