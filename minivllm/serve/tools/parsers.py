"""What a parser of tool calls is, and the two for calls that a grammar forces. The formats in which models write calls
of their own are in formats/, one file each.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterator
from typing import ClassVar, Protocol

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import END, Reading
from minivllm.serve.tools.reader import Arguments, CallBegin, CallEnd, Event, Functions, Reader

ALPHANUMERIC = string.ascii_letters + string.digits


class ToolParser(Protocol):
    """One answer's text, as it comes, into events. `markers`: what the format writes around its calls; where these are
    special tokens, the text must show them. `forms`: how a call is written, or what it begins with (forms.py). `marks`:
    what shows that a chat template writes the format: all texts of one of these."""

    markers: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[tuple[str, ...], ...]]

    def __init__(self, functions: Functions): ...
    def push(self, text: str) -> list[Event]: ...
    def end(self) -> list[Event]: ...
    @staticmethod
    def new_id() -> str: ...
    @staticmethod
    def forms(writing: Writing) -> Iterator[Parts]: ...


def openai_id() -> str:
    return "call_" + random_name(24)


def random_name(length: int) -> str:
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(length))


class ArrayParser(Reader):
    """[{"name": ..., "parameters": {...}}, ...]: what the grammar of tool_choice "required" admits. Nothing of it is
    content: an answer that is cut by max_tokens ends in the middle of a call's arguments, as OpenAI's do, and what is
    no call yet is left out."""

    markers = marks = ()
    new_id = staticmethod(openai_id)

    def content(self, text: str) -> None:
        pass

    def broken_end(self, text: str) -> CallEnd:
        return CallEnd()

    def read(self) -> Reading:
        yield
        yield from self.blank()
        yield from self.array_of_calls()
        self.give_back()
        while self.char != END:
            self.content(self.char)
            yield


class ArgumentsParser:
    """The arguments alone: what the grammar of a named function admits, an object. Nothing is content here either: what
    was cut before the object begins, in the marker that opens a model's thinking, is left out."""

    markers = marks = ()
    new_id = staticmethod(openai_id)
    forms = Reader.forms

    def __init__(self, functions: Functions):
        (self.name,) = functions
        self.begun = False

    def push(self, text: str) -> list[Event]:
        if self.begun:
            return [Arguments(text)] if text else []
        _, brace, behind = text.partition("{")
        self.begun = bool(brace)
        return [CallBegin(self.name), Arguments(brace + behind)] if self.begun else []

    def end(self) -> list[Event]:
        return [CallEnd()] if self.begun else []
