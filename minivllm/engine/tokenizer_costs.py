"""What a tokenizer.json may cost: how much longer it makes a text, and how long its regular expressions may look for an
end. Both are the file's own choice, and run in a library of Rust inside the server's process, where they cannot be
limited: a few letters that six `Replace` steps make a thousand of each take all memory, and `(x+x+)+y` on 24 letters
some seconds. So they are read before any text is.

The expressions are Oniguruma's, which goes back over what a quantifier took, and gives up, by a panic, after ten
million times at one place. It never comes to that where nothing is repeated that has itself several lengths, where on
one way through the expression one endless quantifier at most must give back for what comes behind it, and where other
choices are few: so are the expressions of all known families. Possessive quantifiers and atomic groups give nothing
back.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

MOST_GROWTH = 64  # characters that a character may become; NFKC makes 18 of one
MOST_CHARS = 4096  # of an expression
MOST_CHOICES = 1024  # ways through an expression, but for endless quantifiers
ENDLESS = 2**31
FEW = 4  # times: what is repeated more often counts as endless
MOST_DEPTH = 50  # of groups in groups
COMPATIBLE = 18  # U+FDFA, by NFKC and NFKD
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(?:(,)(\d*))?\})([+?]?)")
_ESCAPE = re.compile(r"\\(?:[pP]\{[^}]*\}|x\{[0-9a-fA-F]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|k<[^>]*>|.)", re.DOTALL)
_OPENING = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|<\w+>|[imadlsu-]+:)|(?!\?))")
_SWITCH = re.compile(r"\(\?[imadlsu-]+\)")
REFERS = "123456789kg"


class CostError(ValueError):
    """The message completes "tokenizer.json ..."."""


def check(parts: Iterable[Mapping[str, Any]]) -> None:
    """parts: the steps of a normalizer, a pre-tokenizer and a decoder (their "type" and fields). Raises CostError."""
    growth = 1
    for part in parts:
        growth *= grows(part)
        if growth > MOST_GROWTH:
            raise CostError(f"makes one character more than {MOST_GROWTH} (a step of type {part['type']})")
        pattern = part.get("pattern")
        if isinstance(pattern, Mapping) and isinstance(text := pattern.get("Regex"), str):
            check_pattern(text)


def grows(part: Mapping[str, Any]) -> int:
    """How many characters it makes of one, at most."""
    match part.get("type"):
        case "Replace":
            content, pattern = len(part.get("content") or ""), part.get("pattern") or {}
            literal = len(pattern.get("String") or "")
            return max(1, -(-content // literal)) if literal else 1 + content  # an expression may match nothing
        case "Prepend":
            return 1 + len(part.get("prepend") or "")
        case "NFKC" | "NFKD":
            return COMPATIBLE
        case "Precompiled":
            return longest_replacement(part.get("precompiled_charsmap") or "")
    return 1


def longest_replacement(charsmap: str) -> int:
    """Of SentencePiece's rules: the size of a trie, the trie, and texts that end in NUL, in base64."""
    try:
        data = base64.b64decode(charsmap)
    except (ValueError, binascii.Error):
        raise CostError("has a precompiled_charsmap that is no base64") from None
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max([1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))])


# ---------------------------------------------------------------------------------------------------- the expressions


class Way(NamedTuple):
    """A part of an expression: whether it may match nothing, whether its matches may have several lengths, and how many
    of its quantifiers must give back for what stands behind them; `open`: how many more must if something does behind
    the part. choices: ways through it."""

    is_empty: bool = False
    varies: bool = False
    gives: int = 0
    open: int = 0
    choices: int = 1


ONE = Way()


def check_pattern(text: str) -> None:
    """Raises CostError."""
    if len(text) > MOST_CHARS:
        raise CostError(f"has a regular expression of {len(text):,} characters, more than {MOST_CHARS:,}")
    way = _Reader(text).read()
    if way.gives > 1 or way.choices > MOST_CHOICES:
        raise CostError(f"has a regular expression that tries too many ways to match a text: {text[:100]}")


def _times(found: re.Match[str]) -> tuple[int, int]:
    """Of a quantifier: at least, and at most."""
    sign, low, comma, high = found[0][0], found[1], found[2], found[3]
    if sign != "{":
        return int(sign == "+"), 1 if sign == "?" else ENDLESS
    least = int(low or 0)
    return least, int(high) if high else ENDLESS if comma else least


class _Reader:
    """By recursive descent. `at`: where it is."""

    def __init__(self, text: str):
        self.text, self.at, self.depth = text, 0, 0

    def read(self) -> Way:
        way = self.alternatives()
        while self.at < len(self.text):  # a bracket that opens nowhere
            self.at += 1
            way = self.alternatives()
        return way

    def alternatives(self) -> Way:
        ways = [self.sequence()]
        while self.text.startswith("|", self.at):
            self.at += 1
            ways.append(self.sequence())
        if len(ways) == 1:
            return ways[0]
        gives, opens = (max(getattr(way, name) for way in ways) for name in ("gives", "open"))
        return Way(any(way.is_empty for way in ways), True, gives, opens, sum(way.choices for way in ways))

    def sequence(self) -> Way:
        whole = Way(is_empty=True)
        for part in self.parts():
            if part.is_empty:  # it may be passed over: nothing has to be given back for it
                gives, opens = whole.gives + part.gives, whole.open + part.open
            else:
                gives, opens = whole.gives + whole.open + part.gives, part.open
            is_empty, varies = whole.is_empty and part.is_empty, whole.varies or part.varies
            whole = Way(is_empty, varies, gives, opens, min(whole.choices * part.choices, MOST_CHOICES + 1))
        return whole

    def parts(self) -> Iterator[Way]:
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            if switch := _SWITCH.match(self.text, self.at):
                self.at = switch.end()
                continue
            yield self.quantified(self.atom())

    def quantified(self, way: Way) -> Way:
        while found := _QUANTIFIER.match(self.text, self.at):
            self.at = found.end()
            least, most = _times(found)
            # x{1,3}+ is (x{1,3})+ here, possessive elsewhere: any number of times may be divided in many ways.
            is_twice = found[0].startswith("{") and found[0].endswith("+")
            if way.varies and (most > 1 or is_twice):
                what = f"repeats what has several lengths, which it may divide in too many ways: {self.text[:100]}"
                raise CostError(f"has a regular expression that {what}")
            is_endless = is_twice or most - least > FEW
            if found[0].endswith("+") and found[0][0] in "?*+" and len(found[0]) > 1:
                way = Way(way.is_empty or not least, False, way.gives)
            elif most > least or is_twice:
                choices = way.choices * (1 if is_endless else most - least + 1)
                way = Way(way.is_empty or not least, True, way.gives, way.open + is_endless + is_twice, choices)
        return way

    def atom(self) -> Way:
        char = self.text[self.at]
        if char == "\\":
            if (found := _ESCAPE.match(self.text, self.at)) is None or found[0][1] in REFERS:
                raise CostError(f"has a regular expression that refers to its own groups: {self.text[:100]}")
            self.at = found.end()
            return ONE
        if char == "[":
            self.character_class()
            return ONE
        if char == "(":
            return self.group()
        self.at += 1
        return ONE

    def group(self) -> Way:
        opening = _OPENING.match(self.text, self.at)
        if opening is None:
            raise CostError(f"has a regular expression with a group of a rare kind: {self.text[:100]}")
        self.at, self.depth = opening.end(), self.depth + 1
        if self.depth > MOST_DEPTH:
            raise CostError(f"has a regular expression with groups in groups, more than {MOST_DEPTH} deep")
        inside = self.alternatives()
        self.at, self.depth = self.at + 1, self.depth - 1
        if opening[0] in ("(?=", "(?!", "(?<=", "(?<!"):  # it may fail, so what is before it gives back
            return Way(False, False, inside.gives, 0, inside.choices)
        return Way(inside.is_empty, inside.varies, inside.gives, 0) if opening[0] == "(?>" else inside

    def character_class(self) -> None:
        """Classes may stand in it, and begin with a bracket that closes nothing."""
        depth, self.at = 1, self.at + 1
        while depth and self.at < len(self.text):
            if self.text.startswith("\\", self.at):
                self.at += 1
            elif self.text[self.at] == "[":
                depth += 1
            elif self.text[self.at] == "]" and not self.text.endswith(("[", "[^"), 0, self.at):
                depth -= 1
            self.at += 1
