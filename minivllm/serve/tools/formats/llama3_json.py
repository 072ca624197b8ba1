from __future__ import annotations

from collections.abc import Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import END, Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call, Reader


class Llama3JsonParser(Reader):
    """{"name": ..., "parameters": {...}} as the whole message (Llama 3.1 and 3.2), or after <|python_tag|>.

    Several are separated by ";", "," or spaces. Since nothing but its members tells a call from an answer in JSON, it
    must have none but these two (and `type`, `id`). Llama's own Python calls behind the tag are left as content.
    """

    markers = ("<|python_tag|>",)
    marks = (("<|python_tag|>",), ('"parameters"', "ipython"))
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        yield ("", "<|python_tag|>"), writing.one(), *writing.again("; ", ";")

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
