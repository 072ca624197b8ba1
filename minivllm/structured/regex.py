"""Regular expressions as a small tree, from their usual notation.

The notation is what Python, JavaScript and Rust share: literals, `.`, classes, groups, `|`, `* + ? {m,n}` and the
escapes `\\d \\w \\s` (ASCII, as in JavaScript). An expression means the whole output, so `^` at its beginning and `$`
at its end say nothing new. Look-around, back-references and word boundaries are no regular expressions here.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CODE = 0x10FFFF
MAX_DEPTH = 50  # groups inside groups
MAX_COUNT_DIGITS = 9  # of a bound
Ranges = tuple[tuple[int, int], ...]  # of code points, sorted, apart from each other, both ends included


class RegexError(ValueError):
    """Not an expression that this module reads. The message names the place."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of these."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    low: int
    high: int | None  # None: any number


Node = Chars | Seq | Alt | Repeat
EMPTY = Seq(())


def chars(*spans: str | tuple[int, int]) -> Chars:
    """Single characters ("abc"), and ranges of code points."""
    return Chars(_union([(ord(c), ord(c)) for span in spans if isinstance(span, str) for c in span] + [
        span for span in spans if not isinstance(span, str)
    ]))  # fmt: skip


def literal(text: str) -> Node:
    return Seq(tuple(chars(c) for c in text))


def seq(*items: Node) -> Node:
    return items[0] if len(items) == 1 else Seq(items)


def alt(*items: Node) -> Node:
    return items[0] if len(items) == 1 else Alt(items)


def optional(item: Node) -> Node:
    return Repeat(item, 0, 1)


def negate(ranges: Ranges) -> Ranges:
    """Every other code point. Surrogates are no characters."""
    found, begin = [], 0
    for low, high in _union([*ranges, (0xD800, 0xDFFF)]):
        if low > begin:
            found.append((begin, low - 1))
        begin = high + 1
    return (*found, (begin, MAX_CODE)) if begin <= MAX_CODE else tuple(found)


def intersect(a: Ranges, b: Ranges) -> Ranges:
    found = [(max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b]
    return tuple((low, high) for low, high in found if low <= high)


def _union(ranges: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


DIGIT = chars("0123456789")
WORD = chars((48, 57), (65, 90), (97, 122), "_")
SPACE = chars(" \t\n\r\f\v")
ANY = Chars(negate(((10, 10),)))  # `.` stops at line ends
_CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_REFUSED = {"b": "word boundaries", "B": "word boundaries", "p": "Unicode classes", "P": "Unicode classes"}
_REFUSED |= dict.fromkeys("AzZG", "anchors inside the expression") | dict.fromkeys("123456789k", "back-references")


def parse(pattern: str) -> Node:
    """The tree of an expression that must match the whole. Raises RegexError."""
    return Parser(pattern).parse()


def parse_search(pattern: str) -> Node:
    """The tree of texts in which the expression is found anywhere, as JSON Schema's `pattern` means it.

    `^` and `$` count where they begin or end an alternative of the outermost level.
    """
    anything = Repeat(Chars(negate(())), 0, None)
    branches = []
    parser = Parser(pattern, anchors=True)
    for begins, node, ends in parser.parse_branches():
        branches.append(seq(*(() if begins else (anything,)), node, *(() if ends else (anything,))))
    return alt(*branches)


def nested_bounds(node: Node) -> int:
    """The largest product of bounds inside bounds; 1 if there are none."""
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Repeat):
        return nested_bounds(node.item) * max(node.low, node.high or 0, 1)
    return max(map(nested_bounds, node.items), default=1)


def simplify(node: Node) -> Node:
    """The same texts with fewer ways to read each: `((a*)*)*`, `(a+)+`, `(a?b*)*` and `a*a*`, of which a hundred make a
    parser that follows all ways at once slow, become `a*`, `a+`, `[ab]*` and `a*`."""
    if isinstance(node, Chars):
        return node
    if isinstance(node, Repeat):
        return _repeated(simplify(node.item), node.low, node.high)
    items = [simplify(item) for item in node.items]
    return _one_of(items) if isinstance(node, Alt) else _in_a_row(items)


def is_nullable(node: Node) -> bool:
    """Whether it matches the empty text."""
    if isinstance(node, Chars):
        return False
    if isinstance(node, Repeat):
        return node.low == 0 or is_nullable(node.item)
    return (any if isinstance(node, Alt) else all)(map(is_nullable, node.items))


def _repeated(item: Node, low: int, high: int | None) -> Node:
    """item: simplified, here and below."""
    if high == 0 or item == EMPTY:
        return EMPTY
    if high is None and is_nullable(item):
        low = 0
    if high is None and low <= 1:
        item = _one_of([piece for part in _parts(item, low) for piece in _once(part)])
        if item == EMPTY:
            return EMPTY
    if isinstance(item, Repeat) and (bounds := _multiplied((item.low, item.high), (low, high))) is not None:
        return _repeated(item.item, *bounds) if bounds != (low, high) else Repeat(item.item, low, high)
    return item if (low, high) == (1, 1) else Repeat(item, low, high)


def _parts(item: Node, low: int) -> tuple[Node, ...]:
    """What comes in any order and number where `item` does: alternatives, and items of a row that may all be absent."""
    if isinstance(item, Alt):
        return tuple(part for one in item.items for part in _parts(one, low))
    if isinstance(item, Seq) and not low and is_nullable(item):
        return tuple(part for one in item.items for part in _parts(one, low))
    return (item,)


def _once(part: Node) -> tuple[Node, ...]:
    """The same where any number of it may come."""
    if isinstance(part, Repeat) and part.low <= 1:
        return (part.item,)
    return () if part == EMPTY else (part,)


def _multiplied(inner: tuple[int, int | None], outer: tuple[int, int | None]) -> tuple[int, int | None] | None:
    """The bounds of one repetition that is as good as two; None if numbers between them are left out."""
    (a, b), (c, d) = inner, outer
    closes_up = c == d or (b is None or (c + 1) * a <= c * b + 1 if c else a <= 1)  # c times item meets c + 1 times
    return (a * c, None if b is None or d is None else b * d) if closes_up else None


def _in_a_row(items: list[Node]) -> Node:
    found: list[Node] = []
    for item in items:
        for part in item.items if isinstance(item, Seq) else (item,):
            merged = _merged(found[-1], part) if found else None
            if merged is not None:
                found[-1] = merged
            else:
                found.append(part)
    return seq(*found)


def _merged(one: Node, other: Node) -> Node | None:
    """Two neighbours as one repetition, where either has a choice of how often."""
    repeats = [node if isinstance(node, Repeat) else Repeat(node, 1, 1) for node in (one, other)]
    if repeats[0].item != repeats[1].item or all(node.low == node.high for node in repeats):
        return None
    highs = [node.high for node in repeats]
    return Repeat(repeats[0].item, sum(node.low for node in repeats), None if None in highs else sum(highs))


def _one_of(items: list[Node]) -> Node:
    parts = [part for item in items for part in (item.items if isinstance(item, Alt) else (item,))]
    singles = [span for part in parts if isinstance(part, Chars) for span in part.ranges]
    others = dict.fromkeys(part for part in parts if not isinstance(part, Chars))  # in their order, each once
    found = ([Chars(_union(singles))] if singles else []) + list(others)
    return alt(*found) if found else EMPTY


def size(node: Node) -> int:
    """Characters of the expression once its counted repetitions are written out."""
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Repeat):
        return size(node.item) * max(node.low, node.high or 0, 1)
    return sum(map(size, node.items))


def render(node: Node) -> str:
    """The expression again, simplified, in a notation so plain (characters, classes of code points, groups, `|`,
    bounds) that every backend reads it alike. What `.` and `\\d` mean is decided here and nowhere else."""
    return _written(simplify(node))


def _written(node: Node) -> str:
    if isinstance(node, Chars):
        if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
            return _shown(node.ranges[0][0])
        spans = (_shown(a) if a == b else f"{_shown(a)}-{_shown(b)}" for a, b in intersect(node.ranges, negate(())))
        return f"[{''.join(spans)}]"
    if isinstance(node, Seq):
        return "".join(map(_written, node.items))
    if isinstance(node, Alt):
        texts = list(dict.fromkeys(map(_written, node.items)))
        group = f"(?:{'|'.join(text for text in texts if text)})" if any(texts) else ""
        return f"(?:{group})?" if group and "" in texts else group
    inner = _written(node.item)
    if not inner or node.high == 0:
        return ""
    high = "" if node.high is None else node.high
    bounds = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((node.low, node.high))
    return f"(?:{inner}){f'{{{node.low},{high}}}' if bounds is None else bounds}"


def _shown(code: int) -> str:
    char = chr(code)
    return char if char.isalnum() or code > 0xFF else f"\\u{code:04x}"  # some readers take \\x for any number of digits


class Parser:
    """Recursive descent: alternatives of sequences of repeated atoms."""

    def __init__(self, pattern: str, anchors: bool = False):
        self.pattern = pattern
        self.at = 0
        self.depth = 0

    def parse(self) -> Node:
        return alt(*(node for _, node, _ in self.parse_branches()))

    def parse_branches(self) -> list[tuple[bool, Node, bool]]:
        """(begins with ^, what it holds, ends with $) of each alternative of the outermost level."""
        branches = []
        while True:
            begins = self._eat("^")
            node = self._sequence()
            ends = self._eat("$")
            branches.append((begins, node, ends))
            if not self._eat("|"):
                break
        if self.at < len(self.pattern):
            raise self._error("an unmatched )" if self._peek() == ")" else "an anchor inside the expression")
        return branches

    def _alternatives(self) -> Node:
        items = [self._sequence()]
        while self._eat("|"):
            items.append(self._sequence())
        return alt(*items)

    def _sequence(self) -> Node:
        items = []
        while self._peek() not in ("", "|", ")", "$"):
            items.append(self._repeated())
        return seq(*items) if items else EMPTY

    def _repeated(self) -> Node:
        node = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return node
        self._eat("?")  # lazy: which match is found first, not which texts match
        if self._peek() in tuple("*+?{"):
            raise self._error("a quantifier of a quantifier")
        return Repeat(node, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for symbol, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._eat(symbol):
                return bounds
        if self._peek() != "{":
            return None
        end = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at + 1 : end].partition(",")
        if end < 0 or not low.isdecimal() or not (high.isdecimal() or not high):
            raise self._error("a { that begins no {m}, {m,} or {m,n} (write \\{ for the character)")
        if any(len(bound.lstrip("0")) > MAX_COUNT_DIGITS for bound in (low, high)):
            raise self._error(f"a bound of over {MAX_COUNT_DIGITS} digits")
        bounds = int(low), int(high) if high else (None if comma else int(low))
        if bounds[1] is not None and bounds[1] < bounds[0]:
            raise self._error("bounds in the wrong order")
        self.at = end + 1
        return bounds

    def _atom(self) -> Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == ".":
            return ANY
        if char == "\\":
            return self._escape()
        if char in "*+?{":
            raise self._error("nothing to repeat", -1)
        if char == "^":
            raise self._error("an anchor inside the expression", -1)
        return chars(char)

    def _group(self) -> Node:
        if self._eat("?"):
            if self._eat("P<") or (self._peek() == "<" and self.pattern[self.at + 1 : self.at + 2] not in ("=", "!")):
                end = self.pattern.find(">", self.at)
                if end < 0:
                    raise self._error("a group's name that does not end")
                self.at = end + 1
            elif not self._eat(":"):
                raise self._error("look-around or a flag", -1)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(f"groups nested over {MAX_DEPTH} deep")
        node = self._alternatives()
        self.depth -= 1
        if not self._eat(")"):
            raise self._error("a ( without its )" if not self._peek() else "an anchor inside a group")
        return node

    def _class(self) -> Node:
        negated = self._eat("^")
        found: list[tuple[int, int]] = []
        first = True
        while first or self._peek() != "]":
            first = False
            low = self._class_item()
            if isinstance(low, Chars):
                found += low.ranges
            elif self._peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self._next()
                high = self._class_item()
                if isinstance(high, Chars) or high < low:
                    raise self._error("a range in the wrong order")
                found.append((low, high))
            else:
                found.append((low, low))
        self._next()
        ranges = negate(_union(found)) if negated else _union(found)
        if not ranges:
            raise self._error("a class without characters")
        return Chars(ranges)

    def _class_item(self) -> int | Chars:
        char = self._next("a [ without its ]")
        if char != "\\":
            return ord(char)
        if self._peek() == "b":
            self._next()
            return 8  # backspace, inside a class
        node = self._escape()
        single = len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]
        return node.ranges[0][0] if single else node

    def _escape(self) -> Chars:
        char = self._next("a \\ at the end")
        if char in _CLASSES:
            return _CLASSES[char]
        if char.lower() in _CLASSES:
            return Chars(negate(_CLASSES[char.lower()].ranges))
        if char in _CONTROLS:
            return chars(_CONTROLS[char])
        if char in "xuU":
            return self._code({"x": 2, "u": 4, "U": 8}[char])
        if char in _REFUSED:
            raise self._error(_REFUSED[char], -2)
        if char.isalnum():
            raise self._error(f"an unknown escape \\{char}", -2)
        return chars(char)

    def _code(self, length: int) -> Chars:
        digits = self.pattern[self.at : self.at + length]
        try:
            code = int(digits, 16)
        except ValueError:
            code = -1
        if len(digits) < length or not 0 <= code <= MAX_CODE or 0xD800 <= code <= 0xDFFF:
            raise self._error("a code that is no character")
        self.at += length
        return Chars(((code, code),))

    def _peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _next(self, missing: str = "an end too early") -> str:
        if self.at >= len(self.pattern):
            raise self._error(missing)
        self.at += 1
        return self.pattern[self.at - 1]

    def _eat(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def _error(self, what: str, offset: int = 0) -> RegexError:
        return RegexError(f"{what} at position {max(self.at + offset, 0)}")
