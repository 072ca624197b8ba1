"""JSON that is still being written, read one character at a time, and strictly (RFC 8259)."""

from __future__ import annotations

import json
from collections.abc import Generator

END = ""  # in the place of a character: the text is over
BLANK = " \t\r\n"
ESCAPES = '"\\/bfnrt'
HEX = "0123456789abcdefABCDEF"
MAX_DEPTH = 100  # of brackets in brackets; json.loads gives up later
Reading = Generator[None, None, None]


class Malformed(Exception):
    """What is read is no JSON, or not that of a call. The offending character has not been taken."""


class JsonReader:
    """`yield` waits for the next character, which is then in `char`. What has been taken is kept."""

    def __init__(self) -> None:
        self.char = END
        self._taken: list[str] = []

    def take(self) -> Reading:
        self._taken.append(self.char)
        yield

    def taken(self, start: int = 0) -> str:
        return "".join(self._taken[start:])

    def blank(self) -> Reading:
        while self.char != END and self.char in BLANK:
            yield from self.take()

    def symbol(self, symbol: str) -> Reading:
        """`symbol`, and the spaces after it."""
        if self.char != symbol:
            raise Malformed(self.char)
        yield from self.take()
        yield from self.blank()

    def value(self, depth: int) -> Reading:
        if depth > MAX_DEPTH:
            raise Malformed("too deep")
        if self.char == "{":
            yield from self.items("}", depth)
        elif self.char == "[":
            yield from self.items("]", depth)
        elif self.char == '"':
            yield from self.string()
        else:
            yield from self.scalar()

    def items(self, closing: str, depth: int) -> Reading:
        yield from self.symbol(self.char)
        if self.char != closing:
            while True:
                if closing == "}":
                    yield from self.string()
                    yield from self.blank()
                    yield from self.symbol(":")
                yield from self.value(depth + 1)
                yield from self.blank()
                if self.char != ",":
                    break
                yield from self.symbol(",")
        if self.char != closing:
            raise Malformed(self.char)
        yield from self.take()

    def string(self) -> Generator[None, None, str]:
        start = len(self._taken)
        if self.char != '"':
            raise Malformed(self.char)
        yield from self.take()
        while self.char != '"':
            if self.char < " ":  # a control character, or the end
                raise Malformed(self.char)
            yield from self.escape() if self.char == "\\" else self.take()
        yield from self.take()
        return json.loads(self.taken(start))

    def escape(self) -> Reading:
        yield from self.take()
        num_hex = 4 if self.char == "u" else 0
        if not num_hex and (self.char == END or self.char not in ESCAPES):
            raise Malformed(self.char)
        yield from self.take()
        for _ in range(num_hex):
            if self.char == END or self.char not in HEX:
                raise Malformed(self.char)
            yield from self.take()

    def scalar(self) -> Reading:
        """A number, true, false or null: it ends where something else begins."""
        start = len(self._taken)
        while self.char != END and (self.char.isalnum() or self.char in "+-."):
            yield from self.take()
        try:
            json.loads(self.taken(start), parse_constant=not_json)
        except ValueError:
            raise Malformed(self.taken(start)) from None


def not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def is_object(text: str) -> bool:
    try:
        text.encode()  # half a surrogate pair, from an escape, could not be sent
        return isinstance(json.loads(text, parse_constant=not_json), dict)
    except (ValueError, RecursionError):
        return False
