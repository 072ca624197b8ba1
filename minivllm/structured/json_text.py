"""JSON text as regular expressions: strings by pattern or length, numbers, integers between two bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from minivllm.structured.params import MAX_WHITESPACE
from minivllm.structured.regex import (
    EMPTY,
    Alt,
    Chars,
    Node,
    Repeat,
    Seq,
    alt,
    chars,
    intersect,
    literal,
    negate,
    optional,
    parse_search,
    seq,
)

_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_PLAIN = negate(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))  # what stands for itself in a JSON string
_HEX = chars("0123456789abcdefABCDEF")
_UNICODE = alt(  # \uXXXX, but no half of a surrogate pair: it would count as a character of its own
    seq(chars("0123456789abcefABCEF"), Repeat(_HEX, 3, 3)),
    seq(chars("dD"), chars("01234567"), Repeat(_HEX, 2, 2)),
)
STRING_CHAR = alt(Chars(_PLAIN), seq(chars("\\"), alt(chars('"\\/bfnrt'), seq(chars("u"), _UNICODE))))
QUOTE = chars('"')
DIGIT = chars("0123456789")
DIGITS = Repeat(DIGIT, 1, None)
INTEGER = seq(optional(chars("-")), alt(chars("0"), seq(chars("123456789"), Repeat(DIGIT, 0, None))))
NUMBER = seq(
    INTEGER,
    optional(seq(chars("."), DIGITS)),
    optional(seq(chars("eE"), optional(chars("+-")), Repeat(DIGIT, 1, 2))),  # two digits: no overflow to infinity
)
SPACE = Repeat(chars(" \t\r\n"), 0, MAX_WHITESPACE)


def string_tree(schema: dict[str, Any]) -> Node:
    """What may stand between the quotes of a string with `pattern`, or with minLength and maxLength, or with neither.

    Raises RegexError. One that has both has to be refused before.
    """
    if "pattern" in schema:
        return in_json(parse_search(schema["pattern"]))
    high = schema.get("maxLength")
    return Repeat(STRING_CHAR, int(schema.get("minLength", 0)), None if high is None else int(high))


def escaped(code: int) -> Node:
    """A character as JSON writes it."""
    char = chr(code)
    if char in _SHORT:
        return literal("\\" + _SHORT[char])
    return literal(f"\\u{code:04x}") if code < 0x20 else chars(char)


def in_json(node: Node) -> Node:
    """The same texts, inside the quotes of a JSON string."""
    if isinstance(node, Chars):
        special = [code for code in (*range(0x20), 0x22, 0x5C) if intersect(node.ranges, ((code, code),))]
        plain = intersect(node.ranges, _PLAIN)
        return alt(*([Chars(plain)] if plain else []), *map(escaped, special))
    if isinstance(node, Repeat):
        return Repeat(in_json(node.item), node.low, node.high)
    return type(node)(tuple(in_json(item) for item in node.items))


def plain(node: Node) -> Node | None:
    """The texts of these that need no escape in JSON; None if there are none."""
    if isinstance(node, Chars):
        ranges = intersect(node.ranges, _PLAIN)
        return Chars(ranges) if ranges else None
    if isinstance(node, Repeat):
        item = plain(node.item)
        return Repeat(item, node.low, node.high) if item is not None else EMPTY if not node.low else None
    items = [plain(item) for item in node.items]
    if isinstance(node, Alt):
        return alt(*found) if (found := [item for item in items if item is not None]) else None
    return None if None in items else Seq(tuple(items))


def other_names(names: Iterable[str]) -> Node:
    """The texts that need no escape in JSON and are none of these."""
    return _others(sorted(name for name in names if all(intersect(_PLAIN, ((ord(c), ord(c)),)) for c in name)), 0)


def _others(names: Sequence[str], num_come: int) -> Node:
    """names: sorted, all with the same first characters, so many of them. What may follow these."""
    ends = bool(names) and len(names[0]) == num_come
    ways: list[Node] = [] if ends else [EMPTY]
    following = [(char, list(group)) for char, group in groupby(names[ends:], key=lambda name: name[num_come])]
    rest = intersect(_PLAIN, negate(tuple((ord(char), ord(char)) for char, _ in following)))
    ways.append(seq(Chars(rest), Repeat(Chars(_PLAIN), 0, None)))
    return alt(*ways, *(seq(chars(char), _others(group, num_come + 1)) for char, group in following))


def integers(low: int | None, high: int | None) -> Node:
    """The integers low..high in decimal; None: no bound. Negative ones are the mirror image of positive ones."""
    parts: list[Node] = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts.append(seq(chars("-"), _naturals(least, None if low is None else -low)))
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    return alt(*parts)


def _naturals(low: int, high: int | None) -> Node:
    """0 <= low..high, no leading zeros."""
    if high is None:
        longer = seq(chars("123456789"), Repeat(DIGIT, len(str(low)), None))  # more digits than `low` has
        return alt(_naturals(low, 10 ** len(str(low)) - 1), longer)
    parts = []
    while low <= high:  # one number of digits at a time
        end = min(high, 10 ** len(str(low)) - 1)
        parts.append(_same_length(str(low), str(end)))
        low = end + 1
    return alt(*parts)


def _same_length(low: str, high: str) -> Node:
    """The digit strings between two of the same length."""
    if not low:
        return EMPTY
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    zeros, nines = "0" * rest, "9" * rest
    if first == last:
        return seq(chars(low[0]), _same_length(low[1:], high[1:]))
    parts = []
    if low[1:] != zeros:
        parts.append(seq(chars(low[0]), _same_length(low[1:], nines)))
        first += 1
    stop = last if high[1:] != nines else last + 1
    if first < stop:
        parts.append(seq(chars((48 + first, 47 + stop)), Repeat(DIGIT, rest, rest)))
    if stop == last:
        parts.append(seq(chars(high[0]), _same_length(zeros, high[1:])))
    return alt(*parts)
