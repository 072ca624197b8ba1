from __future__ import annotations

from collections.abc import Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call, TaggedReader


class Granite20bParser(TaggedReader):
    """<function_call> {"name": ..., "arguments": {...}}, with no closing tag: Granite 20B Function Calling (vLLM 0.33,
    granite_20b_fc_tool_parser.py)."""

    begins = ("<function_call>",)
    markers = begins
    marks = (("<function_call>",),)
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        begin = ("<function_call> ", "<function_call>")
        yield begin, writing.one(parameters="arguments"), *writing.again("\n", "")

    def calls(self, begin: str) -> Reading:
        yield from self.call(self.object_call(call := Call(), tagged=True), call)
