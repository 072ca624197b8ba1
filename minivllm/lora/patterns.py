"""The regular expressions of an adapter's configuration, matched in time that grows with the name and no faster.

An adapter is loaded between two steps, by whoever may name it, and Python's `re` tries all ways to read a name:
`((([a-z._0-9])+)+)+!` never ends. Here the states of an automaton are followed together (Thompson, 1968), each set of
them and each byte once, since the names of a model's modules have much in common. Expressions are what
minivllm/structured/regex.py reads: what look-around and back-references say can be a list of names instead.
"""

from __future__ import annotations

import re

from minivllm.structured import regex
from minivllm.structured.automaton import NFA, TooLarge

MAX_CHARS = 4096  # of a pattern
MAX_STATES = 2000
MAX_NAMES = 4096  # names or patterns in a configuration's list
_NAME = re.compile(r"[\w.-]*")  # a pattern without quantifiers, which `re` cannot lose itself in


class PatternError(ValueError):
    """Not a pattern that can be matched here. The message completes "the pattern ..."."""


class Pattern:
    def __init__(self, text: str, may_follow_a_dot: bool = False):
        """may_follow_a_dot: what stands before a dot need not match, unless the pattern begins with ^: PEFT's rule for
        rank_pattern and alpha_pattern. Raises PatternError."""
        if len(text) > MAX_CHARS:
            raise PatternError(f"has {len(text):,} characters, more than {MAX_CHARS:,}")
        self._is_name = _NAME.fullmatch(text) is not None
        if self._is_name:
            self._matches = re.compile(rf"(?:.*\.)?{text}" if may_follow_a_dot else text).fullmatch
        else:
            self._matches = _Automaton(_tree(text, may_follow_a_dot)).matches

    def matches(self, name: str) -> bool:
        return bool(self._matches(name))


def _tree(text: str, may_follow_a_dot: bool) -> regex.Node:
    front = regex.optional(regex.seq(regex.Repeat(regex.ANY, 0, None), regex.chars(".")))
    try:
        branches = regex.Parser(text).parse_branches()
    except regex.RegexError as error:
        raise PatternError(f"is no regular expression that is supported: {error}") from None
    free = [regex.seq(front, node) if may_follow_a_dot and not begins else node for begins, node, _ in branches]
    return regex.simplify(regex.alt(*free))


class _Automaton:
    def __init__(self, tree: regex.Node):
        self._nfa = NFA()
        self._end = self._nfa.state()
        try:
            begin = self._nfa.add(tree, self._end)
        except TooLarge as error:
            raise PatternError(f"is too large: {error}") from None
        if len(self._nfa.steps) > MAX_STATES:
            raise PatternError(f"is too large: it needs over {MAX_STATES:,} states")
        self._begin = self._reached({begin})
        self._known: dict[tuple[frozenset[int], int], frozenset[int]] = {}
        self.work = 0  # states looked at

    def matches(self, name: str) -> bool:
        states = self._begin
        for byte in name.encode():
            key = states, byte
            if key not in self._known:
                self._known[key] = self._next(states, byte)
            states = self._known[key]
        return self._end in states

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
