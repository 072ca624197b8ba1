"""Drive a grammar with random allowed tokens, no model: thousands of outputs in a second."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
from tiny_tokenizers import byte_level

from minivllm.engine.vocabulary import make_vocabulary
from minivllm.structured.base import Grammar, Vocabulary, unpack
from minivllm.structured.compiler import GrammarCompiler
from minivllm.structured.dfa import DFABackend
from minivllm.structured.llguidance_backend import LLGuidanceBackend
from minivllm.structured.xgrammar_backend import XGrammarBackend

BACKENDS = {"xgrammar": XGrammarBackend, "llguidance": LLGuidanceBackend, "dfa": DFABackend}
CLOSING = (b'"', b"}", b"]", b"e", b"l")  # tokens that begin so tend to end something


@cache
def vocabulary() -> Vocabulary:
    return make_vocabulary(byte_level(), byte_level().vocab_size + 5)  # a model with more ids than its tokenizer


@cache
def compiler(*names: str) -> GrammarCompiler:
    """Of these backends, in this order; of all in the order of structured.backend=auto if there are none."""
    return GrammarCompiler(vocabulary, [(name, BACKENDS[name]) for name in names or BACKENDS])


def allowed(grammar: Grammar) -> np.ndarray:
    """[V] bool."""
    mask = np.full(vocabulary().num_words, 0x55555555, np.int32)  # whatever was there before must not matter
    grammar.fill_mask(mask)
    return unpack(mask, len(vocabulary()))


@cache
def closing() -> np.ndarray:
    return np.array([token.startswith(CLOSING) for token in vocabulary().tokens])


def choose(mask: np.ndarray, rng: random.Random) -> int:
    """A random allowed token, more often one that brings the output nearer to its end."""
    eos = [i for i in vocabulary().eos_ids if mask[i]]
    if eos and rng.random() < 0.5:
        return rng.choice(eos)
    ids = np.flatnonzero(mask & closing()) if rng.random() < 0.5 else ()
    return int(rng.choice(ids if len(ids) else np.flatnonzero(mask)))


def draw(grammar: Grammar, rng: random.Random, max_tokens: int = 1500) -> tuple[bytes, bool]:
    """(what came out, whether it ended by itself)."""
    out = b""
    for _ in range(max_tokens):
        mask = allowed(grammar)
        assert mask.any(), f"a dead end after {out!r}"
        token = choose(mask, rng)
        assert grammar.accept(token), f"{vocabulary().tokens[token]!r} is in the mask and not accepted after {out!r}"
        if token in vocabulary().eos_ids:
            assert grammar.is_terminated
            return out, True
        out += vocabulary().tokens[token]
    return out, False
