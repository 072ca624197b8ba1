"""Rule: what comes before the ending is free, the ending comes within the budget, and behind it the grammar holds."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from grammar_driver import allowed, choose, compiler, vocabulary

from minivllm import LLM, SamplingParams
from minivllm.structured.params import Prelude, StructuredParams

SILENT = [i for i, token in enumerate(vocabulary().tokens) if not token and i not in vocabulary().eos_ids]
THINK, OPEN, CHANNEL, MESSAGE = SILENT[:4]
EOS = vocabulary().eos_ids[0]
ENDINGS = (("</think>",),)
HARMONY = ((CHANNEL, "final", MESSAGE),)
CASES = [
    StructuredParams(choice=["yes", "no"], prelude=Prelude(endings=ENDINGS)),
    StructuredParams(choice=["yes", "no"], prelude=Prelude(endings=ENDINGS, max_tokens=4)),
    StructuredParams(regex="[a-c]{2,5}", prelude=Prelude(endings=((THINK,), ("ll",)), max_tokens=3)),
    StructuredParams(regex="[a-c]{2,5}", prelude=Prelude(openings=("<think>",), endings=ENDINGS, max_tokens=2)),
    StructuredParams(regex="[a-c]{2,5}", prelude=Prelude(openings=(OPEN,), endings=((THINK,),))),
    StructuredParams(choice=["yes"], escapes=("<a>",), prelude=Prelude(endings=(("he",),))),
    StructuredParams(choice=["yes"], prelude=Prelude(endings=HARMONY, farewell=(THINK, "hello"), max_tokens=3)),
    StructuredParams(choice=["yes"], prelude=Prelude(endings=HARMONY, leavings=((CHANNEL, "comment"),))),
    StructuredParams(prelude=Prelude(endings=ENDINGS, max_tokens=3)),
]


def grammar_of(params, backend="dfa"):
    return compiler(backend).compile(params).start()


def spelled(text: str) -> list[int]:
    """Byte by byte."""
    return [vocabulary().tokens.index(bytes([byte])) for byte in text.encode()]


def take(grammar, tokens):
    for token in tokens:
        assert allowed(grammar)[token] and grammar.accept(token), vocabulary().tokens[token]


def only(grammar) -> list[bytes]:
    return sorted(vocabulary().tokens[token] for token in np.flatnonzero(allowed(grammar)))


@pytest.mark.parametrize("backend", ["xgrammar", "dfa"])
@pytest.mark.parametrize("params", CASES, ids=str)
def test_a_mask_holds_exactly_the_tokens_that_are_taken(backend, params):
    for seed in range(4):
        rng, grammar = random.Random(seed), grammar_of(params, backend)
        for _ in range(10):
            mask, taken = allowed(grammar), []
            for token in range(len(mask)):
                taken.append(grammar.accept(token))
                if taken[-1]:
                    grammar.rollback(1)
            assert (np.array(taken) == mask).all()
            ending = [i for i in spelled("</think>") + [THINK, CHANNEL, MESSAGE] if mask[i]]
            token = rng.choice(ending) if ending and rng.random() < 0.5 else choose(mask, rng)
            assert grammar.accept(token)
            if grammar.is_terminated:
                break


@pytest.mark.parametrize("params", CASES, ids=str)
def test_rolling_back_leads_to_where_it_was(params):
    for seed in range(12):
        rng, grammar, masks = random.Random(seed), grammar_of(params), []
        for i in range(12):
            masks.append(allowed(grammar))
            special = [token for token in (THINK, OPEN, CHANNEL) if masks[-1][token]]
            assert grammar.accept(rng.choice(special) if special and i < 2 else choose(masks[-1], rng))
            if grammar.is_terminated:
                masks.append(allowed(grammar))
                assert grammar.accept(EOS)
                break
        step = rng.choice([1, 2, 3])
        while masks:
            back = min(step, len(masks))
            grammar.rollback(back)
            assert (allowed(grammar) == masks[-back]).all()
            del masks[-back:]


def test_the_grammar_begins_behind_the_ending_and_the_sequence_cannot_end_before():
    grammar = grammar_of(CASES[0])
    take(grammar, [*spelled("yes </thin"), *spelled("</thin")])
    assert not allowed(grammar)[EOS] and not grammar.accept(EOS) and allowed(grammar)[THINK]
    take(grammar, spelled("k>"))
    assert set(only(grammar)) <= {b"y", b"ye", b"yes", b"n", b"no"} and not grammar.is_terminated
    take(grammar, spelled("no"))
    take(grammar, [EOS])
    assert grammar.is_terminated


def test_an_ending_ends_where_a_token_does_if_the_answer_is_held_to_something():
    """Else the answer would begin inside the token. The vocabulary has "hell", so "he" may not come in that way."""
    longer = [i for i, token in enumerate(vocabulary().tokens) if token.startswith(b"he") and len(token) > 2]
    grammar = grammar_of(CASES[5])
    assert longer and not allowed(grammar)[longer].any()
    free = grammar_of(StructuredParams(prelude=Prelude(endings=(("he",),), max_tokens=3)))
    assert allowed(free)[longer].all()


def test_when_the_budget_is_spent_the_ending_alone_may_come():
    grammar = grammar_of(CASES[1])
    take(grammar, spelled("abc"))
    assert allowed(grammar).sum() > 100
    take(grammar, spelled("<"))  # the fourth; it counts as the ending's first character
    assert only(grammar) == [b"/"]
    take(grammar, spelled("/think>yes"))
    assert only(grammar) == [b""]


def test_a_budget_of_nothing_ends_at_once():
    grammar = grammar_of(StructuredParams(prelude=Prelude(endings=((THINK,),), max_tokens=0)))
    assert list(np.flatnonzero(allowed(grammar))) == [THINK]
    take(grammar, [THINK])
    assert allowed(grammar).all()


def test_behind_a_budget_alone_everything_is_free():
    grammar = grammar_of(CASES[8])
    assert allowed(grammar)[EOS]  # an answer may end in the middle of its thinking
    take(grammar, spelled("ab</think>anything"))
    take(grammar, [EOS])
    assert grammar.is_terminated and list(np.flatnonzero(allowed(grammar))) == list(vocabulary().eos_ids)


def test_thinking_that_must_be_opened_is_there_only_if_it_is():
    grammar = grammar_of(CASES[3])
    take(grammar, spelled("abc"))
    assert b"<" not in only(grammar)
    grammar = grammar_of(CASES[3])
    take(grammar, spelled("<think>"))
    assert allowed(grammar).sum() > 100
    take(grammar, spelled("zz</think>abc"))
    assert not grammar.accept(spelled("z")[0])


def test_an_escape_comes_behind_the_ending():
    grammar = grammar_of(CASES[5])
    take(grammar, [*spelled("<a>"), *spelled("he")])
    assert b"<" in only(grammar)
    take(grammar, spelled("<a>"))
    assert allowed(grammar).all()


def test_a_header_that_has_begun_is_completed():
    """A special token that an ending lacks is forced: `final <|constrain|>json` would be behind the grammar's back."""
    grammar = grammar_of(CASES[7])
    take(grammar, [CHANNEL, *spelled("final")])
    assert list(np.flatnonzero(allowed(grammar))) == [MESSAGE]
    take(grammar, [MESSAGE, *spelled("yes")])


def test_as_much_of_the_farewell_is_forced_as_has_not_come():
    grammar = grammar_of(CASES[6])
    take(grammar, [*spelled("ab"), THINK])
    assert only(grammar) == [b"h", b"he", b"hell", b"hello"]
    grammar = grammar_of(CASES[6])
    take(grammar, [*spelled("a"), CHANNEL, *spelled("f")])  # an ending that has begun goes on
    assert b"i" in only(grammar) and b"h" not in only(grammar)
    before = Prelude(endings=HARMONY, farewell=(THINK, "hello"), before=(THINK, "hello"), max_tokens=0)
    grammar = grammar_of(StructuredParams(choice=["yes"], prelude=before))
    assert list(np.flatnonzero(allowed(grammar))) == [CHANNEL]


def test_what_leaves_is_free_for_good():
    grammar = grammar_of(CASES[7])
    take(grammar, [CHANNEL, *spelled("comment")])
    assert allowed(grammar).all()
    take(grammar, [CHANNEL, *spelled("final"), MESSAGE, *spelled("zzz"), EOS])
    assert grammar.is_terminated


def test_what_follows_a_prelude_is_compiled_once():
    one, other = (StructuredParams(regex="[xy]{3}", prelude=Prelude(endings=ENDINGS, max_tokens=n)) for n in (1, 2))
    assert one.key != other.key
    assert compiler("dfa").compile(one).inner is compiler("dfa").compile(other).inner


@pytest.mark.parametrize("setting", [{}, {"debug.preempt_every": 3}, {"spec_decode.method": "ngram"}], ids=str)
def test_an_engine_thinks_within_its_budget_and_then_answers(setting):
    overrides = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 60, "executor.num_threads": 1}
    prelude = Prelude(endings=ENDINGS, max_tokens=6)
    held = StructuredParams(regex="[a-c]{2,4}", prelude=prelude)
    with LLM(overrides={**overrides, "debug.check": True, **setting}) as llm:
        params = [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=60, structured=structured)
            for structured in (held, StructuredParams(prelude=prelude))
            for seed in range(3)
        ]
        texts = [output.outputs[0].text for output in llm.generate(["The sea"] * 6, params, use_tqdm=False)]
    assert all(re.fullmatch(r"(?s).*?</think>[a-c]{2,4}", text) for text in texts[:3]), texts
    assert all("</think>" in text for text in texts[3:]), texts
