"""Rule: an output is a text of the grammar, or begins with an escape and goes on as it likes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from grammar_driver import BACKENDS, allowed, choose, compiler, vocabulary

from minivllm.structured.params import StructuredParams

SPECIAL = next(i for i, token in enumerate(vocabulary().tokens) if not token and i not in vocabulary().eos_ids)
CASES = [
    StructuredParams(choice=["yes", "<a>", "no"], escapes=("<tool_call>",)),
    StructuredParams(choice=["<tool>", "<tool_cal", "<tool_call>x"], escapes=("<tool_call>", "[", SPECIAL)),
    StructuredParams(regex="[a-c]{2,5}", escapes=(SPECIAL,)),
    StructuredParams(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, escapes=("[TOOL_CALLS]",)),
]


def text_of(tokens: list[int]) -> bytes:
    return b"".join(vocabulary().tokens[token] for token in tokens)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("params", CASES, ids=lambda p: f"{p.kind} or {p.escapes}")
def test_a_mask_holds_exactly_the_tokens_that_are_taken(name, params):
    compiled = compiler(name).compile(params)
    for seed in range(8):
        rng, grammar, tokens = random.Random(seed), compiled.start(), []
        for _ in range(12):
            mask = allowed(grammar)
            taken = np.zeros(len(mask), bool)
            for token in range(len(mask)):
                if grammar.accept(token):
                    taken[token] = True
                    grammar.rollback(1)
            assert (taken == mask).all(), text_of(tokens)
            if mask.all():  # it has left: nothing is forbidden any more
                texts = tuple(escape.encode() for escape in params.escapes if isinstance(escape, str))
                assert tokens[0] in params.escapes or text_of(tokens).startswith(texts)
                break
            tokens.append(choose(mask, rng))
            assert grammar.accept(tokens[-1])
            if grammar.is_terminated:
                break


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("params", CASES, ids=lambda p: f"{p.kind} or {p.escapes}")
def test_an_escape_may_come_byte_by_byte(name, params):
    for escape in params.escapes:
        grammar = compiler(name).compile(params).start()
        tokens = [escape] if escape == SPECIAL else [vocabulary().tokens.index(bytes([b])) for b in escape.encode()]
        for token in tokens:
            assert not allowed(grammar).all() and grammar.accept(token)
        assert allowed(grammar).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_what_has_left_is_free_until_it_ends(name):
    grammar = compiler(name).compile(CASES[2]).start()
    assert grammar.accept(SPECIAL) and allowed(grammar).all() and not grammar.is_terminated
    for token in (5, 200, SPECIAL):
        assert grammar.accept(token) and allowed(grammar).all()
    (end, *_) = vocabulary().eos_ids
    assert grammar.accept(end) and grammar.is_terminated
    assert set(np.flatnonzero(allowed(grammar))) == set(vocabulary().eos_ids) and not grammar.accept(5)
    grammar.rollback(5)
    assert not grammar.is_terminated and grammar.accept(vocabulary().tokens.index(b"a")) and not grammar.accept(SPECIAL)


@pytest.mark.parametrize("name", BACKENDS)
def test_rolling_back_leads_to_where_it_was(name):
    for params in CASES:
        for seed in range(6):
            rng, grammar, masks = random.Random(seed), compiler(name).compile(params).start(), []
            for _ in range(8):
                masks.append(allowed(grammar))
                assert grammar.accept(choose(masks[-1], rng))
                if grammar.is_terminated:
                    break
            for back in range(1, len(masks) + 1):
                grammar.rollback(1)
                assert (allowed(grammar) == masks[-back]).all(), (params.value, seed, back)


def test_escapes_are_part_of_what_is_compiled_once():
    plain = StructuredParams(choice=["yes", "no"])
    escaped = StructuredParams(choice=["yes", "no"], escapes=("<",))
    assert plain.key != escaped.key
    assert not allowed(compiler("dfa").compile(plain).start())[vocabulary().tokens.index(b"<")]
    assert allowed(compiler("dfa").compile(escaped).start())[vocabulary().tokens.index(b"<")]
