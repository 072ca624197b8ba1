"""From how many tokens on the dense copy is faster: measured, on the model's own layers, in a fraction of a second.

A machine that does other work only ever makes a measurement longer. So what counts is each layer's fastest of several
short calls, the two forms in turns, and not a sum that any disturbance spoils; and a time that is longer than one with
more tokens is replaced by that one, because it can only have been disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from minivllm.quantization.packed import NEVER

MIDDLE = (8, 12, 16, 24)  # where it lies on most machines; the others are tried if it does not
FEWER, MORE = (2, 4, 6), (32, 48, 64, 96, 128)
TYPICAL = 16  # what quiet machines of two makers gave (bench/LOG.md)
TOKENS = (*FEWER, *MIDDLE, *MORE)
ROUNDS = 4
MAX_SECONDS = 0.3
MAX_WEIGHTS = 45_000_000  # in the sample: more than the caches hold, few enough to be quick


class Crossover(NamedTuple):
    tokens: int
    reason: str


def measure(layers: Sequence[nn.Module], max_seconds: float = MAX_SECONDS) -> Crossover:
    """The first of TOKENS from which on the dense copies of a sample of `layers` (all QuantisedAtLoad, with a dense
    method) take less time than the packed ones. TYPICAL if there is no time for a second look at each count."""
    sample, end = _sample(layers), time.perf_counter() + max_seconds
    seconds = _best(sample, MIDDLE, end)
    wins = _dense_wins(seconds) if seconds else []
    if seconds and (wins[0] or not wins[-1]):
        others = _best(sample, FEWER if wins[0] else MORE, end)
        seconds |= others
        wins = _dense_wins(seconds)
        if not others and not wins[-1]:
            return Crossover(MORE[0], f"measured on {len(sample)} layers up to {MIDDLE[-1]} tokens: no time for more")
    if not seconds:
        return Crossover(TYPICAL, "as on most machines: this one is too busy to measure")
    tried = sorted(seconds)
    if not wins[-1]:
        return Crossover(NEVER, f"measured on {len(sample)} layers up to {tried[-1]} tokens")
    tokens = tried[len(wins) - int(np.argmin(wins[::-1])) if not all(wins) else 0]
    packed, dense = seconds[tokens]
    shown = f"{tokens} tokens {1e3 * packed.sum():.1f} against {1e3 * dense.sum():.1f} ms"
    return Crossover(tokens, f"measured on {len(sample)} layers; {shown}")


def _best(sample: Sequence[nn.Module], counts: Sequence[int], end: float) -> dict[int, np.ndarray]:
    """{tokens: [2 forms, layers] seconds}, each the least of up to ROUNDS rounds; nothing if there is no time for 2."""
    best: dict[int, np.ndarray] = {}
    for i in range(ROUNDS):
        for tokens in counts:
            if i < 2 and time.perf_counter() > end:
                return {}
            found = np.asarray(_race(sample, tokens))
            best[tokens] = np.minimum(best.get(tokens, found), found)
        if time.perf_counter() > end:
            break
    return best


def _dense_wins(seconds: dict[int, np.ndarray]) -> list[bool]:
    """By rising number of tokens. A count takes no longer than a larger one."""
    totals = np.array([seconds[tokens].reshape(2, -1).sum(1) for tokens in sorted(seconds)])  # [counts, 2]
    packed, dense = np.minimum.accumulate(totals[::-1])[::-1].T
    return (dense < packed).tolist()


def _sample(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Every shape at least once (unless it alone is too large), then evenly many more."""
    first = list({(layer.matrix.n_out, layer.matrix.n_in): layer for layer in layers}.values())
    spread = [layer for layer in layers[:: max(1, len(layers) // 24)] if not any(layer is other for other in first)]
    sample, weights = [], 0
    for layer in [*sorted(first, key=_size), *spread]:
        if not sample or weights + _size(layer) <= MAX_WEIGHTS:
            sample.append(layer)
            weights += _size(layer)
    return sample


def _size(layer: nn.Module) -> int:
    return layer.matrix.n_out * layer.matrix.n_in


def _race(sample: Sequence[nn.Module], tokens: int) -> list[list[float]]:
    """Seconds of each layer, [packed, dense]."""
    x = {n_in: torch.randn(tokens, n_in).bfloat16() for n_in in {layer.matrix.n_in for layer in sample}}
    seconds: list[list[float]] = [[], []]
    with torch.inference_mode():
        for form in range(2):
            for layer in sample:
                rows, start = x[layer.matrix.n_in], time.perf_counter()
                layer.method.dense.apply(layer, rows) if form else layer.matrix(rows, layer.output_dtype)
                seconds[form].append(time.perf_counter() - start)
    return seconds
