from __future__ import annotations

import re
from collections.abc import Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import Malformed, Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call, Functions, SectionReader

ARGUMENTS = "<|tool_call_argument_begin|>"
MOST_CALLS = 100  # of a conversation whose calls a grammar holds


class KimiK2Parser(SectionReader):
    """A section of calls, each functions.name:0<|tool_call_argument_begin|>{...}: Kimi K2 (vLLM 0.33,
    kimi_k2_tool_parser.py, which knows the section's tags in the singular, too).

    The first part is the call's id, whose number counts the calls of the conversation. The template tells the model of
    a result by it, so that it is the id that a client gets; but one that an answer has had already is not.
    """

    begins = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    section_ends = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    call_begin, call_ends = "<|tool_call_begin|>", ("<|tool_call_end|>",)
    markers = (*begins, *section_ends, call_begin, *call_ends, ARGUMENTS)
    marks = ((begins[0],),)
    new_id = staticmethod(openai_id)

    def __init__(self, functions: Functions):
        super().__init__(functions)
        self.ids: set[str] = set()

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        numbers = tuple(map(str, range(MOST_CALLS)))
        for name, arguments in writing.arguments():
            call = (f"{cls.call_begin}functions.{name}:",), numbers, (ARGUMENTS,), arguments, cls.call_ends
            yield cls.begins[:1], *call, *writing.again("", to=1), cls.section_ends[:1]

    def one_call(self, call: Call) -> Reading:
        yield from self.blank()
        id = yield from self.word(".:")
        if not (parts := re.fullmatch(r"(?:functions\.)?([\w-]+):\d+", id)):
            raise Malformed(id)
        self.is_of(call, parts[1])
        call.id = None if id in self.ids else id
        self.ids.add(id)
        yield from self.blank()
        yield from self.expect(ARGUMENTS)
        yield from self.blank()
        yield from self.arguments(call)
