"""A grammar that begins behind a prelude: free text, such as a model's thinking, up to what ends it.

    free ............................ ending | the inner grammar, or free text again
    free, num_tokens of them | the forced ending |

So an answer is held to a schema without holding the thinking before it, and the thinking can be given a budget: once it
is spent, the tokens that end it are the only ones allowed. Nothing in front of the inner grammar is held to it, so an
ending must end where a token does; tokens that hold more are not allowed there, nor is the end of the sequence.

Texts are followed as symbols: a character for each byte, and one above all bytes for each token without bytes. The
names `thinking_token_budget` and `reasoning_end_str` of vLLM mean the same; its grammars begin behind thinking, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from minivllm.structured.base import CompiledGrammar, Grammar, Vocabulary
from minivllm.structured.params import Pattern, Prelude

ALL = -1  # a word of a mask that allows everything
_SPECIAL = 0x1000  # the symbol of token 0, if it has no bytes


class CompiledFree:
    """The language of all outputs."""

    num_bytes = 0

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary

    def start(self) -> Free:
        return Free(self.vocabulary)


class Free:
    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._terminated = [False]  # before each token that was accepted, and now

    @property
    def is_terminated(self) -> bool:
        return self._terminated[-1]

    def accept(self, token: int) -> bool:
        ends = token in self._vocabulary.eos_ids
        if self.is_terminated and not ends:
            return False
        self._terminated.append(ends)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self._terminated[len(self._terminated) - num_tokens :]

    def fill_mask(self, out: np.ndarray) -> None:
        out[:] = self._vocabulary.eos_mask if self.is_terminated else ALL


class CompiledPrelude:
    num_bytes = 0

    def __init__(self, prelude: Prelude, inner: CompiledGrammar, vocabulary: Vocabulary):
        self.inner, self.free, self.vocabulary = inner, CompiledFree(vocabulary), vocabulary
        self.holds = not isinstance(inner, CompiledFree)  # what follows is held to something
        self.endings = tuple(map(spelled, prelude.endings))
        self.leavings = tuple(map(spelled, prelude.leavings))
        self.forced = spelled(prelude.farewell) + self.endings[0]
        self.before = spelled(prelude.before)
        self.max_tokens = prelude.max_tokens
        self.free_mask = cache(self._free_mask)
        self.forced_mask = cache(self._forced_mask)
        lasts = {ending[-1] for ending in self.endings}
        self._may_overshoot = [
            i for i in range(len(vocabulary)) if any(last in self.symbols(i)[:-1] for last in lasts)
        ]  # tokens that may hold more than an ending

    def start(self) -> PreludeGrammar:
        return PreludeGrammar(self)

    def symbols(self, token: int) -> str:
        return symbols_of(token, self.vocabulary)

    def tail(self, come: str) -> str:
        """The end of what has come that may be the beginning of something."""
        patterns = (*self.endings, *self.leavings, self.forced)
        return come[len(come) - max(_overlap(come, pattern) for pattern in patterns) :]

    def overshoots(self, come: str) -> bool:
        """Whether an ending has come, and something behind it."""
        return any(0 <= come.find(ending) < len(come) - len(ending) for ending in self.endings)

    def what_must_come(self, tail: str, num_tokens: int) -> str:
        """ "": anything may."""
        if self.max_tokens is not None and num_tokens >= self.max_tokens:
            way = max((self.forced, *self.endings), key=lambda way: _overlap(tail, way))  # that has come the farthest
            return way[_overlap(tail, way) :]
        # Where a special token alone is missing of an ending, another header than the one known would follow.
        missing = {ending[-1] for ending in self.endings if len(ending) > 1 and tail.endswith(ending[:-1])}
        return next((symbol for symbol in sorted(missing) if ord(symbol) >= _SPECIAL), "")

    def _free_mask(self, tail: str) -> np.ndarray:
        """[words] int32."""
        if not self.holds:
            return np.full(self.vocabulary.num_words, ALL, np.int32)
        too_long = [i for i in self._may_overshoot if self.overshoots(tail + self.symbols(i))]
        return ~self.vocabulary.mask_of(sorted({*too_long, *self.vocabulary.eos_ids}))

    def _forced_mask(self, forced: str) -> np.ndarray:
        """[words] int32: the tokens that bring `forced`, or a beginning of it."""
        first = ord(forced[0])
        if first >= _SPECIAL:
            return self.vocabulary.mask_of([first - _SPECIAL])
        candidates = self.vocabulary.by_first_byte.get(first, ())
        return self.vocabulary.mask_of([i for i in candidates if forced.startswith(self.symbols(i))])


@dataclass(frozen=True, slots=True)
class _Place:
    tail: str = ""  # of the prelude, see CompiledPrelude.tail
    num_tokens: int = 0  # of the prelude
    forced: str = ""  # what must come now
    follower: int | None = None  # which grammar goes on: the inner one, or a free one
    num_followed: int = 0  # tokens that it has taken


INNER, FREE = 0, 1


class PreludeGrammar:
    def __init__(self, compiled: CompiledPrelude):
        self._compiled = compiled
        self._followers: tuple[Grammar, Grammar] = (compiled.inner.start(), compiled.free.start())
        self._places = [self._place(compiled.tail(compiled.before), 0)]  # before each token that was accepted, and now

    def _place(self, tail: str, num_tokens: int) -> _Place:
        return _Place(tail, num_tokens, self._compiled.what_must_come(tail, num_tokens))

    @property
    def is_terminated(self) -> bool:
        follower = self._places[-1].follower
        return follower is not None and self._followers[follower].is_terminated

    @property
    def has_answer(self) -> bool:
        """Whether the prelude is over."""
        return self._places[-1].follower is not None

    @property
    def num_answered(self) -> int:
        """Tokens behind the prelude."""
        return self._places[-1].num_followed

    def accept(self, token: int) -> bool:
        place = self._places[-1]
        if place.follower is not None:
            return self._follow(place, token)
        symbols = self._compiled.symbols(token)
        if not self._allows(place, token, symbols):
            return False
        if token in self._compiled.vocabulary.eos_ids:
            return self._follow(replace(place, follower=FREE), token)
        self._places.append(self._next(place, symbols))
        return True

    def _follow(self, place: _Place, token: int) -> bool:
        if not self._followers[place.follower].accept(token):
            return False
        self._places.append(replace(place, num_followed=place.num_followed + 1))
        return True

    def _allows(self, place: _Place, token: int, symbols: str) -> bool:
        compiled = self._compiled
        if place.forced:
            return place.forced.startswith(symbols)
        held = compiled.holds and (token in compiled.vocabulary.eos_ids or compiled.overshoots(place.tail + symbols))
        return not held

    def _next(self, place: _Place, symbols: str) -> _Place:
        compiled, come = self._compiled, place.tail + symbols
        if any(leaving in come for leaving in compiled.leavings):
            return replace(place, follower=FREE)
        if any(ending in come for ending in compiled.endings):
            return replace(place, follower=INNER)
        return self._place(compiled.tail(come), place.num_tokens + 1)

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        last = self._places[-1]
        del self._places[-num_tokens:]
        if last.follower is not None:
            self._followers[last.follower].rollback(last.num_followed - self._places[-1].num_followed)

    def fill_mask(self, out: np.ndarray) -> None:
        place = self._places[-1]
        if place.follower is not None:
            self._followers[place.follower].fill_mask(out)
        elif place.forced:
            out[:] = self._compiled.forced_mask(place.forced)
        else:
            out[:] = self._compiled.free_mask(place.tail)


def symbols_of(token: int, vocabulary: Vocabulary) -> str:
    return vocabulary.tokens[token].decode("latin-1") or chr(_SPECIAL + token)


def spelled(pattern: Pattern) -> str:
    """In symbols."""
    texts = (part.encode().decode("latin-1") if isinstance(part, str) else chr(_SPECIAL + part) for part in pattern)
    return "".join(texts)


def _overlap(come: str, pattern: str) -> int:
    """How many symbols at the end of what has come are the pattern's beginning; not all of it."""
    longest = min(len(come), len(pattern) - 1)
    return next((n for n in range(longest, 0, -1) if come.endswith(pattern[:n])), 0)
