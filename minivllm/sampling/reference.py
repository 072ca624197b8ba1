"""The slow, obviously right reference of draw.py, verify.py and rejection.py: sorts the whole vocabulary, one row at a
time, in float64. The oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minivllm.sampling.draw import BLOCK
from minivllm.sampling.uniform import exponential

Logits = Callable[[list[int]], np.ndarray]  # tokens -> logits [V] of the next one


def find_cut(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    """The least probability kept of one row [V]."""
    kept = np.sort(probs)[::-1]
    kept = kept[kept >= np.float32(min_p) * kept[0]]
    if 0 < top_k < len(kept):
        kept = kept[kept >= kept[top_k - 1]]
    if top_p < 1:
        likelier = np.concatenate(([0.0], np.cumsum(kept, dtype=np.float64)[:-1]))
        kept = kept[likelier < top_p * kept.sum(dtype=np.float64)]
    return kept[-1]


def draw(probs: np.ndarray, seed: int, position: int) -> int:
    """The race of one row [V], block by block."""
    at = np.array([seed], np.uint64), np.array([position])
    starts = range(0, len(probs), BLOCK)
    noise = exponential(*at, np.arange(len(starts)))[0]
    masses = [probs[i : i + BLOCK].sum(dtype=float) for i in starts]
    finish = [n / mass if mass else np.inf for n, mass in zip(noise, masses, strict=True)]
    first = starts[int(np.argmin(finish))]
    tokens = [token for token in range(first, min(first + BLOCK, len(probs))) if probs[token]]
    return min(tokens, key=lambda token: exponential(*at, np.array([token]), stream=1)[0, 0] / probs[token])


def sample(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """One row [V], the whole of it: temperature, filters, draw."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < find_cut(probs, top_k, top_p, min_p)] = 0
    return draw(probs, seed, position)


def verify(logits_after: Logits, params: dict, prefix: list[int], drafts: list[int], seed: int) -> list[int]:
    """Tokens of one request's step with drafts, one position after the other (acceptance `match`). params: of
    sample()."""
    out: list[int] = []
    for draft in [*drafts, None]:
        tokens = [*prefix, *out]
        out.append(sample(logits_after(tokens), **params, seed=seed, position=len(tokens)))
        if out[-1] != draft:
            break
    return out


def accept(p: np.ndarray, q: np.ndarray, draft: int, coin: float, seed: int, position: int) -> int:
    """The token that rejection sampling gives for a draft drawn from q; p and q [V] sum to 1."""
    if coin < p[draft] / q[draft]:
        return draft
    return draw(np.maximum(p - q, 0), seed, position)
