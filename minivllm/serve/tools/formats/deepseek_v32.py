from __future__ import annotations

from minivllm.serve.tools.json_reader import Malformed, Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call, SectionReader
from minivllm.serve.tools.typed import TypedReader

PARAMETER, GIVEN = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
SECTIONS = ("function_calls", "tool_calls")


class DeepseekV32Parser(SectionReader, TypedReader):
    r"""A section of calls, each <｜DSML｜invoke name="f">\n<｜DSML｜parameter name="key" string="true">value
    </｜DSML｜parameter>\n ... </｜DSML｜invoke>: DeepSeek V3.2, whose section is function_calls, and V4, whose section
    is tool_calls (the models' encoding_dsv32.py; vLLM's deepseek_v32 and deepseek_v4).

    A parameter says itself whether its value is a string as it stands, or JSON. In the place of parameters the model
    also writes all arguments as one JSON object, which SGLang reads, too.
    """

    begins = tuple(f"<｜DSML｜{section}>" for section in SECTIONS)
    section_ends = tuple(f"</｜DSML｜{section}>" for section in SECTIONS)
    call_begin, call_ends = '<｜DSML｜invoke name="', ("</｜DSML｜invoke>",)
    markers = (*begins, *section_ends, "｜DSML｜")
    marks = (("<｜DSML｜",), ("｜DSML｜", "invoke"))
    new_id = staticmethod(openai_id)

    def one_call(self, call: Call) -> Reading:
        self.is_of(call, (yield from self.word()))
        yield from self.expect('">')
        yield from self.blank()
        if self.char == "{":
            return (yield from self.arguments(call))
        while (yield from self.expect(PARAMETER, *self.call_ends)) == PARAMETER:
            yield from self.parameter(call)
            yield from self.blank()
        self.close(call)

    def parameter(self, call: Call) -> Reading:
        key = yield from self.text_until('" string="')
        is_string = yield from self.text_until('">')
        if is_string not in ("true", "false"):
            raise Malformed(is_string)
        types = self.types(call, key)
        as_it_stands = is_string == "true" and (not types or "string" in types)
        yield from self.plain(call, key, GIVEN, types=frozenset({"string"}) if as_it_stands else types)
