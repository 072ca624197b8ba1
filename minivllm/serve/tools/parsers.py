"""The formats in which models write tool calls. Each is a way to read; tools/reader.py has the parts.

The names are vLLM's (`--tool-call-parser`).
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Generator
from typing import ClassVar, Protocol

from minivllm.serve.tools.json_reader import END, Malformed, Reading
from minivllm.serve.tools.reader import Arguments, Call, CallBegin, CallEnd, Event, Reader

ALPHANUMERIC = string.ascii_letters + string.digits


class ToolParser(Protocol):
    """One answer's text, as it comes, into events. `markers`: what the format writes around its calls; where these are
    special tokens, the text must show them."""

    markers: ClassVar[tuple[str, ...]]

    def __init__(self, names: Collection[str]): ...
    def push(self, text: str) -> list[Event]: ...
    def end(self) -> list[Event]: ...
    @staticmethod
    def new_id() -> str: ...


def openai_id() -> str:
    return "call_" + random_name(24)


def random_name(length: int) -> str:
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(length))


class HermesParser(Reader):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere: Hermes 2 Pro, Qwen 2.5 and 3, and models
    whose template knows no tools (engine/tool_prompt.py)."""

    markers = ("<tool_call>", "</tool_call>")
    new_id = staticmethod(openai_id)

    def read(self) -> Reading:
        yield
        while self.char != END:
            if self.char != "<":
                self.content(self.char)
                yield
            elif (yield from self.marker("<tool_call>")):
                yield from self.blank()
                if (yield from self.call(self.object_call(call := Call(), tagged=True), call)):
                    yield from self.closing_tag()
            else:
                self.give_back()

    def closing_tag(self) -> Reading:
        yield from self.blank()
        if (yield from self.marker("</tool_call>")):
            self.forget()
        else:  # forgotten, as by models that stop after the JSON
            self.give_back()


class Llama3JsonParser(Reader):
    """{"name": ..., "parameters": {...}} as the whole message (Llama 3.1 and 3.2), or after <|python_tag|>.

    Several are separated by ";", "," or spaces. Since nothing but its members tells a call from an answer in JSON, it
    must have none but these two (and `type`, `id`). Llama's own Python calls behind the tag are left as content.
    """

    markers = ("<|python_tag|>",)
    new_id = staticmethod(openai_id)

    def read(self) -> Reading:
        yield
        may_begin = True  # at the start of the message, and after a call
        while self.char != END:
            if may_begin:
                yield from self.blank()
            tagged = self.char == "<" and (yield from self.marker("<|python_tag|>"))
            if tagged:
                yield from self.blank()
            if self.char == "{" and (tagged or may_begin):
                may_begin = yield from self.call(self.object_call(call := Call(), tagged=False), call)
                if may_begin:
                    yield from self.separator()
            else:
                may_begin = False
                self.give_back()
                if self.char not in (END, "<"):
                    self.content(self.char)
                    yield

    def separator(self) -> Reading:
        yield from self.blank()
        if self.char in (";", ","):
            yield from self.take()


class MistralParser(Reader):
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or (tokenizer v11 and later) [TOOL_CALLS]name{...},
    with [ARGS] after the name in v13. Mistral's templates want ids of nine letters and digits."""

    markers = ("[TOOL_CALLS]", "[ARGS]")

    @staticmethod
    def new_id() -> str:
        return random_name(9)

    def read(self) -> Reading:
        yield
        while self.char != END:
            if self.char != "[":
                self.content(self.char)
                yield
            elif (yield from self.marker("[TOOL_CALLS]")):
                yield from self.blank()
                if self.char == "[":
                    yield from self.array_of_calls()
                else:
                    yield from self.call(self.name_and_arguments(call := Call()), call)
            else:
                self.give_back()

    def name_and_arguments(self, call: Call) -> Generator[None, None, None]:
        start = len(self._taken)
        while self.char != END and (self.char.isalnum() or self.char in "_-"):
            yield from self.take()
        if (name := self.taken(start)) not in self.names:
            raise Malformed(name)
        call.name = name
        if self.char == "[" and not (yield from self.marker("[ARGS]")):
            raise Malformed(self.char)
        yield from self.arguments(call)


class ArrayParser(Reader):
    """[{"name": ..., "parameters": {...}}, ...]: what the grammar of tool_choice "required" admits."""

    markers = ()
    new_id = staticmethod(openai_id)

    def read(self) -> Reading:
        yield
        yield from self.blank()
        if self.char == "[":
            yield from self.array_of_calls()
        self.give_back()
        while self.char != END:
            self.content(self.char)
            yield


class ArgumentsParser:
    """The arguments alone: what the grammar of a named function admits. All that comes is told as it comes; an answer
    that is cut by max_tokens ends in the middle of them, as OpenAI's do."""

    markers = ()
    new_id = staticmethod(openai_id)

    def __init__(self, names: Collection[str]):
        (self.name,) = names
        self.begun = False

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        begin = [] if self.begun else [CallBegin(self.name)]
        self.begun = True
        return [*begin, Arguments(text)]

    def end(self) -> list[Event]:
        return [CallEnd()] if self.begun else []
