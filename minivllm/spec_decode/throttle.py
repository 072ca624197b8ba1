"""How many drafts are worth their time: the dynamic k.

A draft token is not free: a forward over more tokens takes longer, hardly at one request, in proportion at many. So
each step takes the drafts that maximise expected tokens per second (the goodput of SmartSpec, Liu et al. 2024):

    (requests + sum of the chances that drafts are accepted) / time of a forward over (requests + drafts) tokens

Times come from a table measured once at start, never from a clock while serving: the same run speculates the same way.
The chance that the j-th draft is accepted is a**j, and `a` is a running share of accepted tokens, kept for each request
and class of evidence. A new request starts from what was seen over all requests.

Where nothing is worth it, one draft is tried now and then, more and more rarely while it fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

NUM_TRUST = 4  # classes of evidence
DECAY = 0.8  # of a request's memory, per verification
START_WEIGHT = 2.0  # tokens that a new request's prior weighs
WORTH = 1.03  # expected gain from which on to speculate at all
FIRST_PAUSE, LONGEST_PAUSE = 4, 32  # steps between two probes


class Throttle:
    """Takes every draft until it is calibrated."""

    def __init__(self, max_rows: int):
        self.sizes: np.ndarray | None = None
        self.seconds_per_pass = 0.0
        self.accepted = np.zeros((max_rows, NUM_TRUST))
        self.tried = np.zeros((max_rows, NUM_TRUST))
        self.pause = np.zeros((max_rows, NUM_TRUST), np.int64)  # steps between probes
        self.skipped = np.zeros((max_rows, NUM_TRUST), np.int64)
        self.all_accepted = np.linspace(0.5, 0.9, NUM_TRUST) * START_WEIGHT  # over all requests
        self.all_tried = np.full(NUM_TRUST, START_WEIGHT)

    def calibrate(self, seconds: Mapping[int, float], seconds_per_pass: float = 0.0) -> None:
        """seconds: of a forward, by its number of tokens. seconds_per_pass: of proposing, for each draft in a row (a
        proposer that computes)."""
        self.sizes = np.asarray(sorted(seconds), float)
        # A smaller batch never takes longer. Where it was measured to, something else ran beside it.
        measured = [seconds[int(n)] for n in self.sizes]
        self.times = np.minimum.accumulate(measured[::-1])[::-1]
        self.seconds_per_pass = seconds_per_pass

    def reset(self, row: int) -> None:
        """Another request has this row."""
        self.tried[row] = START_WEIGHT
        self.accepted[row] = START_WEIGHT * self.all_accepted / self.all_tried
        self.pause[row] = FIRST_PAUSE
        self.skipped[row] = 0

    def learn(self, row: int, trust: int, num_drafted: int, num_accepted: int) -> None:
        """Of the tokens behind a refused one nothing is known."""
        num_tried = num_accepted + (num_accepted < num_drafted)
        self.accepted[row, trust] = DECAY * self.accepted[row, trust] + num_accepted
        self.tried[row, trust] = DECAY * self.tried[row, trust] + num_tried
        self.all_accepted[trust] = 0.98 * self.all_accepted[trust] + num_accepted
        self.all_tried[trust] = 0.98 * self.all_tried[trust] + num_tried
        pause = FIRST_PAUSE if num_accepted else 2 * self.pause[row, trust]
        self.pause[row, trust] = min(pause, LONGEST_PAUSE)

    def cut(self, rows: Sequence[int], trust: Sequence[int], lengths: Sequence[int], num_requests: int) -> list[int]:
        """How many of its drafts each row may use in the next step, in which num_requests take part.

        rows, trust, lengths [N]: who has drafts, on which evidence, how many (all above 0).
        """
        if self.sizes is None:
            return list(lengths)
        at, lengths = (np.asarray(rows), np.asarray(trust)), np.asarray(lengths)
        places = np.arange(1, lengths.max() + 1)
        rate = self.accepted[at] / self.tried[at]
        chances = np.where(places <= lengths[:, None], rate[:, None] ** places, 0)  # [N, longest], falling in each row
        ordered = np.sort(chances, axis=None)[::-1]
        num_drafts = np.arange(len(ordered) + 1)
        speed = (num_requests + np.concatenate(([0], ordered.cumsum()))) / self.seconds(num_requests + num_drafts)
        best = int(speed.argmax())
        if speed[best] < WORTH * speed[0]:
            return self._probe(at).tolist()
        counts = (chances >= ordered[best - 1]).sum(1)
        self.skipped[at] = 0
        return np.minimum(counts, lengths).tolist()

    def depth(self, rows: Sequence[int], most: int) -> int:
        """How many drafts to compute, the same number for all rows [N]; for proposers that need a pass for each."""
        if self.sizes is None or not len(rows):
            return most
        at = (np.asarray(rows), np.zeros(len(rows), np.int64))
        rate = self.accepted[at] / self.tried[at]
        places = np.arange(most + 1)
        gained = (rate[:, None] ** places).sum(0).cumsum()  # [most + 1]: the first is the token that comes anyway
        speed = gained / (self.seconds(len(rows) * (1 + places)) + self.seconds_per_pass * places)
        best = int(speed.argmax())
        if speed[best] < WORTH * speed[0]:
            return int(self._probe(at).max())
        self.skipped[at] = 0
        return best

    def seconds(self, num_tokens: np.ndarray) -> np.ndarray:
        """Beyond the largest size measured, in proportion."""
        return np.interp(num_tokens, self.sizes, self.times) * np.maximum(num_tokens / self.sizes[-1], 1)

    def _probe(self, at: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """1 for who has waited long enough, else 0."""
        self.skipped[at] += 1
        due = self.skipped[at] >= self.pause[at]
        self.skipped[at] = np.where(due, 0, self.skipped[at])
        return due.astype(np.int64)
