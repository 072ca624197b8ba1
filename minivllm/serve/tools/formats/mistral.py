from __future__ import annotations

import re
from collections.abc import Generator, Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import Reading
from minivllm.serve.tools.parsers import random_name
from minivllm.serve.tools.reader import Call, Functions, TaggedReader

CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"


class MistralParser(TaggedReader):
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] up to version 7 of Mistral's tokenizers; then one tag for
    each call, [TOOL_CALLS]name[CALL_ID]id[ARGS]{...} in version 11, without an id since version 13, and
    [TOOL_CALLS]name{...} where a template has no [ARGS] (mistral-common 1.13, tokens/tokenizers/instruct.py).

    Mistral's templates want ids of nine letters and digits. Such an id, which the model reads again with the result, is
    the one that a client gets; but one that an answer has had already is not.
    """

    begins = ("[TOOL_CALLS]",)
    markers = (*begins, CALL_ID, ARGS)
    marks = (("[TOOL_CALLS]",),)

    def __init__(self, functions: Functions):
        super().__init__(functions)
        self.ids: set[str] = set()

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
        yield from self.blank()
        if self.char == "[":
            if (yield from self.expect(CALL_ID, ARGS)) == CALL_ID:
                yield from self.blank()
                self.identify(call, (yield from self.word()))
                yield from self.blank()
                yield from self.expect(ARGS)
            yield from self.blank()
        yield from self.arguments(call)

    def identify(self, call: Call, id: str) -> None:
        if re.fullmatch("[A-Za-z0-9]{9}", id) and id not in self.ids:
            call.id = id
            self.ids.add(id)
