from __future__ import annotations

from collections.abc import Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import TaggedReader


class Phi4MiniJsonParser(TaggedReader):
    """functools[{"name": ..., "arguments": {...}}, ...]: Phi-4-mini with the template of vLLM 0.33
    (phi4mini_tool_parser.py, tool_chat_template_phi4_mini.jinja)."""

    begins = ("functools",)
    markers = begins
    marks = (("functools",),)
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        yield cls.begins, writing.array(parameters="arguments")

    def calls(self, begin: str) -> Reading:
        yield from self.array_of_calls()
