"""The regular expressions of files beside weights, matched in time that grows with the name and no faster: an adapter's
target modules, the modules that a quantised checkpoint leaves as they are.

Such a file comes from anywhere, an adapter's between two steps, and Python's `re` tries all ways to read a name:
`((([a-z._0-9])+)+)+!` never ends. Here the states of an automaton are followed together (Thompson, 1968), each set of
them and each byte once, since the names of a model's modules have much in common. Expressions are what
minivllm/structured/regex.py reads: what look-around and back-references say can be a list of names instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from minivllm.structured import regex
from minivllm.structured.automaton import NFA, TooLarge

MAX_CHARS = 4096  # of a pattern
MAX_STATES = 2000
MAX_NAMES = 4096  # names or patterns in a configuration's list
MAX_STATES_OF_A_LIST = 20_000
_NAME = re.compile(r"[\w.-]*")  # a pattern without quantifiers, which `re` cannot lose itself in
_WILDCARDS = re.compile(r"\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)


class PatternError(ValueError):
    """Not a pattern that can be matched here. The message completes "the pattern ..."."""


class Pattern:
    def __init__(self, text: str, may_follow_a_dot: bool = False, may_follow_anything: bool = False):
        """may_follow_a_dot: what stands before a dot need not match, unless the pattern begins with ^: PEFT's rule for
        rank_pattern and alpha_pattern. may_follow_anything: likewise, wherever it ends (re.search). Raises
        PatternError."""
        if len(text) > MAX_CHARS:
            raise PatternError(f"has {len(text):,} characters, more than {MAX_CHARS:,}")
        self.size = 0  # states
        self._automata: list[tuple[_Automaton, bool]] = []  # and whether a match must reach the name's end
        self._name = None
        if _NAME.fullmatch(text) and not may_follow_anything:
            self._name = re.compile(rf"(?:.*\.)?{text}" if may_follow_a_dot else text)
            return
        front = regex.Repeat(regex.ANY, 0, None)
        front = regex.optional(regex.seq(front, regex.chars("."))) if may_follow_a_dot else front
        branches = _branches(text)
        for must_end in (False, True):
            nodes = [(begins, node) for begins, node, ends in branches if ends == must_end]
            if nodes:
                is_free = may_follow_a_dot or may_follow_anything
                free = [regex.seq(front, node) if is_free and not begins else node for begins, node in nodes]
                self._automata.append((_Automaton(regex.simplify(regex.alt(*free))), must_end))
        self.size = sum(automaton.size for automaton, _ in self._automata)
        if self.size > MAX_STATES:
            raise PatternError(f"is too large: it needs over {MAX_STATES:,} states")

    def matches(self, name: str) -> bool:
        """The whole name (re.fullmatch)."""
        if self._name is not None:
            return self._name.fullmatch(name) is not None
        return any(len(name) in automaton.ends(name) for automaton, _ in self._automata)

    def begins(self, name: str) -> bool:
        """Its beginning (re.match)."""
        return any(True for _ in self.ends(name))

    def begins_parts(self, name: str) -> bool:
        """Its beginning, up to the end of a part of the name: before or behind a dot, or its end."""
        return any(at == len(name) or "." in name[max(at - 1, 0) : at + 1] for at in self.ends(name))

    def ends(self, name: str) -> Iterator[int]:
        """Where a match that begins with the name ends."""
        if self._name is not None:
            if match := self._name.match(name):
                yield match.end()
            return
        for automaton, must_end in self._automata:
            yield from (at for at in automaton.ends(name) if at == len(name) or not must_end)


def wildcards(text: str) -> str:
    """The pattern of a name with *, ? and [..] (fnmatch)."""

    def of(piece: str) -> str:
        if piece in ("*", "?"):
            return ".*" if piece == "*" else "."
        if len(piece) == 1:
            return re.escape(piece)
        inside = piece[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("]", r"\]").replace("^", r"\^")
        return f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"

    return "".join(of(match[0]) for match in _WILDCARDS.finditer(text))


def patterns(texts: Iterable[str], may_follow_anything: bool = False) -> list[Pattern]:
    """Of a list in a file. Raises PatternError, whose message names the pattern."""
    found, size = [], 0
    for text in texts:
        try:
            found.append(Pattern(text, may_follow_anything=may_follow_anything))
        except PatternError as error:
            raise PatternError(f'the pattern "{text[:100]}" {error}') from None
        if (size := size + found[-1].size) > MAX_STATES_OF_A_LIST or len(found) > MAX_NAMES:
            raise PatternError(f"the patterns of a list are too large: over {MAX_STATES_OF_A_LIST:,} states together")
    return found


def _branches(text: str) -> list[tuple[bool, regex.Node, bool]]:
    try:
        return regex.Parser(text).parse_branches()
    except regex.RegexError as error:
        raise PatternError(f"is no regular expression that is supported: {error}") from None


class _Automaton:
    def __init__(self, tree: regex.Node):
        self._nfa = NFA()
        self._end = self._nfa.state()
        try:
            begin = self._nfa.add(tree, self._end)
        except TooLarge as error:
            raise PatternError(f"is too large: {error}") from None
        self.size = len(self._nfa.steps)
        if self.size > MAX_STATES:
            raise PatternError(f"is too large: it needs over {MAX_STATES:,} states")
        self._begin = self._reached({begin})
        self._known: dict[tuple[frozenset[int], int], frozenset[int]] = {}
        self.work = 0  # states looked at

    def ends(self, name: str) -> Iterator[int]:
        """After how many characters of the name what was read matches."""
        states = self._begin
        if self._end in states:
            yield 0
        for at, char in enumerate(name, 1):
            for byte in char.encode(errors="surrogatepass"):
                key = states, byte
                if key not in self._known:
                    self._known[key] = self._next(states, byte)
                states = self._known[key]
            if not states:
                return
            if self._end in states:
                yield at

    def _next(self, states: frozenset[int], byte: int) -> frozenset[int]:
        self.work += len(states)
        steps = [self._nfa.steps[state] for state in states]
        return self._reached({target for low, high, target in steps if target >= 0 and low <= byte <= high})

    def _reached(self, states: set[int]) -> frozenset[int]:
        """And all that is reached from them without a byte."""
        pending = list(states)
        while pending:
            for other in self._nfa.silent[pending.pop()]:
                if other not in states:
                    states.add(other)
                    pending.append(other)
        return frozenset(states)
