"""What masks cost: finding one, using one, and the compilation that comes before."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.common import spread
from chapters.harness import milliseconds, with_three_digits
from chapters.lab import NoCache, OneRequest
from minivllm.errors import BadRequest
from minivllm.features import GRAMMARS
from minivllm.sampling.grammar_mask import choose_apply
from minivllm.structured.automaton import DEAD
from minivllm.structured.base import CompiledGrammar, Vocabulary
from minivllm.structured.compiler import GrammarCompiler
from minivllm.structured.dfa import CompiledDFA, DFABackend
from minivllm.structured.params import StructuredParams


def compiler_of(vocabulary: Vocabulary, name: str = "dfa") -> GrammarCompiler:
    """A fresh one, of one backend."""
    return GrammarCompiler(lambda: vocabulary, [(name, GRAMMARS.get(name))])


def one_mask(
    model: nn.Module, vocabulary: Vocabulary, compiled: CompiledDFA, state: int, seconds: float
) -> dict[str, dict[str, float]]:
    """The mask of a state, found in three ways; its use; and the forward pass that it belongs to. In ms."""
    dfa, logits, apply = compiled.dfa, torch.randn(1, len(vocabulary)), choose_apply(torch.device("cpu"))
    one_row, masks = np.zeros(1, np.int64), compiled.mask(state)[None]
    request = OneRequest(model, lambda layer: NoCache())
    runs = {
        "one_by_one": lambda: [dfa.next(state, data) != DEAD for data in vocabulary.tokens],
        "tree": lambda: CompiledDFA(dfa, vocabulary).mask(state),
        "kept": lambda: compiled.mask(state),
        "applied": lambda: apply(logits, one_row, masks),
        "forward": lambda: request.next_token([1000]),
    }
    return with_three_digits(milliseconds(runs, seconds, 5))


def of_backend(
    name: str, vocabulary: Vocabulary, params: StructuredParams, tokens: list[int], num_rounds: int
) -> dict[str, Any]:
    """Compiling, and the masks along an answer: the first time, and for any later request. In ms, a mask each."""
    times: dict[str, list[float]] = {"compile": [], "first": [], "again": []}
    out = np.empty(vocabulary.num_words, np.int32)

    def follow(compiled: CompiledGrammar) -> None:
        grammar = compiled.start()
        for token in tokens:
            grammar.fill_mask(out)
            grammar.accept(token)

    for _ in range(num_rounds):
        compiler = compiler_of(vocabulary, name)
        compiler.compile(StructuredParams(choice=["warm"]))  # what happens once, such as importing the library
        start = time.perf_counter()
        compiled = compiler.compile(params)
        times["compile"].append(1e3 * (time.perf_counter() - start))
        for turn in ("first", "again"):
            start = time.perf_counter()
            follow(compiled)
            times[turn].append(1e3 * (time.perf_counter() - start) / len(tokens))
    return {turn: spread(values, 4) for turn, values in times.items()}


def compiling(
    vocabulary: Vocabulary, specifications: dict[str, StructuredParams], num_rounds: int
) -> list[dict[str, Any]]:
    """The in-house automaton of each: its states, and how long it takes."""
    backend, rows = DFABackend(vocabulary), []
    for name, params in specifications.items():
        times = []
        for _ in range(num_rounds):
            start = time.perf_counter()
            compiled = backend.build(params, backend.translate(params))
            times.append(1e3 * (time.perf_counter() - start))
        rows.append({"what": name, "states": len(compiled.dfa.table) - 1, "ms": spread(times, 2)})
    return rows


def refusal(vocabulary: Vocabulary, params: StructuredParams) -> str:
    """What the in-house automaton says to something that it cannot do; "" if it can."""
    try:
        compiler_of(vocabulary).compile(params)
    except BadRequest as error:
        return str(error)
    return ""
