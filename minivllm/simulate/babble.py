"""Babble: the tokens of a model that is not there. Nothing depends on what others do.

A token is a function of the configuration's seed, the request's seed, its prompt and the token's position. So a request
that is preempted, moved or cut otherwise says the same, as it would with a model. An end of sequence comes by chance,
once in `mean_tokens`, unless the request ignores it; all other tokens are equally likely. That is a distribution, and
what is said of it (log-probabilities) is true.
"""

from __future__ import annotations

import hashlib
import math
from itertools import chain, islice

import numpy as np

from minivllm.plan import Join, PositionLogprobs
from minivllm.request import SamplingParams

TOKEN, END, GUESS = (np.uint64(salt) for salt in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7))
NO_END = -1


class Babble:
    """A RowState."""

    def __init__(self, vocab_size: int, max_rows: int, seed: int, mean_tokens: int):
        self.vocab_size = vocab_size
        self._seed = seed
        self._chance = 1 / mean_tokens  # of an end, at each token
        self._keys = np.zeros(max_rows, np.uint64)
        self._ends = np.full(max_rows, NO_END, np.int64)  # the token that ends the row's request
        self._first_end = np.zeros(max_rows, np.int64)  # the first position at which it may
        self._held: dict[int, SamplingParams] = {}  # by row, of requests that may not end yet

    def join(self, row: int, join: Join) -> None:
        params, num_prompt = join.params, join.num_prompt_tokens
        seed = 0 if params.greedy else params.seed or 0
        said = np.array([self._seed, seed, *join.token_ids[:num_prompt]], np.int64).tobytes()
        self._keys[row] = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")
        self._ends[row] = params.eos_token_ids[0] if params.eos_token_ids else NO_END
        self._first_end[row] = num_prompt + params.min_tokens
        if params.min_tokens:
            self._held[row] = params

    def leave(self, row: int) -> None:
        self._held.pop(row, None)

    def draw(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """rows, positions [N] int64: whose, and where the token will stand -> tokens [N] int64"""
        tokens = (self._bits(TOKEN, rows, positions) % np.uint64(self.vocab_size)).astype(np.int64)
        is_end = self._chances(END, rows, positions) < self._chance
        is_end &= (self._ends[rows] != NO_END) & (positions >= self._first_end[rows])
        tokens = np.where(is_end, self._ends[rows], tokens)
        if self._held:
            self._hold(tokens, rows, positions)
        return tokens

    def guess(self, rows: np.ndarray, positions: np.ndarray, acceptance: float) -> np.ndarray:
        """What draw() gives, by this chance; else another token."""
        right = self._chances(GUESS, rows, positions) < acceptance
        tokens = self.draw(rows, positions)
        return np.where(right, tokens, (tokens + 1) % self.vocab_size)

    def _hold(self, tokens: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> None:
        """Before a request's min_tokens no token that ends it; tokens is changed."""
        for i, row in enumerate(rows.tolist()):
            params = self._held.get(row)
            if params is not None and positions[i] < self._first_end[row]:
                ending = {*params.eos_token_ids, *(params.stop_token_ids or ())}
                while tokens[i] in ending:
                    tokens[i] = (tokens[i] + 1) % self.vocab_size

    def _chances(self, salt: np.uint64, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[N] in 0 .. 1"""
        return self._bits(salt, rows, positions) / 2.0**64

    def _bits(self, salt: np.uint64, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[N] uint64: SplitMix64 (Steele et al., 2014) of key and position. Products overflow, as they should."""
        x = self._keys[rows] + (positions.astype(np.uint64) + np.uint64(1)) * salt
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    # -------------------------------------------------------------------------------------------- log-probabilities

    def logprobs(self, row: int, token: int, asked: SamplingParams, num_top: int) -> PositionLogprobs:
        """Of one position, whatever came before."""
        end = int(self._ends[row])
        chosen = asked.logprob_token_ids or self._likeliest(end, num_top)
        return [self._entry(t, end) for t in (token, *chosen)]

    def _likeliest(self, end: int, num_top: int) -> list[int]:
        """Of tokens that are equally likely, the lowest ids."""
        first = [end] if end != NO_END else []
        others = (token for token in range(self.vocab_size) if token != end)
        return list(islice(chain(first, others), num_top))

    def _entry(self, token: int, end: int) -> tuple[int, float, int]:
        share = 1 - self._chance if end != NO_END else 1.0
        chance = share / self.vocab_size + (self._chance if token == end else 0.0)
        return token, math.log(chance), 1 if token == end else self.vocab_size
