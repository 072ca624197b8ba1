"""The steps that change logits before the draw, in the order of vLLM V1 (`v1/sample/sampler.py`):

allowed_token_ids, bad_words, min_tokens, begin_suppress_tokens (of transformers, not vLLM), logit_bias, then the
penalties (repetition, frequency, presence). Temperature, min-p, top-k, top-p and the draw follow (sampler.py, draw.py).
The grammar of structured output, which has a file of its own (grammar_mask.py), goes before them all.

All are sparse: a row touches a few tokens of the vocabulary, so each step gathers (row, token) pairs of all its rows
and writes them with one indexed operation. No state of size rows x vocabulary is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from minivllm.request import SamplingParams
from minivllm.upload import upload

T = TypeVar("T")
NEG_INF = float("-inf")


class _PerRow(Generic[T]):
    """The state of the rows that use a processor."""

    keeps_argmax = False
    follows_output = True

    def __init__(self, vocab_size: int, max_rows: int):
        self.states: dict[int, T] = {}

    def leave(self, row: int) -> None:
        self.states.pop(row, None)

    def observe(self, row: int, token: int) -> None:
        """Some steps do not depend on the output."""

    def here(self, rows: np.ndarray) -> list[tuple[int, T]]:
        """(logits row, state) of the users among `rows`."""
        return [(i, self.states[row]) for i, row in enumerate(rows.tolist()) if row in self.states]


def _pairs(ids: Iterable[tuple[int, np.ndarray]], device: torch.device) -> tuple[Tensor, Tensor]:
    """[(logits row, token ids)] -> index tensors (rows [N], tokens [N])."""
    ids = list(ids)
    rows = np.repeat([i for i, _ in ids], [len(tokens) for _, tokens in ids])
    tokens = np.concatenate([tokens for _, tokens in ids])
    return upload(rows, device), upload(tokens, device)


class AllowedTokenIds(_PerRow[np.ndarray]):
    """Everything else becomes impossible."""

    follows_output = False

    def __init__(self, vocab_size: int, max_rows: int):
        super().__init__(vocab_size, max_rows)
        self.newest: tuple[Sequence[int], np.ndarray] = (), np.empty(0, np.int64)  # sequences of a prompt share it

    def join(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if params.allowed_token_ids is None:
            return False
        if self.newest[0] is not params.allowed_token_ids:
            self.newest = params.allowed_token_ids, np.unique(np.asarray(params.allowed_token_ids, np.int64))
        self.states[row] = self.newest[1]
        return True

    def apply(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        if users := self.here(rows):
            index = _pairs(users, logits.device)
            allowed = logits[index]
            for i, _ in users:
                logits[i].fill_(NEG_INF)
            logits[index] = allowed
        return logits


class _Words:
    """Words, keyed by what must precede their last token."""

    def __init__(self, words: Sequence[Sequence[int]]):
        self.words = words
        self.last: dict[tuple[int, ...], list[int]] = {}
        for word in words:
            self.last.setdefault(tuple(word[:-1]), []).append(word[-1])
        self.lengths = sorted({len(prefix) for prefix in self.last})
        self.keep = max(self.lengths, default=0)


class _BadWords:
    """One row's words, and the output's end."""

    def __init__(self, words: _Words, output: Sequence[int]):
        self.words = words
        keep = words.keep
        self.tail: tuple[int, ...] = tuple(output[len(output) - keep :]) if keep <= len(output) else (*output,)

    def push(self, token: int) -> None:
        keep = self.words.keep
        self.tail = (*self.tail, token)[-keep:] if keep else ()

    def banned(self) -> np.ndarray:
        tails = (self.tail[len(self.tail) - n :] for n in self.words.lengths if n <= len(self.tail))
        return np.asarray([token for tail in tails for token in self.words.last.get(tail, ())], np.int64)


class BadWords(_PerRow[_BadWords]):
    """Forbids the last token of a bad word where the output ends in the others (the prompt is not looked at)."""

    def __init__(self, vocab_size: int, max_rows: int):
        super().__init__(vocab_size, max_rows)
        self.newest = _Words(())  # sequences of a prompt share their words

    def join(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if not params.bad_words_token_ids:
            return False
        if self.newest.words is not params.bad_words_token_ids:
            self.newest = _Words(params.bad_words_token_ids)
        self.states[row] = _BadWords(self.newest, token_ids[num_prompt_tokens:])
        return True

    def observe(self, row: int, token: int) -> None:
        self.states[row].push(token)

    def apply(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        if users := self.here(rows):
            logits[_pairs(((i, words.banned()) for i, words in users), logits.device)] = NEG_INF
        return logits


class _MinTokens:
    def __init__(self, remaining: int, stop_ids: np.ndarray):
        self.remaining = remaining
        self.stop_ids = stop_ids


class MinTokens(_PerRow[_MinTokens]):
    """No end-of-sequence and no stop token before min_tokens outputs."""

    def join(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if params.structured is not None:
            return False  # GrammarMask does it: only the grammar knows whether the text can go on
        remaining = params.min_tokens - (len(token_ids) - num_prompt_tokens)
        stop_ids = np.asarray(sorted({*params.eos_token_ids, *params.stop_token_ids}), np.int64)
        if remaining <= 0 or not len(stop_ids):
            return False
        self.states[row] = _MinTokens(remaining, stop_ids)
        return True

    def observe(self, row: int, token: int) -> None:
        if state := self.states.get(row):
            state.remaining -= 1
            if not state.remaining:
                del self.states[row]

    def apply(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        if users := self.here(rows):
            logits[_pairs(((i, state.stop_ids) for i, state in users), logits.device)] = NEG_INF
        return logits


class BeginSuppress(_PerRow[np.ndarray]):
    """Not these as the first token of an output."""

    def join(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if not params.begin_suppress_tokens or len(token_ids) > num_prompt_tokens:
            return False
        self.states[row] = np.asarray(params.begin_suppress_tokens, np.int64)
        return True

    def observe(self, row: int, token: int) -> None:
        self.states.pop(row, None)

    def apply(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        if users := self.here(rows):
            logits[_pairs(users, logits.device)] = NEG_INF
        return logits


class LogitBias(_PerRow[tuple[np.ndarray, np.ndarray]]):
    """Adds a number to single logits."""

    follows_output = False

    def join(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if not params.logit_bias:
            return False
        bias = params.logit_bias
        self.states[row] = (np.fromiter(bias, np.int64), np.fromiter(bias.values(), np.float32))
        return True

    def apply(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        if users := self.here(rows):
            index = _pairs(((i, tokens) for i, (tokens, _) in users), logits.device)
            bias = upload(np.concatenate([values for _, (_, values) in users]), logits.device)
            logits[index] += bias  # the pairs are distinct: tokens are keys of a dict
        return logits


class _Counts:
    """The distinct tokens of one row and how often each stands in its output. Arrays grow by doubling."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]):
        # Presence and frequency look at the output only; the repetition penalty at the prompt too.
        prompt_ids = np.unique(np.asarray(prompt if params.repetition_penalty != 1 else [], np.int64))
        self.penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.slots = {token: slot for slot, token in enumerate(prompt_ids.tolist())}
        self.tokens = np.resize(prompt_ids, max(64, 2 * len(prompt_ids))) if len(prompt_ids) else np.zeros(64, np.int64)
        self.counts = np.zeros(len(self.tokens), np.float32)
        for token in output:
            self.push(token)

    def push(self, token: int) -> None:
        slot = self.slots.setdefault(token, len(self.slots))
        if slot == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
            self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
        self.tokens[slot] = token
        self.counts[slot] += 1

    def __len__(self) -> int:
        return len(self.slots)


class Penalties(_PerRow[_Counts]):
    """Repetition (over prompt and output): positive logits are divided by it, others multiplied (Keskar et al., CTRL,
    2019). Then minus frequency * count and minus presence, both over the output."""

    def join(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        if params.repetition_penalty == 1 and not params.frequency_penalty and not params.presence_penalty:
            return False
        self.states[row] = _Counts(params, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:])
        return True

    def observe(self, row: int, token: int) -> None:
        self.states[row].push(token)

    def apply(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        users = [(i, counts) for i, counts in self.here(rows) if len(counts)]
        if not users:
            return logits
        index = _pairs(((i, c.tokens[: len(c)]) for i, c in users), logits.device)
        counts = upload(np.concatenate([c.counts[: len(c)] for _, c in users]), logits.device)
        penalties = np.asarray([c.penalties for _, c in users], np.float32)  # [users, 3]
        lengths = [len(c) for _, c in users]
        repetition, frequency, presence = upload(penalties.T.repeat(lengths, 1), logits.device)  # [N] each
        values = logits[index]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[index] = values - frequency * counts - presence * (counts > 0)
        return logits


DEFAULT_PROCESSORS = (AllowedTokenIds, BadWords, MinTokens, BeginSuppress, LogitBias, Penalties)
