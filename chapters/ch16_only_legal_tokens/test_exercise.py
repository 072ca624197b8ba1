"""The tests of chapter 16's exercise. No model: automata small enough to try every text."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
from exercise import Automaton, mask_of

from minivllm.structured.automaton import DEAD, compile_tree
from minivllm.structured.base import Vocabulary
from minivllm.structured.dfa import CompiledDFA
from minivllm.structured.regex import parse

EOS, SPECIAL = 0, 1
VOCABULARY = [b"", b"", b"n", b"o", b"no", b"not", b"t", b"ot", "é".encode(), b"\xc3", b"\xa9", b"ne", b"nobody"]


def automaton(*texts: str) -> Automaton:
    """Of these texts and no others: the tree of their bytes."""
    steps: list[dict[int, int]] = [{}]
    accepting = set()
    for text in texts:
        state = 0
        for byte in text.encode():
            if byte not in steps[state]:
                steps[state][byte] = len(steps)
                steps.append({})
            state = steps[state][byte]
        accepting.add(state)
    return Automaton(steps, accepting)


THREE = automaton("no", "not", "né")


def legal_after(text: bytes) -> list[bytes | int]:
    """The tokens that THREE lets follow, as bytes; those without bytes by their ids."""
    state = 0
    for byte in text:
        state = THREE.steps[state][byte]
    (word,) = mask_of(THREE, state, VOCABULARY, EOS)
    return [data or i for i, data in enumerate(VOCABULARY) if word >> i & 1]


def test_a_token_is_followed_to_its_last_byte():
    assert legal_after(b"") == [b"n", b"no", b"not"]


def test_a_token_may_be_half_of_a_character():
    assert legal_after(b"n") == [b"o", b"ot", "é".encode(), b"\xc3"]
    assert legal_after(b"n\xc3") == [b"\xa9"]


def test_the_end_may_come_where_a_text_is_complete_and_special_tokens_never():
    assert legal_after(b"no") == [EOS, b"t"]
    assert legal_after(b"not") == [EOS]


def test_a_way_that_never_ends_is_no_way():
    a, b, x = b"abx"
    trap = Automaton([{a: 1}, {b: 2, x: 4}, {b: 3}, {}, {x: 4}], {3})
    tokens = [b"", b"", b"a", b"ab", b"ax", b"abb", b"x", b"xx", b"b"]
    assert mask_of(trap, 0, tokens, EOS) == [1 << 2 | 1 << 3 | 1 << 5]
    assert mask_of(trap, 1, tokens, EOS) == [1 << 8]
    assert mask_of(trap, 4, tokens, EOS) == [0]


def test_each_token_has_its_bit():
    tokens = [b"", *(bytes([i]) for i in range(1, 70))]
    some = Automaton([dict.fromkeys((5, 31, 32, 69), 1), {}], {1})
    assert mask_of(some, 0, tokens, EOS) == [1 << 5 | 1 << 31, 1, 1 << 5]
    assert mask_of(some, 1, tokens, EOS) == [1, 0, 0]


def completes(found: Automaton, state: int, text: tuple[int, ...]) -> bool:
    for byte in text:
        if byte not in found.steps[state]:
            return False
        state = found.steps[state][byte]
    return state in found.accepting


def test_random_automata_against_every_text():
    """From a state that can reach an end at all, some text no longer than there are states does."""
    rng, letters = random.Random(0), b"abc"
    tokens = [b"", b"", *(bytes(t) for n in (1, 2, 3) for t in product(letters, repeat=n))]
    for _ in range(30):
        num_states = rng.randint(2, 4)
        steps = [{byte: rng.randrange(num_states) for byte in letters if rng.random() < 0.5} for _ in range(num_states)]
        found = Automaton(steps, {rng.randrange(num_states)})
        endings = [text for n in range(num_states + 1) for text in product(letters, repeat=n)]
        for state in range(num_states):
            wanted = [
                i == EOS and completes(found, state, ())
                or bool(data) and any(completes(found, state, (*data, *ending)) for ending in endings)
                for i, data in enumerate(tokens)
            ]  # fmt: skip
            words = mask_of(found, state, tokens, EOS)
            assert [bool(words[i // 32] >> i % 32 & 1) for i in range(len(tokens))] == wanted, (found, state)


def test_it_is_the_engines_mask():
    tokens = [b"", b"", *(bytes([i]) for i in range(256)), b"-1", b"0.", b".5", b"12", b"1e", " €".encode()]
    dfa = compile_tree(parse(r"-?(0|[1-9]\d*)(\.\d+)?( €)?"))
    compiled = CompiledDFA(dfa, Vocabulary(tokens, (EOS,)))
    table = dfa.table[:, dfa.classes]  # [states, 256]
    steps = [{byte: int(to) for byte, to in enumerate(row) if to != DEAD} for row in table]
    same = Automaton(steps, set(np.flatnonzero(dfa.accepting).tolist()))
    for state in range(len(steps)):
        assert mask_of(same, state, tokens, EOS) == compiled.mask(state).view(np.uint32).tolist()
