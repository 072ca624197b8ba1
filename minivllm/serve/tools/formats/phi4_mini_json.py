from __future__ import annotations

from collections.abc import Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import TaggedReader


class Phi4MiniJsonParser(TaggedReader):
    """functools[{"name": ..., "arguments": {...}}, ...]: Phi-4-mini with the template of vLLM 0.33
    (phi4mini_tool_parser.py, tool_chat_template_phi4_mini.jinja); or the list between the model's own tokens,
    <|tool_call|> and <|/tool_call|>."""

    begins = ("functools", "<|tool_call|>")
    markers = (*begins, "<|/tool_call|>")
    marks = (("functools",),)
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        yield ("functools",), writing.array(parameters="arguments")
        yield ("<|tool_call|>",), writing.array(parameters="arguments"), ("<|/tool_call|>",)

    def calls(self, begin: str) -> Reading:
        if (yield from self.array_of_calls()) and begin != "functools":
            yield from self.closing_tag("<|/tool_call|>")
