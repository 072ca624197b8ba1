"""Reading tool calls out of a text that is still being written, one character at a time.

A parser is a generator: `yield` waits for the next character, which is then in `self.char`. So it is written like any
recursive-descent parser, and how the text was cut on its way cannot matter.

What it finds are events. Text outside of calls is `Content`; spaces beside a call are layout and dropped. A call is
told as `CallBegin`, once its name is known and its arguments have begun as a JSON object, then `Arguments`, then
`CallEnd`. What turns out to be no call before that is content, with its tags, as in vLLM. A call that breaks later has
been told already; its `CallEnd` then has the text to show instead, for whoever has waited (tools/answer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from minivllm.serve.tools.json_reader import BLANK, END, JsonReader, Malformed, Reading, is_object

if TYPE_CHECKING:
    from minivllm.serve.tools.forms import Parts, Writing


class Content(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    name: str
    id: str | None = None  # where the format writes one


class Arguments(NamedTuple):
    text: str


class CallEnd(NamedTuple):
    broken: str | None = None  # the text of a call that is none after all


Event = Content | CallBegin | Arguments | CallEnd
Functions = Mapping[str, Mapping[str, Any]]  # by name, the JSON schema of its parameters


@dataclass(slots=True)
class Call:
    """What is known of the call that is being read."""

    name: str | None = None
    id: str | None = None
    untold: list[str] = field(default_factory=list)  # of the arguments, which wait for the name
    looks_right: bool = False  # the arguments begin as a JSON object does
    is_told: bool = False
    has_arguments: bool = False  # all of them
    num_members: int = 0  # of arguments that are made one by one

    @property
    def complete(self) -> bool:
        return self.name is not None and self.has_arguments


class Reader(JsonReader):
    name_key: ClassVar[str] = "name"

    def __init__(self, functions: Functions):
        """functions: the tools that were offered. A call of anything else is content."""
        super().__init__()
        self.functions = functions
        self._events: list[Event] = []
        self._texts: list[str] = []  # the beginning of the next event, which is of this kind
        self._kind: type[Content] | type[Arguments] = Content
        self._blanks: list[str] = []  # content that is layout if a call follows
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
            self._show("".join(self._blanks))
        return self._drain()

    def read(self) -> Reading:
        """The format. The first character is not there before the first `yield`."""
        raise NotImplementedError

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        """None: nothing else than calls may come."""
        yield from ()

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
        shown = text.rstrip(BLANK)
        blank = text[len(shown) :]
        if shown:
            shown = "".join((*self._blanks, shown))
            self._blanks.clear()
            self._show(shown.lstrip(BLANK) if self._seen_call and not self._seen_content else shown)
        if blank:
            self._blanks.append(blank)

    def marker(self, *markers: str) -> Generator[None, None, str | None]:
        """Take the one of `markers` that comes; none begins with another. If none does, their common beginning may have
        been taken."""
        num_taken = 0  # no marker's first character comes twice: a mismatch may begin the next one
        while candidates := [marker for marker in markers if marker[num_taken] == self.char]:
            yield from self.take()
            num_taken += 1
            if len(candidates[0]) == num_taken:
                return candidates[0]
            markers = tuple(candidates)
        return None

    def expect(self, *markers: str) -> Generator[None, None, str]:
        """Take the one of `markers` that must come here."""
        if (marker := (yield from self.marker(*markers))) is None:
            raise Malformed(self.char)
        return marker

    def call(self, read: Reading, call: Call) -> Generator[None, None, bool]:
        """Read one call's JSON into `call`. False: it was none, and all that was taken is content."""
        with suppress(Malformed):
            yield from read
        if call.complete:
            self._tell(call)
            self._mark(CallEnd())
            self._seen_call = True
        elif call.is_told:
            self._mark(self.broken_end("".join((*self._blanks, self.taken()))))
            self._blanks.clear()
            self._seen_content = True
        else:
            self.content(self.taken())
        self.forget()
        return call.complete

    def broken_end(self, text: str) -> CallEnd:
        """Of a call that has been told of, and is none. text: all of it."""
        return CallEnd(text)

    def object_call(self, call: Call, *, tagged: bool) -> Reading:
        """{"name": ..., "arguments": {...}} in either order and among other members; "parameters" is another name of
        "arguments", and formats have their own of "name".

        tagged: something else has said that this is a call, so it may have no arguments.
        """
        yield from self.symbol("{")
        separator = ""
        while self.char != "}" or separator:
            key = yield from self.string()
            yield from self.blank()
            yield from self.symbol(":")
            if key == self.name_key and call.name is None:
                yield from self.name(call)
            elif key in ("arguments", "parameters") and not call.has_arguments:
                yield from self.arguments(call)
            else:
                yield from self.value(1)
            yield from self.blank()
            separator = self.char if self.char == "," else ""
            if separator:
                yield from self.symbol(",")
            elif self.char != "}":
                raise Malformed(self.char)
        if tagged and call.name is not None and not call.has_arguments:
            call.untold, call.looks_right, call.has_arguments = ["{}"], True, True
        yield from self.take()

    def array_of_calls(self) -> Generator[None, None, bool]:
        """[call, call ...]. Ends early at what is no call. True: with the bracket."""
        if self.char == "[":
            yield from self.symbol("[")
            while (yield from self.call(self.element(call := Call()), call)):
                yield from self.blank()
                if self.char == "]":
                    yield from self.take()
                    self.forget()
                    return True
                if self.char != ",":
                    break
                yield from self.symbol(",")
        self.give_back()
        return False

    def element(self, call: Call) -> Reading:
        return self.object_call(call, tagged=True)

    def name(self, call: Call) -> Reading:
        self.is_of(call, (yield from self.string()))
        self._tell(call)

    def word(self, others: str = "") -> Generator[None, None, str]:
        """A function's or a parameter's name, without quotes. others: what else it may have."""
        start = len(self._taken)
        while self.char != END and (self.char.isalnum() or self.char in "_-" + others):
            yield from self.take()
        return self.taken(start)

    def until(self, end: str, tell: Callable[[str], None]) -> Reading:
        """Take what stands before `end`, telling it as it comes, and `end`."""
        while True:
            start = len(self._taken)
            if self.char == END:
                raise Malformed("the end")
            if self.char != end[0]:
                self._taken.append(self.char)
                tell(self.char)
                yield
            elif (yield from self.marker(end)):
                return
            else:
                tell(self.taken(start))

    def text_until(self, end: str) -> Generator[None, None, str]:
        pieces: list[str] = []
        yield from self.until(end, pieces.append)
        return "".join(pieces)

    def is_of(self, call: Call, name: str) -> None:
        if name not in self.functions:
            raise Malformed(name)
        call.name = name

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
            self._mark(CallBegin(call.name, call.id))
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


class TaggedReader(Reader):
    """Calls behind a tag, anywhere in a text. A closing tag may be missing, as where a model stops at it."""

    begins: ClassVar[tuple[str, ...]]  # the tag, or several; none begins with another

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        yield (cls.begins,)

    @property
    def tags(self) -> tuple[str, ...]:
        """What calls may stand behind."""
        return self.begins

    def calls(self, begin: str) -> Reading:
        """What stands behind `begin`, one of the tags, and its spaces, which were taken. In the end all taken is
        forgotten or content."""
        raise NotImplementedError

    def start(self) -> Reading:
        """What stands at the start of a message alone, without a tag. It leaves nothing taken, either."""
        yield from ()

    def closing_tag(self, tag: str) -> Reading:
        yield from self.blank()
        if (yield from self.marker(tag)):
            self.forget()
        else:
            self.give_back()

    def read(self) -> Reading:
        tags = self.tags
        firsts = {tag[0] for tag in tags}
        yield
        yield from self.start()
        while self.char != END:
            if self.char not in firsts:
                self.content(self.char)
                yield
            elif begin := (yield from self.marker(*tags)):
                yield from self.blank()
                yield from self.calls(begin)
            else:
                self.give_back()


class SectionReader(TaggedReader):
    """Calls in tags of their own, one after the other in a section that has tags, too. Models forget the section's now
    and then."""

    call_begin: ClassVar[str]
    call_ends: ClassVar[tuple[str, ...]]  # some of them, and they may be missing
    section_ends: ClassVar[tuple[str, ...]]

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.begins, self.call_begin)

    def calls(self, begin: str) -> Reading:
        found = begin if begin == self.call_begin else (yield from self.marker(self.call_begin))
        while found == self.call_begin:
            if not (yield from self.call(self.one_call(call := Call()), call)):
                return
            found = self.call_ends[0]
            while found in self.call_ends:
                self.forget()
                yield from self.blank()
                found = yield from self.marker(self.call_begin, *self.call_ends, *self.section_ends)
        if found:
            self.forget()
        else:
            self.give_back()

    def one_call(self, call: Call) -> Reading:
        """What stands behind `call_begin`."""
        raise NotImplementedError
