"""Proposers that look a continuation up in text that is already there, and compute nothing: n-gram and suffix.

Each request has a Lookup: an index over its own tokens that grows with them. What it finds comes with the evidence for
it (how long the match is), so that a throttle can learn how far which evidence may be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from minivllm.plan import Join, StepPlan
from minivllm.spec_decode.base import Drafts
from minivllm.spec_decode.throttle import NUM_TRUST, Throttle

if TYPE_CHECKING:
    from minivllm.batch import InputBatch


class Guess(NamedTuple):
    tokens: list[int]
    trust: int  # 0 .. NUM_TRUST - 1: a class of evidence


NOTHING = Guess([], 0)


class Lookup(Protocol):
    """The index of one request. Built as make(its Join)."""

    def extend(self, tokens: Sequence[int]) -> None:
        """More output."""
        ...

    def draft(self, most: int) -> Guess:
        """At most so many tokens that may come next."""
        ...

    def close(self) -> None:
        """The request leaves (finished, aborted or preempted)."""
        ...


class LookupProposer:
    lookahead = 0

    def __init__(self, make: Callable[[Join], Lookup], k: int, throttle: Throttle):
        self.make = make
        self.kv_caches: list[Tensor] = []
        self.k = k
        self.throttle = throttle
        self.lookups: dict[int, Lookup] = {}  # by row
        self.trust: dict[int, int] = {}  # of the row's last guess

    def join(self, row: int, join: Join) -> None:
        self.lookups[row] = self.make(join)
        self.throttle.reset(row)

    def leave(self, row: int) -> None:
        self.lookups.pop(row).close()
        self.trust.pop(row, None)

    def propose(self, plan: StepPlan, batch: InputBatch, tokens: Drafts, hidden: Tensor) -> Drafts:
        row_of = dict(zip(batch.req_ids, batch.rows.tolist(), strict=True))
        guesses: list[tuple[str, int, Guess]] = []
        for req_id, new in tokens.items():
            row = row_of[req_id]
            if (drafts := plan.drafts.get(req_id)) is not None:
                self.throttle.learn(row, self.trust[row], len(drafts), len(new) - 1)
            lookup = self.lookups[row]
            lookup.extend(new)
            guess = lookup.draft(self.k)
            if guess.tokens:
                guesses.append((req_id, row, guess))
        return self._cut(guesses, len(tokens))

    def _cut(self, guesses: list[tuple[str, int, Guess]], num_requests: int) -> Drafts:
        if not guesses:
            return {}
        rows, trust = [row for _, row, _ in guesses], [guess.trust for *_, guess in guesses]
        counts = self.throttle.cut(rows, trust, [len(guess.tokens) for *_, guess in guesses], num_requests)
        self.trust.update(zip(rows, trust, strict=True))
        return {
            req_id: guess.tokens[:count] for (req_id, _, guess), count in zip(guesses, counts, strict=True) if count
        }

    def draft_probs(self, row: int, place: int) -> Tensor | None:
        return None  # what is looked up is proposed for sure


def trust_of(match_length: int) -> int:
    """1, 2-3, 4-7, and more equal tokens before the guess."""
    return min(match_length.bit_length() - 1, NUM_TRUST - 1)
