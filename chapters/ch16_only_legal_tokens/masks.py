"""What a mask leaves of a model's own probabilities: along an answer, and for a handful of answers in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from chapters.lab import all_logits
from minivllm.structured.automaton import DEAD, START
from minivllm.structured.base import CompiledGrammar, Grammar, Vocabulary, unpack
from minivllm.structured.dfa import CompiledDFA

SMALLEST = 0.002  # ways to a text that are less likely than this, under the mask, are not followed


def legal_tokens(grammar: Grammar, vocabulary: Vocabulary) -> Tensor:
    """[V] bool."""
    mask = np.empty(vocabulary.num_words, np.int32)
    grammar.fill_mask(mask)
    return torch.from_numpy(unpack(mask, len(vocabulary)))


def bytes_of(vocabulary: Vocabulary, tokens: Sequence[int]) -> bytes:
    return b"".join(vocabulary.tokens[token] for token in tokens)


def along(
    model: nn.Module, vocabulary: Vocabulary, compiled: CompiledDFA, prompt: list[int], tokens: list[int]
) -> list[dict[str, Any]]:
    """For each token of a greedy answer: how many were legal, and how likely the model by itself held those to be.

    forced: no byte but one could follow. overruled: the model's first choice was not legal.
    """
    probs = all_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1].softmax(-1)
    table, classes = compiled.dfa.table, compiled.dfa.classes
    grammar, state, rows = compiled.start(), START, []
    for token, offered in zip(tokens, probs, strict=True):
        legal = legal_tokens(grammar, vocabulary)
        ways = int((table[state, classes] != DEAD).sum())
        rows.append(
            {
                "step": len(rows) + 1,
                "text": vocabulary.tokens[token].decode(errors="replace") or "(end)",
                "legal": int(legal.sum()),
                "mass": round(100 * float(offered[legal].sum()), 2),
                "forced": ways == 1 and not bool(compiled.dfa.accepting[state]),
                "overruled": not bool(legal[offered.argmax()]),
            }
        )
        grammar.accept(token)
        state = compiled.dfa.next(state, vocabulary.tokens[token])
    return rows


def chances(
    model: nn.Module, vocabulary: Vocabulary, compiled: CompiledGrammar, prompt: list[int], texts: Sequence[str]
) -> list[dict[str, Any]]:
    """How likely each of a grammar's few texts is, in percent: as drawn under the mask, and as the model by itself
    holds it, given that it says one of them. Over all ways to cut the texts into tokens that matter."""
    masked, own = dict.fromkeys(texts, 0.0), dict.fromkeys(texts, 0.0)
    ways: list[tuple[list[int], float, float]] = [([], 1.0, 1.0)]
    while ways:
        tokens, under_mask, alone = ways.pop()
        grammar = compiled.start()
        assert all(map(grammar.accept, tokens))
        probs = all_logits(model, [*prompt, *tokens])[-1].double().softmax(-1)
        legal = legal_tokens(grammar, vocabulary)
        left = float(probs[legal].sum())
        for token in legal.nonzero()[:, 0].tolist():
            chance = float(probs[token])
            reached = under_mask * chance / left, alone * chance
            if token in vocabulary.eos_ids:
                text = bytes_of(vocabulary, tokens).decode()
                masked[text], own[text] = masked[text] + reached[0], own[text] + reached[1]
            elif reached[0] >= SMALLEST:
                ways.append(([*tokens, token], *reached))
    return [{"text": text, "masked": percent(masked[text], masked), "own": percent(own[text], own)} for text in texts]


def percent(value: float, of: dict[str, float]) -> float:
    return round(100 * value / sum(of.values()), 1)
