"""Chapter 16: which tokens are legal? Fill in `mask_of`, then run the tests:

python -m minivllm chapter 16 --exercise
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Automaton:
    steps: list[dict[int, int]]  # of each state: {byte: the state that it leads to}; any other byte is an error
    accepting: set[int]  # the states in which a text is complete


def mask_of(automaton: Automaton, state: int, vocabulary: list[bytes], eos: int) -> list[int]:
    """The tokens that may come next, one bit each, in words of 32: bit i of word w is token 32 * w + i.

    A token may come if, once all of its bytes are there, the text can still be completed. The token
    `eos` ends a text: it may come where the text is complete. It has no bytes, and neither have the
    other special tokens, which may never come.
    """
    raise NotImplementedError("yours to write")
