"""A grammar of tool calls, in the form in which a model writes them; and one of what either of two grammars admits.

A form is parts in a row: texts and special tokens of the format (`<tool_call>`), and JSON that a schema describes. JSON
is held by a backend's grammar, in one line, so that it is over with the bracket that closes it; the rest is followed
here, as symbols (prelude.py). Several forms may fit at once, so what is followed is a set of threads. No token may hold
the end of one part and the beginning of the next, which leaves each text a token to be written with.

vLLM and XGrammar hold calls to a schema by structural tags, which mean the same, of one backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from minivllm.errors import BadRequest
from minivllm.structured.base import CompiledGrammar, Grammar, Vocabulary
from minivllm.structured.params import Again, Calls, Instance, Spelled, StructuredParams
from minivllm.structured.prelude import spelled, symbols_of

Compile = Callable[[StructuredParams], CompiledGrammar]
ANY = -1  # form
MOST_MASKS = 1024  # that are kept; texts are followed from wherever a token has ended in them


class CompiledCalls:
    num_bytes = 0

    def __init__(self, calls: Calls, compile: Compile, vocabulary: Vocabulary):
        """compile: what makes a grammar of a schema. Raises BadRequest for one that nothing makes one of."""
        self.forms, self.vocabulary = calls.forms, vocabulary
        instances = {part for form in calls.forms for part in form if isinstance(part, Instance)}
        self.instances = {part: _compiled(part, compile) for part in instances}
        self.ids = ids_by_symbols(vocabulary)
        self.mask_of = lru_cache(MOST_MASKS)(self._mask_of)

    def start(self) -> CallsGrammar:
        return CallsGrammar(self)

    def enter(self, form: int, part: int) -> Iterator[_Thread]:
        """What may come from this part of the form on."""
        if form == ANY:
            for each in range(len(self.forms)):
                yield from self.enter(each, part)
        elif part == len(self.forms[form]):
            yield END
        else:
            yield from self._begin(self.forms[form][part], form, part + 1)

    def _begin(self, part: Spelled | Instance | Again, form: int, behind: int) -> Iterator[_Thread]:
        match part:
            case Instance():
                yield _Written(_Running(self.instances[part].start()), 0, form, behind)
            case Spelled(ways):
                yield from self._spell(ways, form, behind)
            case Again(ways, to):
                yield from self._spell(ways, ANY, to)
                yield from self.enter(form, behind)

    def _spell(self, ways: tuple, form: int, behind: int) -> Iterator[_Thread]:
        for way in ways:
            if way:
                yield _Text(spelled(way), form, behind)
            else:
                yield from self.enter(form, behind)

    def _mask_of(self, rests: frozenset[str]) -> np.ndarray:
        """[words] int32: the tokens that bring one of these texts, or a beginning of one."""
        begins = {rest[:n] for rest in rests for n in range(1, len(rest) + 1)}
        return self.vocabulary.mask_of([i for text in begins for i in self.ids.get(text, ())])


_IDS: WeakKeyDictionary[Vocabulary, dict[str, list[int]]] = WeakKeyDictionary()


def ids_by_symbols(vocabulary: Vocabulary) -> dict[str, list[int]]:
    """Of tokens, by what they bring: with many functions, many texts are followed at once."""
    if vocabulary not in _IDS:
        found: dict[str, list[int]] = {}
        for token in range(len(vocabulary)):
            found.setdefault(symbols_of(token, vocabulary), []).append(token)
        _IDS[vocabulary] = found
    return _IDS[vocabulary]


def _compiled(part: Instance, compile: Compile) -> CompiledGrammar:
    """By the looser schema where no backend can hold a text to the other."""
    try:
        return compile(StructuredParams(json=part.schema, disable_any_whitespace=True, field="tools"))
    except BadRequest:
        return compile(StructuredParams(json=part.looser, disable_any_whitespace=True, field="tools"))


class _Running:
    """One grammar on its way, which several places of the past share."""

    def __init__(self, grammar: Grammar):
        self.grammar, self.num = grammar, 0

    def accept(self, token: int) -> bool:
        taken = self.grammar.accept(token)
        self.num += taken
        return taken

    def is_whole(self, eos: int) -> bool:
        ends = self.grammar.accept(eos)
        if ends:
            self.grammar.rollback(1)
        return ends

    def back_to(self, num: int) -> None:
        if self.num > num:
            self.grammar.rollback(self.num - num)
            self.num = num


class _Text(NamedTuple):
    rest: str  # symbols that have not come
    form: int
    behind: int  # the part that follows


class _Written(NamedTuple):
    running: _Running
    num: int  # tokens that it has taken
    form: int
    behind: int


_Thread = _Text | _Written
END = _Text("", ANY, 0)  # nothing need follow


@dataclass(frozen=True, slots=True)
class _Place:
    threads: tuple[_Thread, ...]
    has_ended: bool = False


class CallsGrammar:
    def __init__(self, compiled: CompiledCalls):
        self._compiled, self._vocabulary = compiled, compiled.vocabulary
        self._places = [_Place(tuple(compiled.enter(ANY, 0)))]  # before each token that was accepted, and now

    @property
    def is_terminated(self) -> bool:
        return self._places[-1].has_ended

    def accept(self, token: int) -> bool:
        place = self._places[-1]
        if token in self._vocabulary.eos_ids:
            ends = place.has_ended or END in place.threads
            if ends:
                self._places.append(_Place(place.threads, has_ended=True))
            return ends
        threads = () if place.has_ended else self._followed(place.threads, token)
        if threads:
            self._places.append(_Place(threads))
        return bool(threads)

    def _followed(self, threads: tuple[_Thread, ...], token: int) -> tuple[_Thread, ...]:
        symbols = symbols_of(token, self._vocabulary)
        return tuple(new for thread in threads for new in self._behind(thread, token, symbols))

    def _behind(self, thread: _Thread, token: int, symbols: str) -> Iterator[_Thread]:
        if isinstance(thread, _Text):
            if thread.rest.startswith(symbols):
                rest = thread.rest[len(symbols) :]
                yield from [thread._replace(rest=rest)] if rest else self._compiled.enter(thread.form, thread.behind)
        elif thread.running.accept(token):
            if symbols[-1] in "}]" and thread.running.is_whole(self._vocabulary.eos_ids[0]):
                yield from self._compiled.enter(thread.form, thread.behind)
            else:
                yield thread._replace(num=thread.running.num)

    def rollback(self, num_tokens: int) -> None:
        del self._places[len(self._places) - num_tokens :]
        for thread in self._places[-1].threads:
            if isinstance(thread, _Written):
                thread.running.back_to(thread.num)

    def fill_mask(self, out: np.ndarray) -> None:
        place = self._places[-1]
        if place.has_ended:
            out[:] = self._vocabulary.eos_mask
            return
        out[:] = self._compiled.mask_of(frozenset(t.rest for t in place.threads if isinstance(t, _Text)))
        if END in place.threads:
            out |= self._vocabulary.eos_mask
        for thread in place.threads:
            if isinstance(thread, _Written):
                out |= filled(thread.running.grammar, out)


def filled(grammar: Grammar, like: np.ndarray) -> np.ndarray:
    mask = np.empty_like(like)
    grammar.fill_mask(mask)
    return mask


class CompiledEither:
    """What one of these grammars admits."""

    num_bytes = 0

    def __init__(self, *grammars: CompiledGrammar):
        self.grammars = grammars

    def start(self) -> Either:
        return Either([compiled.start() for compiled in self.grammars])


class Either:
    def __init__(self, grammars: list[Grammar]):
        self._grammars = grammars
        self._lives = [(True,) * len(grammars)]  # which admit all so far: before each token that was accepted, and now

    def _live(self) -> list[Grammar]:
        return [grammar for grammar, lives in zip(self._grammars, self._lives[-1], strict=True) if lives]

    @property
    def is_terminated(self) -> bool:
        return any(grammar.is_terminated for grammar in self._live())

    def accept(self, token: int) -> bool:
        pairs = zip(self._grammars, self._lives[-1], strict=True)
        lives = tuple(lives and grammar.accept(token) for grammar, lives in pairs)
        if any(lives):
            self._lives.append(lives)
        return any(lives)

    def rollback(self, num_tokens: int) -> None:
        forgotten = self._lives[len(self._lives) - num_tokens :]
        del self._lives[len(self._lives) - num_tokens :]
        for i, grammar in enumerate(self._grammars):
            if taken := sum(lives[i] for lives in forgotten):
                grammar.rollback(taken)

    def fill_mask(self, out: np.ndarray) -> None:
        first, *others = self._live()
        first.fill_mask(out)
        for grammar in others:
            out |= filled(grammar, out)
