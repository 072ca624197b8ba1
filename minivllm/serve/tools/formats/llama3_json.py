from __future__ import annotations

from collections.abc import Iterator

from minivllm.serve.tools.formats.pythonic import KeywordReader
from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import END, Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call

TAG, FUNCTION = "<|python_tag|>", "<function="


class Llama3JsonParser(KeywordReader):
    """{"name": ..., "parameters": {...}} as the whole message (Llama 3.1 and 3.2), or after <|python_tag|>.

    Several are separated by ";", "," or spaces. Other members may stand among these two: Meta's renderer writes
    `"type": "function"` first. It has two more forms (meta-llama/llama-models, ToolUtils.encode_tool_call), which may
    stand anywhere: <|python_tag|>name.call(key="value", ...) of the tools that Llama has been trained on, and
    <function=name>{...}</function>.
    """

    begins = (TAG, FUNCTION)
    markers = (TAG,)
    marks = (("<|python_tag|>",), ('"parameters"', "ipython"))
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        yield ("", TAG), writing.one(), *writing.again("; ", ";")

    def read(self) -> Reading:
        yield
        may_begin = True  # at the start of the message, and after a call
        while self.char != END:
            if may_begin:
                yield from self.blank()
            tag = (yield from self.marker(TAG, FUNCTION)) if self.char == "<" else None
            if tag == TAG:
                yield from self.blank()
            if (reading := self.call_behind(tag, may_begin, call := Call())) is not None:
                if may_begin := (yield from self.call(reading, call)):
                    yield from self.separator(tag)
            else:
                may_begin = False
                self.give_back()
                if self.char not in (END, "<"):
                    self.content(self.char)
                    yield

    def call_behind(self, tag: str | None, may_begin: bool, call: Call) -> Reading | None:
        """What reads the call that may come here."""
        if tag == FUNCTION:
            return self.function(call)
        if self.char == "{" and (tag or may_begin):
            return self.object_call(call, tagged=False)
        return self.method(call) if tag else None

    def function(self, call: Call) -> Reading:
        self.is_of(call, (yield from self.word()))
        yield from self.expect(">")
        yield from self.blank()
        yield from self.arguments(call)

    def method(self, call: Call) -> Reading:
        self.is_of(call, (yield from self.word()))
        yield from self.expect(".call(")
        yield from self.keywords(call)

    def separator(self, tag: str | None) -> Reading:
        if tag == FUNCTION:
            yield from self.closing_tag("</function>")
        yield from self.blank()
        if self.char in (";", ","):
            yield from self.take()
