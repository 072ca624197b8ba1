from __future__ import annotations

from collections.abc import Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import TaggedReader

ACTION, FENCED = "<|START_ACTION|>", "Action:"
LAYOUT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


class CohereCommandParser(TaggedReader):
    """<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>: Command R7B
    and A; or the list in a fence behind `Action:`: Command R and R+, 04 and 08-2024.

    The tags around an answer in words are dropped. vLLM 0.33 has two parsers, of Command R7B and A and of later models,
    which differ in these tags; the fence is of the `tool_use` templates that Cohere publishes. The model counts its
    calls in `tool_call_id`; the templates count again, so that ids are OpenAI's.
    """

    begins = (ACTION, FENCED, *LAYOUT)
    markers = (ACTION, "<|END_ACTION|>", *LAYOUT)
    marks = (("<|START_ACTION|>",), ("Action:", '"tool_name"'))
    name_key = "tool_name"
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        counted = {"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,3}$"}}
        ends = ("<|END_ACTION|>", "\n<|END_ACTION|>")
        yield (ACTION, f"{ACTION}\n"), writing.array(counted, name="tool_name"), ends
        yield (f"{FENCED} ```json\n",), writing.array(name="tool_name"), ("\n```",)

    def calls(self, begin: str) -> Reading:
        if begin in LAYOUT:
            self.forget()
        elif begin == ACTION or (yield from self.fence()):
            if (yield from self.array_of_calls()):
                yield from self.closing_tag("<|END_ACTION|>" if begin == ACTION else "```")
        else:
            self.give_back()

    def fence(self) -> Reading:
        found = yield from self.marker("```json")
        yield from self.blank()
        return found
