from __future__ import annotations

from collections.abc import Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call, SectionReader

SEPARATOR = "<｜tool▁sep｜>"


class DeepseekV3Parser(SectionReader):
    r"""A section of calls, each function<｜tool▁sep｜>name\n```json\n{...}\n```: DeepSeek V3 and R1; or, in V3.1,
    name<｜tool▁sep｜>{...} (vLLM 0.33, deepseekv3_tool_parser.py and deepseekv31_tool_parser.py)."""

    begins = ("<｜tool▁calls▁begin｜>",)
    section_ends = ("<｜tool▁calls▁end｜>",)
    call_begin, call_ends = "<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>", "```")
    markers = (*begins, *section_ends, call_begin, call_ends[0], SEPARATOR)
    marks = (begins,)
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        for name, arguments in writing.arguments():
            fenced = (
                (f"{cls.call_begin}function{SEPARATOR}{name}\n```json\n",),
                arguments,
                (f"\n```{cls.call_ends[0]}",),
            )
            plain = (f"{cls.call_begin}{name}{SEPARATOR}",), arguments, cls.call_ends[:1]
            for call in fenced, plain:
                yield cls.begins, *call, *writing.again("\n", "", to=1), cls.section_ends

    def one_call(self, call: Call) -> Reading:
        word = yield from self.word()  # V3.1: the name, else "function"
        yield from self.expect(SEPARATOR)
        if self.char != "{":
            word = yield from self.word()
            yield from self.blank()
            yield from self.expect("```json")
            yield from self.blank()
        self.is_of(call, word)
        yield from self.arguments(call)
