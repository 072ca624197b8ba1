from __future__ import annotations

from collections.abc import Generator, Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import random_name
from minivllm.serve.tools.reader import Call, TaggedReader


class MistralParser(TaggedReader):
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or (tokenizer v11 and later) [TOOL_CALLS]name{...},
    with [ARGS] after the name in v13. Mistral's templates want ids of nine letters and digits."""

    begins = ("[TOOL_CALLS]",)
    markers = (*begins, "[ARGS]")
    marks = (("[TOOL_CALLS]",),)

    @staticmethod
    def new_id() -> str:
        return random_name(9)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        yield ("[TOOL_CALLS] ", "[TOOL_CALLS]"), writing.array(parameters="arguments")
        for name, arguments in writing.arguments():
            yield (f"[TOOL_CALLS]{name}", f"[TOOL_CALLS]{name}[ARGS]"), arguments, *writing.again("")

    def calls(self, begin: str) -> Reading:
        if self.char == "[":
            yield from self.array_of_calls()
        else:
            yield from self.call(self.name_and_arguments(call := Call()), call)

    def name_and_arguments(self, call: Call) -> Generator[None, None, None]:
        self.is_of(call, (yield from self.word()))
        if self.char == "[":
            yield from self.expect("[ARGS]")
        yield from self.arguments(call)
