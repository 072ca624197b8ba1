from __future__ import annotations

from collections.abc import Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import TaggedReader


class GraniteParser(TaggedReader):
    """<|tool_call|>[{"name": ..., "arguments": {...}}, ...]: Granite 3.0 to 3.3. 3.1 also writes <tool_call>, and any
    of them, at the start of a message, the list alone (vLLM 0.33, granite_tool_parser.py)."""

    begins = ("<|tool_call|>", "<tool_call>")
    markers = begins
    marks = (("<|tool_call|>",),)
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        yield cls.begins, writing.array(parameters="arguments")

    def start(self) -> Reading:
        yield from self.blank()
        yield from self.array_of_calls()

    def calls(self, begin: str) -> Reading:
        yield from self.array_of_calls()
