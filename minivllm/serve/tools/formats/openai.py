from __future__ import annotations

import re
from collections.abc import Generator, Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import END, Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call, TaggedReader

HEADS, CONSTRAIN, MESSAGE = ("<|start|>", "<|channel|>"), "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
NAMESPACE = "functions."
RECIPIENT = re.compile(rf"\bto=(?:{re.escape(NAMESPACE)})?([\w-]+)(?=<\||\s)")


class OpenaiParser(TaggedReader):
    """Harmony, which gpt-oss writes: messages with a header. One to a function is a call,
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>, where the recipient may stand
    before the channel too, and first of all, since the prompt ends in the middle of a header (openai/harmony,
    docs/format.md). In long contexts models leave out the namespace, to=name, as vLLM knows.

    Of other messages the text is content, each on a line of its own, but of channel `analysis`, which is thinking and
    is dropped: a reasoning parser takes it away before it comes here.
    """

    begins = (*HEADS, *ENDS)
    markers = (*begins, CONSTRAIN, MESSAGE)
    marks = (("<|channel|>", "<|call|>"),)
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        """A channel alone does not tell a call from an answer."""
        yield (tuple(f" to={space}{name}" for space in (NAMESPACE, "") for name in writing.names),)

    def start(self) -> Reading:
        yield from self.blank()
        if (yield from self.marker("to=")):
            yield from self.message()
        else:
            self.give_back()

    def calls(self, begin: str) -> Reading:
        if begin in HEADS:
            yield from self.message()
        else:
            self.forget()

    def message(self) -> Reading:
        if not (yield from self.header()):
            return self.give_back()
        header = self.taken()
        if (to := RECIPIENT.search(header)) and to[1] in self.functions:
            yield from self.call(self.call_of(call := Call(), to[1]), call)
        elif "to=" in header:  # something else than a function
            self.give_back()
        elif re.search(r"<\|channel\|>\s*analysis", header):
            yield from self.thinking()
        else:
            self.forget()
            self.content("\n" if self._seen_content else "")

    def header(self) -> Generator[None, None, bool]:
        """Up to <|message|>. False: it is none."""
        while self.char not in (END, "\n"):
            if self.char != "<":
                yield from self.take()
            elif (found := (yield from self.marker("<|channel|>", CONSTRAIN, MESSAGE))) in (MESSAGE, None):
                return found is not None
        return False

    def call_of(self, call: Call, name: str) -> Reading:
        self.is_of(call, name)
        yield from self.blank()
        if self.char == "<" and (yield from self.marker("<|call|>")):  # a function without parameters
            call.untold, call.looks_right, call.has_arguments = ["{}"], True, True
        else:
            yield from self.arguments(call)

    def thinking(self) -> Reading:
        while self.char != END:
            self.forget()
            if (yield from self.marker(*ENDS)):
                break
            if self.char != "<":
                yield from self.take()
        self.forget()
