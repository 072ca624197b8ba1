from __future__ import annotations

from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call
from minivllm.serve.tools.typed import TypedReader


class Glm45Parser(TypedReader):
    r"""<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n ... </tool_call>: GLM 4.5 and 4.6; 4.7
    without the line ends (vLLM 0.33, glm4_moe_tool_parser.py and glm47_moe_tool_parser.py)."""

    begins = ("<tool_call>",)
    markers = (*begins, "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    marks = (("<tool_call>", "<arg_key>"),)
    new_id = staticmethod(openai_id)

    def calls(self, begin: str) -> Reading:
        yield from self.call(self.pairs(call := Call()), call)

    def pairs(self, call: Call) -> Reading:
        self.is_of(call, (yield from self.word()))
        yield from self.blank()
        while (yield from self.expect("<arg_key>", "</tool_call>")) == "<arg_key>":
            key = yield from self.text_until("</arg_key>")
            yield from self.blank()
            yield from self.expect("<arg_value>")
            yield from self.plain(call, key.strip(), "</arg_value>")
            yield from self.blank()
        self.close(call)
