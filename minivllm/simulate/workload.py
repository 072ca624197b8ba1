"""What is asked of a simulated engine: when, how long, and which beginnings are the same.

A trace says no words, so a prompt's tokens are made up: the same name gives the same piece, whatever request it is in,
and so the prefix cache finds what it would have found. Output lengths are the trace's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIRST_TOKEN = 16  # below it are ends of sequence and the like


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival: float  # seconds from the trace's beginning
    num_prompt: int  # tokens
    num_output: int  # tokens, exactly
    pieces: tuple[int, ...] = ()  # names of the prompt's pieces, in order; what they do not reach is its own
    piece_tokens: int = 512  # of each piece; the last is cut where the prompt ends (Mooncake's blocks have 512)
    group: int | None = None  # sequences of one prompt (n > 1) name the same group, and arrive together


def prompt_tokens(request: TraceRequest, vocab_size: int, seed: int) -> list[int]:
    """seed: of what is the request's own. num_prompt ids, all at least FIRST_TOKEN."""
    parts = [_draw(vocab_size, 0, name, request.piece_tokens) for name in request.pieces]
    shared = np.concatenate(parts)[: request.num_prompt] if parts else np.empty(0, np.int64)
    own = _draw(vocab_size, 1, seed, request.num_prompt - len(shared))
    return [*shared.tolist(), *own.tolist()]


def _draw(vocab_size: int, kind: int, name: int, count: int) -> np.ndarray:
    return np.random.default_rng((kind, name)).integers(FIRST_TOKEN, vocab_size, count)
