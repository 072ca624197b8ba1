"""Rule: where a grammar leads nowhere, the request ends with an error, and never with an end that is none."""

from __future__ import annotations

import json

import numpy as np
import pytest
from grammar_driver import BACKENDS, allowed, compiler, vocabulary

from minivllm.errors import BadRequest
from minivllm.plan import LEADS_NOWHERE, Join
from minivllm.request import SamplingParams
from minivllm.sampling.grammar_mask import GrammarMask, apply_masks_slowly
from minivllm.sampling.sampler import Sampler
from minivllm.structured import llguidance_backend
from minivllm.structured.automaton import START, compile_tree
from minivllm.structured.base import Vocabulary
from minivllm.structured.compiler import GrammarCompiler
from minivllm.structured.params import StructuredParams
from minivllm.structured.regex import parse

torch = pytest.importorskip("torch")
WITHOUT_C = Vocabulary([b"", b"a", b"b", b"ab", b"", b"d"], (0, 4))
LEVEL = {
    "type": "object",
    "properties": {"level": {"type": "integer", "multipleOf": 5}},
    "required": ["level"],
    "patternProperties": {"^level$": {"minimum": 0, "type": "integer"}},
    "additionalProperties": False,
}


def without_c(backend: str) -> GrammarCompiler:
    return GrammarCompiler(lambda: WITHOUT_C, [(backend, BACKENDS[backend])])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern, tokens", [("ac|b", [1]), ("abc|d", [3]), ("a(bc|c)|d", [1, 2]), ("a?c|b", [])])
def test_no_mask_allows_the_end_where_the_vocabulary_cannot_go_on(backend, pattern, tokens):
    step = GrammarMask(without_c(backend), len(WITHOUT_C), apply_masks_slowly)
    step.join(0, SamplingParams(structured=StructuredParams(regex=pattern)), [5], 1)
    for token in tokens:
        _, masks = step.fill(np.array([0]))
        if not masks[0, 0] >> token & 1:
            assert backend == "dfa" and not step.failures, "nothing leads there"
            return
        step.observe(0, token)
    _, masks = step.fill(np.array([0]))
    ends = masks & WITHOUT_C.eos_mask
    assert not ends.any() and (masks.any() or step.failures == {0: LEADS_NOWHERE})


@pytest.mark.parametrize("pattern", ["c", "abc", "(a|b)+c", "[a-d]*c"])
def test_a_language_that_the_vocabulary_cannot_write_is_refused(pattern):
    with pytest.raises(BadRequest, match="no tokens for any of its texts"):
        without_c("dfa").compile(StructuredParams(regex=pattern))


@pytest.mark.parametrize("pattern", ["(ab|cd)*e?", "a{3}c|b", "[^c]*", "(a|bc)+d", "x|yz?"])
def test_an_automaton_without_some_bytes_has_the_texts_without_them(pattern):
    dfa = compile_tree(parse(pattern))
    bytes_ = np.ones(256, bool)
    bytes_[ord("c")] = False
    trimmed = dfa.spelled(bytes_)
    for state in range(1, len(dfa.table)):
        reaches = bool(trimmed.table[state].any() or trimmed.accepting[state])
        assert reaches or not trimmed.accepting[state]
    texts = [b"", b"ab", b"abcd", b"cd", b"b", b"aaac", b"bcd", b"abe", b"d", b"y", b"yz"]
    for text in texts:
        fits = bool(dfa.accepting[dfa.next(START, text)])
        assert bool(trimmed.accepting[trimmed.next(START, text)]) == (fits and b"c" not in text)


def stuck() -> GrammarMask:
    """After `{"level": 5, ` of a grammar that llguidance makes of a pattern that leaves no names."""
    backend = llguidance_backend.LLGuidanceBackend(vocabulary())
    source = backend.translate(StructuredParams(json={"type": "object"}, disable_any_whitespace=True)).decode()
    options = json.loads(source.partition("%json ")[2])["x-guidance"]
    grammar = backend.build(
        StructuredParams(json=LEVEL), f"start: %json {json.dumps(LEVEL | {'x-guidance': options})}".encode()
    )

    class Compiler(GrammarCompiler):
        def compile(self, params, choose=None):
            return grammar

    return GrammarMask(Compiler(vocabulary, []), len(vocabulary()), apply_masks_slowly)


def test_a_comma_behind_which_nothing_can_come_ends_its_request_with_an_error_and_no_other():
    step = stuck()
    output = [vocabulary().tokens.index(bytes([byte])) for byte in b'{"level": 5, ']
    sampler = Sampler(len(vocabulary()), 2, processors=(lambda vocab_size, max_rows: step,))
    sampler.join(0, Join("", [7, *output], 1, SamplingParams(temperature=0, structured=StructuredParams(json=LEVEL))))
    sampler.join(1, Join("", [7], 1, SamplingParams(temperature=0)))
    sampled = sampler(torch.zeros(2, len(vocabulary())), np.array([0, 1]), np.array([1, 1]))
    assert sampled.invalid.tolist() == [0]
    assert sampler.failure(0) == LEADS_NOWHERE and sampler.failure(1) is None


def test_what_used_to_lead_nowhere_is_prevented():
    grammar = compiler("llguidance").compile(StructuredParams(json=LEVEL)).start()
    for byte in b'{"level":5':
        assert grammar.accept(vocabulary().tokens.index(bytes([byte])))
    following = {vocabulary().tokens[i][:1] for i in np.flatnonzero(allowed(grammar)) if vocabulary().tokens[i]}
    assert b"," not in following and b"}" in following
