from __future__ import annotations

from collections.abc import Generator, Iterator

from minivllm.serve.tools.forms import Parts, Writing
from minivllm.serve.tools.json_reader import END, MAX_DEPTH, Malformed, Reading
from minivllm.serve.tools.parsers import openai_id
from minivllm.serve.tools.reader import Call
from minivllm.serve.tools.typed import TypedReader
from minivllm.serve.tools.values import from_python


class KeywordReader(TypedReader):
    """Arguments as Python writes them, (key=value, ...): literals. One in quotes becomes a number or what else its
    schema wants, since Llama 4's template shows all values in quotes. An argument is told when it is whole."""

    def keywords(self, call: Call) -> Reading:
        """Behind the opening bracket, up to and with the closing one."""
        yield from self.blank()
        while self.char != ")":
            yield from self.keyword(call)
            if self.char == ",":
                yield from self.symbol(",")
        self.close(call)
        yield from self.take()

    def keyword(self, call: Call) -> Reading:
        if not (key := (yield from self.word())):
            raise Malformed(self.char)
        yield from self.blank()
        yield from self.symbol("=")
        text = yield from self.literal()
        try:
            value = from_python(text, self.types(call, key))
        except ValueError:
            raise Malformed(text) from None
        self.key(call, key)
        self.made(call, value)

    def literal(self) -> Generator[None, None, str]:
        """What stands before a "," or ")" that is in no brackets and no quotes."""
        start, depth = len(self._taken), 0
        while depth or self.char not in (",", ")"):
            if self.char in ("'", '"'):
                yield from self.quoted()
                continue
            depth += (self.char in ("(", "[", "{")) - (self.char in (")", "]", "}"))
            if self.char == END or not 0 <= depth <= MAX_DEPTH:
                raise Malformed(self.char)
            yield from self.take()
        return self.taken(start)

    def quoted(self) -> Reading:
        quote = self.char
        yield from self.take()
        while self.char != quote:
            if self.char == "\\":
                yield from self.take()
            if self.char == END:
                raise Malformed("the end")
            yield from self.take()
        yield from self.take()


class PythonicParser(KeywordReader):
    """[name(key=value, ...), ...] as the whole message, or between <|python_start|> and <|python_end|>: Llama 4, and
    Llama 3.2 by a template that asks for it (vLLM 0.33, llama4_pythonic_tool_parser.py, pythonic_tool_parser.py)."""

    begins = ("<|python_start|>", "<|python_tag|>")
    markers = (*begins, "<|python_end|>")
    marks = (("[func_name1(",),)
    new_id = staticmethod(openai_id)

    @classmethod
    def forms(cls, writing: Writing) -> Iterator[Parts]:
        """With the function's name: another list may be an answer."""
        yield ((*cls.begins, *(f"[{name}(" for name in writing.names)),)

    def start(self) -> Reading:
        yield from self.blank()
        yield from self.calls("")

    def calls(self, begin: str) -> Reading:
        if (yield from self.array_of_calls()):
            yield from self.closing_tag("<|python_end|>")

    def element(self, call: Call) -> Reading:
        self.is_of(call, (yield from self.word()))
        yield from self.symbol("(")
        yield from self.keywords(call)
