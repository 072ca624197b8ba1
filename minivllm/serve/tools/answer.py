"""A parser's events as OpenAI's messages: whole, or as the deltas of a stream.

Both are made of the same events, so a stream adds up to the whole message. The one exception cannot be helped: a call
that breaks after its arguments have begun is content in a whole message, and in a stream has been sent already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from minivllm.serve.protocol import ChatDelta, ChatMessage, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from minivllm.serve.tools.parsers import ToolParser
from minivllm.serve.tools.reader import Arguments, CallBegin, CallEnd, Content, Event


class Answer(Protocol):
    """One choice's text as a message or, as it comes, as deltas."""

    def message(self, text: str) -> ChatMessage: ...
    def deltas(self, text: str, finished: bool) -> list[ChatDelta]: ...
    def finish_reason(self, reason: str | None) -> str | None: ...


class PlainAnswer:
    """All that comes is content."""

    def message(self, text: str) -> ChatMessage:
        return ChatMessage(text)

    def deltas(self, text: str, finished: bool) -> list[ChatDelta]:
        return [ChatDelta(content=text)] if text else []

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


class ToolAnswer:
    """One choice's answer. parallel=False: the calls after the first are dropped. new_id: of a call that the model has
    given none; None: the parser's."""

    def __init__(self, parser: ToolParser, parallel: bool = True, new_id: Callable[[], str] | None = None):
        self.parser, self.parallel, self.new_id = parser, parallel, new_id or parser.new_id
        self.num_begun = self.num_calls = 0

    def message(self, text: str) -> ChatMessage:
        contents: list[str] = []
        calls: list[ToolCall] = []
        written: list[str] = []  # arguments of the last call
        for event in [*self.parser.push(text), *self.parser.end()]:
            match event:
                case Content(text):
                    contents.append(text)
                case CallBegin(name, id):
                    calls.append(ToolCall(id or self.new_id(), FunctionCall(name)))
                    written.clear()
                case Arguments(text):
                    written.append(text)
                case CallEnd(None):
                    calls[-1].function.arguments = "".join(written)
                case CallEnd(broken):
                    calls.pop()
                    contents.append(broken)
        content = "".join(contents)
        if not self.parallel:
            del calls[1:]
        self.num_calls = len(calls)
        return ChatMessage(content or None, tool_calls=calls) if calls else ChatMessage(content)

    def deltas(self, text: str, finished: bool) -> list[ChatDelta]:
        """What `text` adds; with `finished` also what was held back. Each delta has one part of one call."""
        events = self.parser.push(text) + (self.parser.end() if finished else [])
        return list(self._deltas(events))

    def _deltas(self, events: Iterable[Event]) -> Iterable[ChatDelta]:
        for event in events:
            self.num_begun += isinstance(event, CallBegin)
            call = self.num_begun - 1
            if not self.parallel and call > 0 and not isinstance(event, Content):
                continue
            match event:
                case Content(text):
                    yield ChatDelta(content=text)
                case CallBegin(name, id):
                    function = FunctionDelta(name=name, arguments="")
                    id = id or self.new_id()
                    yield calling(ToolCallDelta(call, id=id, type="function", function=function))
                case Arguments(text):
                    yield calling(ToolCallDelta(call, function=FunctionDelta(arguments=text)))
                case CallEnd(broken):
                    self.num_calls += broken is None

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.num_calls else reason


def calling(part: ToolCallDelta) -> ChatDelta:
    return ChatDelta(tool_calls=[part])
