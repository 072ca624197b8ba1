"""GrammarMask as a step of the sampler: the fast application against the slow one, and who wins over whom."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm.plan import Join
from minivllm.request import SamplingParams
from minivllm.sampling.grammar_mask import (
    GrammarMask,
    apply_masks_at_once,
    apply_masks_by_row,
    apply_masks_slowly,
    choose_apply,
    make_grammar_mask,
)
from minivllm.sampling.processors import DEFAULT_PROCESSORS
from minivllm.sampling.sampler import Sampler
from minivllm.structured.base import Vocabulary, pack
from minivllm.structured.compiler import GrammarCompiler
from minivllm.structured.dfa import DFABackend
from minivllm.structured.params import StructuredParams

# 0 and 1 end a sequence, 2 is special
VOCABULARY = Vocabulary([b"", b"", b"", *(bytes([c]) for c in b"abcdef"), b"ab", b"abc"], (0, 1))
A, B, C, AB, ABC = 3, 4, 5, 9, 10
V = len(VOCABULARY)
CPU = torch.device("cpu")


def compiler():
    return GrammarCompiler(lambda: VOCABULARY, [("dfa", DFABackend)])


def allowed_of(step: GrammarMask, row: int) -> list[int]:
    logits = step.apply(torch.zeros(1, V), np.array([row]))
    return torch.isfinite(logits[0]).nonzero()[:, 0].tolist()


def joined(regex: str, output=(), **params) -> GrammarMask:
    step = GrammarMask(compiler(), V, apply_masks_slowly)
    assert step.join(2, SamplingParams(structured=StructuredParams(regex=regex), **params), [7, 7, *output], 2)
    return step


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 100, 1000])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_masks_are_applied_as_one_by_one(vocab_size, density):
    rng = np.random.default_rng(vocab_size)
    num_words = -(-vocab_size // 32)
    for num_rows, rows in ((1, [0]), (5, [0, 2, 3]), (4, [3, 0, 1, 2])):
        logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
        densities = np.clip(density + rng.choice([0, 0, -0.4, 0.4], len(rows)), 0, 1)
        masks = np.array([pack(rng.random(32 * num_words) < d) for d in densities])  # bits beyond the vocabulary too
        wanted = apply_masks_slowly(logits.clone(), np.array(rows), masks)
        for apply in (choose_apply(CPU), apply_masks_by_row, apply_masks_at_once):
            assert torch.equal(apply(logits.clone(), np.array(rows), masks), wanted)
            assert torch.equal(apply(logits.clone(), np.empty(0, np.int64), np.empty((0, num_words), np.int32)), logits)


def test_a_row_without_a_grammar_is_left_alone():
    step = joined("ab")
    assert not step.join(1, SamplingParams(), [7], 1)
    logits = torch.randn(3, V)
    out = step.apply(logits.clone(), np.array([1, 2, 0]))
    assert torch.equal(out[[0, 2]], logits[[0, 2]])
    assert torch.isfinite(out[1]).nonzero()[:, 0].tolist() == [A, AB]


def test_a_grammar_follows_the_output_and_resumes_after_a_preemption():
    step = joined("a(bc)*")
    for token in (A, B, C):
        step.observe(2, token)
    resumed = joined("a(bc)*", output=[A, B, C])
    assert allowed_of(step, 2) == allowed_of(resumed, 2) == [0, 1, B]
    step.leave(2)
    assert not step.states


def test_stop_tokens_are_allowed_where_the_output_is_complete():
    step = joined("a+", stop_token_ids=[2])
    assert allowed_of(step, 2) == [A]
    step.observe(2, A)
    assert allowed_of(step, 2) == [0, 1, 2, A]
    step.observe(2, 2)  # it ends the request: nothing more is asked of this row


def test_min_tokens_holds_while_the_text_can_go_on_and_then_the_grammar_wins():
    step = joined("a{1,3}", min_tokens=5)
    for _ in range(3):
        assert allowed_of(step, 2) == [A]
        step.observe(2, A)
    assert allowed_of(step, 2) == [0, 1], "three of five, and nothing else may follow"
    step.observe(2, 0)
    assert allowed_of(step, 2) == [0, 1]
    assert allowed_of(joined("a{1,3}", output=[A], min_tokens=1), 2) == [0, 1, A]
    assert allowed_of(joined("a{1,3}", output=[A], min_tokens=1, stop_token_ids=[A]), 2) == [0, 1, A]
    assert allowed_of(joined("a{2,3}", min_tokens=2, stop_token_ids=[A]), 2) == [A], "no other way on"


def test_the_sampler_draws_only_what_every_step_admits():
    processors = (make_grammar_mask(compiler(), CPU), *DEFAULT_PROCESSORS)
    sampler = Sampler(V, 4, processors=processors)
    structured = StructuredParams(regex="[abc]{2}")
    for row, more in enumerate(({}, {"min_tokens": 9}, {"bad_words_token_ids": ((A,),)}, {"allowed_token_ids": [B]})):
        params = SamplingParams(temperature=1.0, seed=row, eos_token_ids=(0, 1), structured=structured, **more)
        sampler.join(row, Join("", [7], 1, params))
    rows = np.arange(4)
    got = []
    for position in range(1, 3):
        sampled = sampler(torch.randn(4, V), rows, np.full(4, position))
        assert not len(sampled.invalid)
        sampler.observe(rows, sampled.tokens)
        got.append(sampled.tokens.tolist())
    assert all(token in (A, B, C, AB) for step in got for token in step if token not in (0, 1))
    assert A not in (got[0][2], got[1][2]) and [got[0][3], got[1][3]] == [B, B]
    sampled = sampler(torch.randn(4, V), rows, np.full(4, 3))
    assert all(token in (0, 1) for token in sampled.tokens[:3]) and sampled.invalid.tolist() == [3], "B, and at its end"
    for row in range(4):
        sampler.leave(row)
    sampler.check()


class Costly:
    """A grammar of any text whose work moves a clock: by `costs` for each mask, `accepts` for each token."""

    def __init__(self):
        self.now, self.costs, self.accepts = 0.0, 0.0, 0.0

    vocabulary = VOCABULARY

    def compile(self, params):
        return self

    def start(self):
        return self

    def accept(self, token):
        self.now += self.accepts
        return True

    def fill_mask(self, out):
        self.now += self.costs
        out[:] = -1


def costly(*rows: int, output=()) -> tuple[GrammarMask, Costly]:
    grammar = Costly()
    step = GrammarMask(grammar, V, apply_masks_slowly, clock=lambda: grammar.now)
    for row in rows:
        step.join(row, SamplingParams(structured=StructuredParams(regex="a")), [7, *output], 1)
    return step, grammar


def test_a_mask_that_takes_too_long_ends_its_own_request_and_no_other():
    step, grammar = costly(0)
    other = joined("ab")
    grammar.costs = 0.099
    assert allowed_of(step, 0) and not step.failures
    grammar.accepts = 0.002
    step.observe(0, A)
    assert allowed_of(step, 0) == []
    assert step.failures[0] == "the grammar is too slow: a token took 101 ms, and 100 ms is the most"
    grammar.costs = 0.0
    assert allowed_of(step, 0) == [], "it has failed for good"
    before = grammar.now
    step.observe(0, A)
    assert grammar.now == before, "a step that was planned before is not followed"
    assert allowed_of(other, 2) == [A, AB] and not other.failures
    step.leave(0)
    assert not step.failures


def test_the_sequences_of_a_request_share_a_step_s_time_and_fast_masks_cost_nothing():
    step, grammar = costly(*range(10))
    grammar.costs = 0.05
    _, masks = step.fill(np.arange(10))
    assert [bool(mask.any()) for mask in masks] == [True] * 5 + [False] * 5
    assert "its sequences took 250 ms in one step" in step.failures[9]
    step, grammar = costly(*range(100))
    grammar.accepts = 0.09
    for row in range(100):
        step.observe(row, A)
    assert grammar.now < 0.3 and len(step.failures) == 97
    step, grammar = costly(*range(1000))
    grammar.costs = 0.002
    assert step.fill(np.arange(1000))[1].all() and not step.failures


def test_an_output_that_is_followed_again_has_a_limit_of_its_own():
    grammar = Costly()
    step = GrammarMask(grammar, V, apply_masks_slowly, clock=lambda: grammar.now)
    grammar.accepts = 0.09
    step.join(0, SamplingParams(structured=StructuredParams(regex="a")), [7, *[A] * 1000], 1)
    assert grammar.now < 1.2 and "took 1080 ms" in step.failures[0]


def test_a_request_ended_by_its_grammar_says_why_and_its_neighbours_go_on():
    sampler = Sampler(V, 2, processors=(lambda vocab_size, max_rows: costly_mask,))
    sampler.join(0, Join("", [7], 1, SamplingParams(temperature=0, structured=StructuredParams(regex="a"))))
    sampler.join(1, Join("", [7], 1, SamplingParams(temperature=0)))
    sampled = sampler(torch.zeros(2, V), np.array([0, 1]), np.array([1, 1]))
    assert sampled.invalid.tolist() == [0]
    assert sampler.failure(0).startswith("the grammar is too slow") and sampler.failure(1) is None


costly_mask = costly()[0]
costly_mask.compiler.costs = 0.2
