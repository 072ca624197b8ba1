"""Telling thinking from answer in a text that is still being written.

A reader holds back what may be the beginning of a marker and tells everything else at once, so how the text was cut on
its way makes no difference to what its events add up to. Markers are in neither part; all other characters, spaces too,
are in one of them, as in vLLM.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, NamedTuple

MAX_BLANK = 1024  # characters of white space before what opens thinking


class Thought(NamedTuple):
    text: str


class Rest(NamedTuple):
    """Of the answer: what a tool parser reads next, or the content."""

    text: str


Event = Thought | Rest


class Start(enum.Enum):
    """Where the prompt has left the model."""

    FRESH = "fresh"  # it may think, or answer at once
    INSIDE = "inside"  # the prompt has opened the thinking
    BEHIND = "behind"  # the prompt has closed it: thinking is switched off, or the answer goes on


class ReasoningReader:
    """An AnswerFinder (engine/detokenizer.py), too: `answered` is what the last push has made certain of the answer,
    as it stands in the text.

    markers: what the format writes around thinking; where these are special tokens, the text must show them.
    marks: what shows that a chat template writes the format (marks.py). opened_by, closed_by: how a prompt ends that
    has begun, or ended, the thinking.

    The rest is for who forces tokens (structured/prelude.py). openings: what begins the thinking of a fresh answer;
    none: it is open. endings: what ends it; the first is what is forced, after as much of `farewell` as has not come
    just now; `before` stands before a fresh answer. leavings: what begins an answer of another kind without an ending.
    """

    markers: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[tuple[str, ...], ...]]
    opened_by: ClassVar[tuple[str, ...]]
    closed_by: ClassVar[tuple[str, ...]]
    openings: ClassVar[tuple[str, ...]] = ()
    endings: ClassVar[tuple[str, ...]]
    farewell: ClassVar[str] = ""
    before: ClassVar[str] = ""
    leavings: ClassVar[tuple[str, ...]] = ()

    def __init__(self, start: Start = Start.FRESH, functions: Collection[str] = ()):
        """functions: that the answer may call."""
        self.functions = functions
        self._held, self._at = "", 0  # not told yet: from here on
        self._answered: list[str] = []
        self._pieces: list[tuple[type[Event], list[str]]] = []  # of events; neighbours are of different kinds
        self._step: Callable[[], bool] = self._first_step(start)  # True: it has moved on, and there may be more to do

    def _first_step(self, start: Start) -> Callable[[], bool]:
        raise NotImplementedError

    @property
    def is_inside(self) -> bool:
        """What comes now is thinking, or ends it."""
        raise NotImplementedError

    @property
    def is_answering(self) -> bool:
        """What comes now is of the answer, as far as is known."""
        return not self.is_inside

    @property
    def num_held(self) -> int:
        """Characters at the end of the text of which it is not known yet what they are."""
        return len(self._held)

    @property
    def answered(self) -> str:
        return "".join(self._answered)

    @classmethod
    def calls(cls, functions: Collection[str]) -> tuple[str, ...]:
        """What begins a call of one of these without an ending."""
        return ()

    @classmethod
    def start_of(cls, prompt: str, begun: str | None) -> Start:
        """begun: the text of the assistant's last message, if the answer goes on with it."""
        if begun is not None:
            return Start.INSIDE if last(begun, cls.opened_by) > last(begun, cls.closed_by) else Start.BEHIND
        prompt = prompt.rstrip()
        if prompt.endswith(cls.opened_by):
            return Start.INSIDE
        return Start.BEHIND if prompt.endswith(cls.closed_by) else Start.FRESH

    def push(self, text: str) -> list[Event]:
        """What more text brings."""
        self._answered.clear()
        self._held += text
        while self._step():
            pass
        self._held, self._at = self._held[self._at :], 0
        return self._drain()

    def end(self) -> list[Event]:
        """What was held back until the text was over."""
        self._tell(Thought if self.is_inside else Rest, self._held)
        self._held = ""
        return self._drain()

    def _tell(self, kind: type[Event], text: str) -> None:
        if not text:
            return
        if not self._pieces or self._pieces[-1][0] is not kind:
            self._pieces.append((kind, []))
        self._pieces[-1][1].append(text)

    def _take_until(self, markers: tuple[str, ...]) -> tuple[str, str | None]:
        """What comes before one of the markers, and the marker; without one what is certain to come before it."""
        text, found = self._held, _any_of(markers).search(self._held, self._at)
        held = 0 if found else max(overlap(text, marker, self._at) for marker in markers)
        begin, end = self._at, found.start() if found else len(text) - held
        self._at = found.end() if found else end
        return text[begin:end], found[0] if found else None

    def _tell_until(self, markers: tuple[str, ...], kind: type[Event]) -> str | None:
        """Tell what comes before one of the markers, which is taken and returned. None: none has come yet."""
        before, marker = self._take_until(markers)
        self._tell(kind, before)
        if kind is Rest:
            self._answered.append(before)
        return marker

    def _drain(self) -> list[Event]:
        events = [kind("".join(texts)) for kind, texts in self._pieces]
        self._pieces.clear()
        return events


@functools.cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def overlap(text: str, marker: str, start: int = 0) -> int:
    """How many characters at the text's end, behind `start`, are the marker's beginning."""
    longest = min(len(text) - start, len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def last(text: str, markers: Sequence[str]) -> int:
    return max(text.rfind(marker) for marker in markers)
