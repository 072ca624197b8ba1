"""From a tree of characters to a table of states: Thompson's construction over UTF-8 bytes, then subsets.

Every part of an expression becomes a few states of a nondeterministic automaton with one entry and one exit (Thompson,
1968). A deterministic state is a set of them (Rabin and Scott, 1959). Bytes that no expression tells apart share one
column of the table. Both automata have a limit, since `{m,n}` copies its part: what is too large is refused when it is
compiled, not found out when a request runs.

An NFA state can always reach the end, since no character class is empty. So a set that is not empty is alive, and the
empty set, state 0, is the only dead one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minivllm.structured.regex import Alt, Chars, Node, Ranges, Repeat, Seq, intersect, negate

MAX_NFA_STATES = 100_000
MAX_DFA_STATES = 10_000
MAX_WORK = 3_000_000  # set elements looked at while determinising: about two seconds
DEAD, START = 0, 1


class TooLarge(ValueError):
    """The automaton would have more states than its limit."""


@dataclass(frozen=True, slots=True)
class DFA:
    table: np.ndarray  # [states, classes] int32: the next state. Row 0 is the dead state
    classes: np.ndarray  # [256] uint8: the column of a byte
    accepting: np.ndarray  # [states] bool

    def packed(self) -> bytes:
        return b"".join(
            array.tobytes() for array in (self.classes, np.int32(len(self.table)), self.accepting, self.table)
        )

    @classmethod
    def unpacked(cls, data: bytes) -> DFA:
        classes = np.frombuffer(data, np.uint8, 256)
        (num_states,) = np.frombuffer(data, np.int32, 1, 256)
        accepting = np.frombuffer(data, bool, num_states, 260)
        table = np.frombuffer(data, np.int32, -1, 260 + num_states) if num_states else np.empty(0, np.int32)
        return cls(table.reshape(num_states, -1), classes, accepting)

    def spelled(self, bytes_: np.ndarray) -> DFA:
        """What of it can be written with these bytes, [256] bool. START is dead if that is nothing."""
        columns = np.zeros(self.table.shape[1], bool)
        columns[self.classes[bytes_]] = True
        if columns.all():
            return self
        table = np.where(columns, self.table, DEAD)
        lives = self.accepting.copy()
        target, source = table.T.ravel(), np.tile(np.arange(len(table)), table.shape[1])
        order = np.argsort(target, kind="stable")
        begins, source = np.searchsorted(target[order], np.arange(len(table) + 1)), source[order]
        pending = np.flatnonzero(lives).tolist()
        for state in pending:  # grows while it is read
            before = np.unique(source[begins[state] : begins[state + 1]])
            new = before[~lives[before]]
            lives[new] = True
            pending += new.tolist()
        return DFA(np.where(lives[table], table, DEAD).astype(np.int32), self.classes, self.accepting & lives)

    def next(self, state: int, data: bytes) -> int:
        for byte in data:
            state = self.table[state, self.classes[byte]]
        return int(state)


def compile_tree(node: Node) -> DFA:
    """Raises TooLarge."""
    nfa = NFA()
    end = nfa.state()
    begin = nfa.add(node, end)
    return _determinise(nfa, begin, end)


class NFA:
    """Built from its end to its beginning: add(node, target) gives the entry of `node` followed by `target`."""

    def __init__(self) -> None:
        self.silent: list[tuple[int, ...]] = []  # states reached without a byte
        self.steps: list[tuple[int, int, int]] = []  # (first byte, last byte, target); target -1: none

    def state(self, silent: tuple[int, ...] = (), step: tuple[int, int, int] = (0, 0, -1)) -> int:
        if len(self.silent) >= MAX_NFA_STATES:
            raise TooLarge(f"it needs over {MAX_NFA_STATES:,} states (its counted repetitions are written out)")
        self.silent.append(silent)
        self.steps.append(step)
        return len(self.silent) - 1

    def add(self, node: Node, target: int) -> int:
        if isinstance(node, Chars):
            return self._chars(node.ranges, target)
        if isinstance(node, Seq):
            for item in reversed(node.items):
                target = self.add(item, target)
            return target
        if isinstance(node, Alt):
            return self.state(tuple(self.add(item, target) for item in node.items))
        return self._repeat(node, target)

    def _repeat(self, node: Repeat, target: int) -> int:
        if node.high is None:
            loop = self.state()
            self.silent[loop] = (self.add(node.item, loop), target)
            target = loop
        else:
            end = target
            for _ in range(node.high - node.low):
                target = self.state((self.add(node.item, target), end))
        for _ in range(node.low):
            entry = self.add(node.item, target)
            if entry == target:  # it reads nothing, and so would a billion of it
                break
            target = entry
        return target

    def _chars(self, ranges: Ranges, target: int) -> int:
        rows = [row for low, high in intersect(ranges, negate(())) for row in utf8_ranges(low, high)]
        tails: dict[tuple, int] = {(): target}  # characters that end alike share the states of their ends
        entries = [self._row(row, tails) for row in rows]
        return entries[0] if len(entries) == 1 else self.state(tuple(dict.fromkeys(entries)))

    def _row(self, row: tuple[tuple[int, int], ...], tails: dict[tuple, int]) -> int:
        if row not in tails:
            tails[row] = self.state(step=(*row[0], self._row(row[1:], tails)))
        return tails[row]


def utf8_ranges(low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    """The UTF-8 of the code points low..high, as sequences of byte ranges (R. Cox, 2007; RE2's construction)."""
    for limit in (0x7F, 0x7FF, 0xFFFF):  # the last code point of each length
        if low <= limit < high:
            return utf8_ranges(low, limit) + utf8_ranges(limit + 1, high)
    if high <= 0x7F:
        return [((low, high),)]
    for shift in (6, 12, 18):  # split until all but the first differing byte run over their whole range
        mask = (1 << shift) - 1
        if low >> shift != high >> shift:
            if low & mask:
                return utf8_ranges(low, low | mask) + utf8_ranges((low | mask) + 1, high)
            if high & mask != mask:
                return utf8_ranges(low, (high & ~mask) - 1) + utf8_ranges(high & ~mask, high)
    return [tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))]


def _determinise(nfa: NFA, begin: int, end: int) -> DFA:
    classes, num_classes = _byte_classes(nfa)
    reach = _Closures(nfa)
    first = reach(begin)
    numbers = {frozenset(): DEAD, first: START}
    table: list[list[int]] = [[DEAD] * num_classes]
    pending = [first]
    for states in pending:  # grows while it is read
        targets: list[set[int]] = [set() for _ in range(num_classes)]
        for state in states:
            low, high, target = nfa.steps[state]
            if target >= 0:
                reached = reach(target)
                columns = range(classes[low], classes[high] + 1)
                reach.work += len(reached) * len(columns)
                for column in columns:
                    targets[column] |= reached
        row = []
        for found in targets:
            key = frozenset(found)
            if key not in numbers:
                if len(numbers) >= MAX_DFA_STATES:
                    raise TooLarge(f"it needs over {MAX_DFA_STATES:,} states of a deterministic automaton")
                numbers[key] = len(numbers)
                pending.append(key)
            row.append(numbers[key])
        table.append(row)
    accepting = np.array([end in states for states in numbers], bool)
    return DFA(np.array(table, np.int32), classes, accepting)


def _byte_classes(nfa: NFA) -> tuple[np.ndarray, int]:
    """[256] uint8, rising with the byte: a class ends where some step begins or ends."""
    starts = np.zeros(257, bool)
    for low, high, target in nfa.steps:
        if target >= 0:
            starts[low] = starts[high + 1] = True
    starts[0] = False
    classes = np.cumsum(starts[:256])
    return classes.astype(np.uint8), int(classes[-1]) + 1


class _Closures:
    """What is reached from a state without a byte, of the states that matter: those with a step, and the end."""

    def __init__(self, nfa: NFA):
        self.nfa = nfa
        self.found: dict[int, frozenset[int]] = {}
        self.work = 0

    def __call__(self, state: int) -> frozenset[int]:
        if self.work > MAX_WORK:
            raise TooLarge("its automaton takes too long to make deterministic")
        if state not in self.found:
            silent, seen, pending = self.nfa.silent, {state}, [state]
            while pending:
                for other in silent[pending.pop()]:
                    if other not in seen:
                        seen.add(other)
                        pending.append(other)
            self.work += len(seen)
            self.found[state] = frozenset(s for s in seen if not silent[s])
        return self.found[state]
