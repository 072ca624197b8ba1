from __future__ import annotations

from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call
from minivllm.serve.tools.typed import TypedReader

FUNCTION, PARAMETER = "<function=", "<parameter="


class Qwen3CoderParser(TypedReader):
    r"""<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n ... </function>\n</tool_call>: Qwen 3 Coder
    and others. One line end on each side of a value is layout. As in vLLM 0.33 (qwen3coder_tool_parser.py), the outer
    tag may be missing, which models forget, and so may </function>. Qwen's other form, JSON in the outer tag
    (hermes.py), is read, too."""

    begins = ("<tool_call>", FUNCTION)
    markers = (*begins, "</tool_call>", "</function>", PARAMETER, "</parameter>")
    marks = (("<tool_call>", FUNCTION),)
    new_id = staticmethod(openai_id)

    def calls(self, begin: str) -> Reading:
        is_json, call = begin != FUNCTION and self.char == "{", Call()
        if (yield from self.call(self.object_call(call, tagged=True) if is_json else self.function(call, begin), call)):
            yield from self.closing_tag("</tool_call>")

    def function(self, call: Call, begin: str) -> Reading:
        if begin != FUNCTION:
            yield from self.expect(FUNCTION)
        self.is_of(call, (yield from self.word()))
        yield from self.expect(">")
        yield from self.blank()
        while (yield from self.expect(PARAMETER, "</function>", "</tool_call>")) == PARAMETER:
            key = yield from self.text_until(">")
            yield from self.plain(call, key, "</parameter>", frame="\n")
            yield from self.blank()
        self.close(call)
