"""A grammar that an output may leave, by beginning with one of some texts, or with a special token. What follows is
free, or what another grammar says.

That is how an answer is held to a schema beside tools that the model may call, where calls are no JSON (else calls.py
holds them): its answer is JSON by the schema, or begins with what its format writes before a call (`<tool_call>`), and
then goes on as a call does without a grammar; and how it may begin with thinking (prelude.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minivllm.structured.base import CompiledGrammar, Vocabulary
from minivllm.structured.prelude import CompiledFree, PreludeGrammar


class CompiledEscape:
    def __init__(
        self,
        inner: CompiledGrammar,
        escapes: Sequence[str | int],
        vocabulary: Vocabulary,
        outside: CompiledGrammar | None = None,
    ):
        """escapes: texts, or ids of tokens without bytes. outside: what goes on behind them; None: anything."""
        self.inner, self.vocabulary = inner, vocabulary
        self.num_bytes = inner.num_bytes
        self.outside = outside or CompiledFree(vocabulary)
        self.special_ids = frozenset(e for e in escapes if isinstance(e, int))
        self.special_mask = vocabulary.mask_of(sorted(self.special_ids))
        texts = [e.encode() for e in escapes if isinstance(e, str)]
        self.ways = tuple((text, 0) for text in texts)
        self.mask_of = {text[n:]: self._going_on(text[n:]) for text in texts for n in range(len(text))}

    def _going_on(self, rest: bytes) -> np.ndarray:
        """[words] int32: the tokens that bring `rest`, or a beginning of it."""
        candidates = self.vocabulary.by_first_byte.get(rest[0], ())
        tokens = self.vocabulary.tokens
        return self.vocabulary.mask_of(
            [i for i in candidates if rest.startswith(tokens[i]) or tokens[i].startswith(rest)]
        )

    def start(self) -> Escape:
        return Escape(self)


@dataclass(frozen=True, slots=True)
class _Place:
    in_grammar: bool = True  # all so far is a beginning of some text of the inner grammar
    ways: tuple[tuple[bytes, int], ...] = ()  # the texts that may still be what it begins with, and how much has come
    has_left: bool = False  # the grammar outside goes on


class Escape:
    def __init__(self, compiled: CompiledEscape):
        self._compiled, self._inner, self._outside = compiled, compiled.inner.start(), compiled.outside.start()
        self._places = [_Place(ways=compiled.ways)]  # before each token that was accepted, and now

    @property
    def is_terminated(self) -> bool:
        place = self._places[-1]
        return self._outside.is_terminated if place.has_left else place.in_grammar and self._inner.is_terminated

    @property
    def has_answer(self) -> bool:
        """Whether what comes outside is a prelude that is over, or there is none."""
        place = self._places[-1]
        if place.has_left:
            return isinstance(self._outside, PreludeGrammar) and self._outside.has_answer
        return len(self._places) > 1 and not place.ways

    @property
    def num_answered(self) -> int:
        """Tokens behind a prelude."""
        if self._places[-1].has_left and isinstance(self._outside, PreludeGrammar):
            return self._outside.num_answered
        return len(self._places) - 1

    def accept(self, token: int) -> bool:
        place, vocabulary = self._places[-1], self._compiled.vocabulary
        if place.has_left:
            if taken := self._outside.accept(token):
                self._places.append(place)
            return taken
        leaves, ways = token in self._compiled.special_ids and len(self._places) == 1, []
        for text, num_come in place.ways:
            rest, brought = text[num_come:], vocabulary.tokens[token]
            if brought and brought.startswith(rest):
                leaves = True
            elif brought and rest.startswith(brought):
                ways.append((text, num_come + len(brought)))
        in_grammar = not leaves and place.in_grammar and self._inner.accept(token)
        if not (leaves or ways or in_grammar):
            return False
        self._places.append(_Place(in_grammar, () if leaves else tuple(ways), leaves))
        return True

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        taken = sum(place.in_grammar for place in self._places[-num_tokens:])
        outside = sum(place.has_left for place in self._places[-num_tokens - 1 : -1])
        del self._places[-num_tokens:]
        if taken:
            self._inner.rollback(taken)
        if outside:
            self._outside.rollback(outside)

    def fill_mask(self, out: np.ndarray) -> None:
        place, compiled = self._places[-1], self._compiled
        if place.has_left:
            return self._outside.fill_mask(out)
        if place.in_grammar:
            self._inner.fill_mask(out)
        else:
            out[:] = 0
        if len(self._places) == 1:
            out |= compiled.special_mask
        for text, num_come in place.ways:
            out |= compiled.mask_of[text[num_come:]]
