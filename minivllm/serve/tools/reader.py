"""Reading tool calls out of a text that is still being written, one character at a time.

A parser is a generator: `yield` waits for the next character, which is then in `self.char`. So it is written like any
recursive-descent parser, and how the text was cut on its way cannot matter.

What it finds are events. Text outside of calls is `Content`; spaces beside a call are layout and dropped. A call is
told as `CallBegin`, once its name is known and its arguments have begun as a JSON object, then `Arguments`, then
`CallEnd`. What turns out to be no call before that is content, with its tags, as in vLLM. A call that breaks later has
been told already; its `CallEnd` then has the text to show instead, for whoever has waited (tools/answer.py).
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from minivllm.serve.tools.json_reader import BLANK, END, JsonReader, Malformed, Reading, is_object


class Content(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    name: str


class Arguments(NamedTuple):
    text: str


class CallEnd(NamedTuple):
    broken: str | None = None  # the text of a call that is none after all


Event = Content | CallBegin | Arguments | CallEnd


@dataclass(slots=True)
class Call:
    """What is known of the call that is being read."""

    name: str | None = None
    untold: list[str] = field(default_factory=list)  # of the arguments, which wait for the name
    looks_right: bool = False  # the arguments begin as a JSON object does
    is_told: bool = False
    has_arguments: bool = False  # all of them

    @property
    def complete(self) -> bool:
        return self.name is not None and self.has_arguments


class Reader(JsonReader):
    def __init__(self, names: Collection[str]):
        """names: the tools that were offered. A call of anything else is content."""
        super().__init__()
        self.names = names
        self._events: list[Event] = []
        self._texts: list[str] = []  # the beginning of the next event, which is of this kind
        self._kind: type[Content] | type[Arguments] = Content
        self._blank = ""  # content that is layout if a call follows
        self._seen_content = self._seen_call = False
        self._reading = self.read()
        next(self._reading)

    def push(self, text: str) -> list[Event]:
        """What more text brings."""
        for self.char in text:
            next(self._reading)
        return self._drain()

    def end(self) -> list[Event]:
        """What was held back until the text was over."""
        self.char = END
        for _ in self._reading:
            pass
        if not self._seen_call:
            self._show(self._blank)
        return self._drain()

    def read(self) -> Reading:
        """The format. The first character is not there before the first `yield`."""
        raise NotImplementedError

    # --- what formats are made of

    def forget(self) -> None:
        """What was taken was layout."""
        self._taken.clear()

    def give_back(self) -> None:
        """What was taken was content."""
        self.content(self.taken())
        self.forget()

    def content(self, text: str) -> None:
        """Text outside of calls. Spaces at its end wait: if a call follows, they are layout."""
        if self._blank:
            text = self._blank + text
        shown = text.rstrip(BLANK)
        self._blank = text[len(shown) :]
        if shown and self._seen_call and not self._seen_content:
            shown = shown.lstrip(BLANK)
        self._show(shown)

    def marker(self, marker: str) -> Generator[None, None, bool]:
        """Take `marker` if it comes. If not, its beginning may have been taken."""
        for expected in marker:  # no marker's first character comes twice: a mismatch may begin the next one
            if self.char != expected:
                return False
            yield from self.take()
        return True

    def call(self, read: Reading, call: Call) -> Generator[None, None, bool]:
        """Read one call's JSON into `call`. False: it was none, and all that was taken is content."""
        with suppress(Malformed):
            yield from read
        if call.complete:
            self._tell(call)
            self._mark(CallEnd())
            self._seen_call = True
        elif call.is_told:
            self._mark(CallEnd(self._blank + self.taken()))
            self._blank, self._seen_content = "", True
        else:
            self.content(self.taken())
        self.forget()
        return call.complete

    def object_call(self, call: Call, *, tagged: bool) -> Reading:
        """{"name": ..., "arguments": {...}} in either order; "parameters" is another name of "arguments".

        tagged: something else has said that this is a call, so it may have other members, or no arguments.
        """
        yield from self.symbol("{")
        separator = ""
        while self.char != "}" or separator:
            key = yield from self.string()
            yield from self.blank()
            yield from self.symbol(":")
            if key == "name" and call.name is None:
                yield from self.name(call)
            elif key in ("arguments", "parameters") and not call.has_arguments:
                yield from self.arguments(call)
            elif tagged or key in ("type", "id"):
                yield from self.value(1)
            else:
                raise Malformed(key)
            yield from self.blank()
            separator = self.char if self.char == "," else ""
            if separator:
                yield from self.symbol(",")
            elif self.char != "}":
                raise Malformed(self.char)
        if tagged and call.name is not None and not call.has_arguments:
            call.untold, call.looks_right, call.has_arguments = ["{}"], True, True
        yield from self.take()

    def array_of_calls(self) -> Reading:
        """[call, call ...]. Ends early at what is no call."""
        yield from self.take()
        yield from self.blank()
        while (yield from self.call(self.object_call(call := Call(), tagged=True), call)):
            yield from self.blank()
            if self.char == "]":
                yield from self.take()
                return self.forget()
            if self.char != ",":
                return self.give_back()
            yield from self.symbol(",")

    def name(self, call: Call) -> Reading:
        name = yield from self.string()
        if name not in self.names:
            raise Malformed(name)
        call.name = name
        self._tell(call)

    def arguments(self, call: Call) -> Reading:
        """A JSON object, told as it comes, or one that is written as a JSON string."""
        if self.char == '"':
            text = yield from self.string()
            if not is_object(text):
                raise Malformed(text)
            call.untold.append(text)
        elif self.char == "{":
            for _ in self.items("}", 1):
                char = self._taken[-1]
                call.looks_right = call.looks_right or (bool(call.untold) and char not in BLANK)
                call.untold.append(char)
                self._tell(call)
                yield
        else:
            raise Malformed(self.char)
        call.looks_right = call.has_arguments = True

    def _tell(self, call: Call) -> None:
        if call.name is None or not call.looks_right:
            return
        if not call.is_told:
            self._mark(CallBegin(call.name))
            call.is_told = True
        if call.untold:
            self._add(Arguments, "".join(call.untold))
            call.untold.clear()

    # --- events

    def _show(self, text: str) -> None:
        if text:
            self._seen_content = True
            self._add(Content, text)

    def _add(self, kind: type[Content] | type[Arguments], text: str) -> None:
        """Text of the same kind as before makes one event with it."""
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._texts.append(text)

    def _mark(self, event: Event) -> None:
        self._close()
        self._events.append(event)

    def _close(self) -> None:
        if self._texts:
            self._events.append(self._kind("".join(self._texts)))
            self._texts.clear()

    def _drain(self) -> list[Event]:
        self._close()
        events, self._events = self._events, []
        return events
