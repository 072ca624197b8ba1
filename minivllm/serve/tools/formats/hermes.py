from __future__ import annotations

from collections.abc import Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call, TaggedReader


class HermesParser(TaggedReader):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere: Hermes 2 Pro, Qwen 2.5 and 3, and models
    whose template knows no tools (engine/tool_prompt.py)."""

    begins = ("<tool_call>",)
    markers = (*begins, "</tool_call>")
    marks = (("<tool_call>",),)
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        begin, end = ("<tool_call>\n", "<tool_call>"), ("\n</tool_call>", "</tool_call>")
        yield begin, writing.one(parameters="arguments"), end, *writing.again("\n", "")

    def calls(self, begin: str) -> Reading:
        if (yield from self.call(self.object_call(call := Call(), tagged=True), call)):
            yield from self.closing_tag("</tool_call>")
