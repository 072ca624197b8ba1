"""n-gram lookup: what followed the last time that the text ended like this? (Prompt lookup decoding, Saxena 2023; vLLM
has it as `method: ngram`.)

Good at copying: quotes in a summary, code that is edited, keys of JSON. The index holds, for each run of `low` to
`high` tokens, what position came behind it most recently; the longest run that ends the text decides. An index and not
a search, so that a long prompt costs nothing per step.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.spec_decode.lookup import NOTHING, Guess, trust_of

MATCH_SHOWN = 16  # a match is measured no further: longer ones are as good


class NGram:
    """A Lookup over one request's prompt and output."""

    def __init__(self, tokens: Sequence[int], low: int, high: int):
        self.tokens: list[int] = []
        self.sizes = range(low, high + 1)
        self.behind: dict[tuple[int, ...], int] = {}  # run of tokens -> position behind its last occurrence
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        known, behind = self.tokens, self.behind
        for token in tokens:
            # Only now are the runs that end here worth knowing: there is something behind them.
            at = len(known)
            for n in self.sizes:
                if n > at:
                    break
                behind[tuple(known[at - n :])] = at
            known.append(token)

    def draft(self, most: int) -> Guess:
        for n in reversed(self.sizes):
            at = self.behind.get(tuple(self.tokens[-n:])) if n <= len(self.tokens) else None
            if at is not None:
                return Guess(self._copy(at, most), trust_of(self._match_length(at)))
        return NOTHING

    def close(self) -> None:
        pass

    def _copy(self, at: int, most: int) -> list[int]:
        """What follows position `at`; where it runs into the end of the text, it goes on as it has begun."""
        period = len(self.tokens) - at
        found = self.tokens[at : at + most]
        while len(found) < most:
            found.append(found[-period])
        return found

    def _match_length(self, at: int) -> int:
        """How many tokens before `at` are those that end the text."""
        tokens, end = self.tokens, len(self.tokens)
        n = 0
        while n < min(at, MATCH_SHOWN) and tokens[at - 1 - n] == tokens[end - 1 - n]:
            n += 1
        return n


def naive_draft(tokens: Sequence[int], low: int, high: int, most: int) -> list[int]:
    """The slow reference of NGram.draft: searches the text."""
    tokens = list(tokens)
    for n in range(min(high, len(tokens) - 1), low - 1, -1):
        for at in range(len(tokens) - 1, n - 1, -1):
            if tokens[at - n : at] == tokens[len(tokens) - n :]:
                found: list[int] = []
                while len(found) < most:
                    found.append((tokens + found)[at + len(found)])
                return found
    return []
