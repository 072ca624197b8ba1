"""Verification of drafts: which of the proposed tokens become output. The only place that accepts one.

A request with k drafts brings k + 1 logits rows: what the model says after its last known token, after the first
draft, and so on. Row by row its token is chosen; while that token equals the draft, the next row's logits were
computed from the true prefix and are good. The first token that differs ends the walk, and all later rows are void:

    drafts           d1   d2   d3    -
    chosen           d1   d2   x     ?         output: d1 d2 x

How a token is chosen is the axis `spec_decode.acceptance`:

    match      as without drafts, by the request's own draw: its noise is a function of (seed, position, token), see
               draw.py, so the tokens that come out are those of an engine that never speculates, sampled ones too.
    rejection  by rejection sampling (rejection.py): another token than without drafts, from exactly the same
               distribution. Greedy requests have one likely token, so for them the two are one.

Rows are chosen all at once, but for those with a logits processor that follows the output. They go in rounds, one
position of each request a round, because what a processor does to row j depends on the tokens before it: it observes
only tokens that are final, each before the next position's apply().
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from minivllm.plan import PositionLogprobs
from minivllm.sampling.base import Sampled
from minivllm.sampling.sampler import Pick, Sampler
from minivllm.upload import upload

# (drafts [N], rows [N], places [N]: how many drafts of the same request come before) -> how to pick
PickFor = Callable[[np.ndarray, np.ndarray, np.ndarray], Pick | None]


def match(drafts: np.ndarray, rows: np.ndarray, places: np.ndarray) -> None:
    """A draft is accepted if it is what would have been drawn anyway."""
    return None


class Verifier:
    def __init__(self, sampler: Sampler, pick_for: PickFor = match):
        self.sampler = sampler
        self.pick_for = pick_for

    def __call__(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, drafts: np.ndarray) -> Sampled:
        """logits [S, V] fp32 (may be changed); rows, positions [S] as the sampler wants them, a request's rows one
        behind the other; drafts [S] int64: what was proposed for the place that a row draws, -1: nothing.

        The result holds the final tokens alone, `kept` saying where they are; processors have observed them.
        """
        if not (drafts >= 0).any():
            sampled = self.sampler(logits, rows, positions)
            self.sampler.observe(rows, sampled.tokens)
            sampled.kept = np.arange(len(rows))
            return sampled
        places = _places(rows)
        stateful = self.sampler.follow_output(rows)
        result = _Result(len(rows))
        plain = np.flatnonzero(~stateful)
        if len(plain):
            accepted = self._choose(result, logits, plain, rows, positions, drafts, places)
            result.keep(plain[_reached(accepted, places[plain])])
        turn = np.flatnonzero(stateful & (places == 0))
        while len(turn):
            accepted = self._choose(result, logits, turn, rows, positions, drafts, places)
            self.sampler.observe(rows[turn], result.tokens[turn])
            result.keep(turn)
            turn = turn[accepted] + 1
        return result.sampled()

    def _choose(
        self,
        result: _Result,
        logits: Tensor,
        which: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        drafts: np.ndarray,
        places: np.ndarray,
    ) -> np.ndarray:
        """Choose the tokens of some logits rows. -> [len(which)] bool: whose draft was accepted."""
        part = logits if len(which) == len(rows) else logits[upload(which, logits.device)]
        pick = self.pick_for(drafts[which], rows[which], places[which])
        sampled = self.sampler(part, rows[which], positions[which], pick)
        result.put(which, sampled)
        accepted = sampled.tokens == drafts[which]
        accepted[sampled.invalid] = False  # so that it is the last one of its request, which ends with an error
        return accepted


class _Result:
    """What came out of some of the S rows so far."""

    def __init__(self, num_rows: int):
        self.tokens = np.zeros(num_rows, np.int64)
        self.final = np.zeros(num_rows, bool)
        self.invalid = np.zeros(num_rows, bool)
        self.logprobs: list[PositionLogprobs | None] = [None] * num_rows

    def put(self, which: np.ndarray, sampled: Sampled) -> None:
        self.tokens[which] = sampled.tokens
        self.invalid[which[sampled.invalid]] = True
        for i, entry in zip(which.tolist(), sampled.logprobs, strict=True):
            self.logprobs[i] = entry

    def keep(self, which: np.ndarray) -> None:
        self.final[which] = True

    def sampled(self) -> Sampled:
        kept = np.flatnonzero(self.final)
        logprobs = [self.logprobs[i] for i in kept.tolist()]
        return Sampled(self.tokens[kept], logprobs, np.flatnonzero(self.invalid[kept]), kept)


def _places(rows: np.ndarray) -> np.ndarray:
    """rows [S], equal ones adjacent -> [S]: how many equal ones come before."""
    at = np.arange(len(rows))
    first = np.concatenate(([True], rows[1:] != rows[:-1]))
    return at - np.maximum.accumulate(np.where(first, at, 0))


def _reached(accepted: np.ndarray, places: np.ndarray) -> np.ndarray:
    """[N] bool each, whole requests -> [N] bool: everything before it in its request was accepted."""
    num_refused = np.cumsum(~accepted) - ~accepted  # before this row, in all requests
    first = np.arange(len(places)) - places
    return num_refused == num_refused[first]
