"""The solution of chapter 16's exercise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Automaton:
    steps: list[dict[int, int]]  # of each state: {byte: the state that it leads to}; any other byte is an error
    accepting: set[int]  # the states in which a text is complete


def mask_of(automaton: Automaton, state: int, vocabulary: list[bytes], eos: int) -> list[int]:
    """The tokens that may come next, one bit each, in words of 32: bit i of word w is token 32 * w + i."""
    useful = set(automaton.accepting)  # and then, round by round, all that lead there
    while more := {i for i, step in enumerate(automaton.steps) if useful & set(step.values())} - useful:
        useful |= more
    words = [0] * -(-len(vocabulary) // 32)
    for token, data in enumerate(vocabulary):
        after: int | None = state
        for byte in data:
            after = None if after is None else automaton.steps[after].get(byte)
        legal = state in automaton.accepting if token == eos else bool(data) and after in useful
        if legal:
            words[token // 32] |= 1 << token % 32
    return words
