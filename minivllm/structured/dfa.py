"""The in-house backend: a regular language as a table, a mask as a walk down the tree of the vocabulary.

Regular expressions, choices, and JSON Schemas without recursion (json_regex.py) become one deterministic automaton.
The mask of a state is found by walking the automaton down the token tree (trie.py), once: it is kept. This is how
Outlines did it (Willard and Louf, 2023) before grammars with recursion were masked by pushdown automata (XGrammar,
2024; llguidance). Recursion is what it cannot do, and says so.
"""

from __future__ import annotations

import threading
from typing import ClassVar

import numpy as np

from minivllm.structured import regex
from minivllm.structured.automaton import DEAD, DFA, START, TooLarge, compile_tree
from minivllm.structured.base import Unsupported, Vocabulary, pack, read_regex
from minivllm.structured.json_regex import json_tree
from minivllm.structured.params import StructuredParams

MAX_MASKS = 1024  # kept for a grammar, 6 KB each with a vocabulary of 49,152


class DFABackend:
    requires: ClassVar[str | None] = None

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary

    def translate(self, params: StructuredParams) -> bytes:
        try:
            return compile_tree(self._tree(params)).packed()
        except TooLarge as e:
            raise Unsupported(f"{params.field}: {params.kind} is too large: {e}", params.field) from None

    def build(self, params: StructuredParams, source: bytes) -> CompiledDFA:
        assert self.vocabulary.trie  # made here, beside the step loop, and not by the first mask
        dfa = DFA.unpacked(source).spelled(self.vocabulary.spelled)
        if not dfa.accepting[START] and not dfa.table[START].any():
            raise Unsupported(
                f"{params.field}: {params.kind}: the model has no tokens for any of its texts", params.field
            )
        return CompiledDFA(dfa, self.vocabulary)

    def _tree(self, params: StructuredParams) -> regex.Node:
        if params.kind == "regex":
            return read_regex(params)
        if params.kind == "choice":
            return regex.alt(*map(regex.literal, params.choice))
        if params.kind == "json":
            return json_tree(params)
        why = {"json_object": "JSON nests without bound", "grammar": "grammars may nest without bound"}[params.kind]
        raise Unsupported(f"{params.field}: {params.kind} is no regular language: {why}", params.field)


class CompiledDFA:
    def __init__(self, dfa: DFA, vocabulary: Vocabulary):
        self.dfa = dfa
        self.num_bytes = dfa.table.nbytes
        self.vocabulary = vocabulary
        self._masks: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def start(self) -> DFAGrammar:
        return DFAGrammar(self)

    def mask(self, state: int) -> np.ndarray:
        """[num_words] int32, not to be written to."""
        mask = self._masks.get(state)
        if mask is None:
            mask = self._find_mask(state)
            with self._lock:
                while len(self._masks) >= MAX_MASKS:
                    del self._masks[next(iter(self._masks))]
                self._masks[state] = mask
        return mask

    def _find_mask(self, state: int) -> np.ndarray:
        vocabulary = self.vocabulary
        after = vocabulary.trie.walk(self.dfa.table, self.dfa.classes, state)
        bits = np.zeros(32 * vocabulary.num_words, bool)
        bits[vocabulary.trie.token_ids] = after != DEAD
        bits[list(vocabulary.eos_ids)] = self.dfa.accepting[state]
        return pack(bits)


class DFAGrammar:
    def __init__(self, compiled: CompiledDFA):
        self._compiled = compiled
        self._states = [START]  # before each token accepted so far, and now
        self._ended = 0  # how many of the last tokens were end-of-sequence tokens

    @property
    def is_terminated(self) -> bool:
        return self._ended > 0

    def accept(self, token: int) -> bool:
        compiled, state = self._compiled, self._states[-1]
        if token in compiled.vocabulary.eos_ids:
            if not compiled.dfa.accepting[state]:
                return False
            self._ended += 1
        else:
            data = compiled.vocabulary.tokens[token]
            state = compiled.dfa.next(state, data)
            if self._ended or not data or state == DEAD:
                return False
        self._states.append(state)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens < len(self._states), f"{num_tokens} tokens, and {len(self._states) - 1} were accepted"
        del self._states[len(self._states) - num_tokens :]
        self._ended = max(0, self._ended - num_tokens)

    def fill_mask(self, out: np.ndarray) -> None:
        compiled = self._compiled
        out[:] = compiled.vocabulary.eos_mask if self._ended else compiled.mask(self._states[-1])
