from __future__ import annotations

from collections.abc import Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call, TaggedReader


class InternlmParser(TaggedReader):
    """<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>: InternLM 2.5 and 3 (vLLM 0.33,
    internlm2_tool_parser.py). Code for their <|interpreter|> stays content."""

    begins = ("<|action_start|>",)
    markers = (*begins, "<|plugin|>", "<|action_end|>")
    marks = (("<|action_start|>",), ("<|plugin|>",))
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        begin = ("<|action_start|><|plugin|>\n", "<|action_start|><|plugin|>")
        yield begin, writing.one(), ("\n<|action_end|>", "<|action_end|>"), *writing.again("\n", "")

    def calls(self, begin: str) -> Reading:
        if (yield from self.call(self.plugin(call := Call()), call)):
            yield from self.closing_tag("<|action_end|>")

    def plugin(self, call: Call) -> Reading:
        yield from self.expect("<|plugin|>")
        yield from self.blank()
        yield from self.object_call(call, tagged=True)
