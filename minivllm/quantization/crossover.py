"""From how many tokens on the dense copy is faster: measured, on the model's own layers, in a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from minivllm.quantization.packed import NEVER

TOKENS = (2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
TRIES = 2
MAX_SECONDS = 0.3
MAX_WEIGHTS = 45_000_000  # in the sample: more than the caches hold, few enough to be quick


class Crossover(NamedTuple):
    tokens: int
    reason: str


def measure(layers: Sequence[nn.Module], max_seconds: float = MAX_SECONDS) -> Crossover:
    """Bisects TOKENS for the first count at which the dense copies of a sample of `layers` (all QuantisedAtLoad, with a
    dense method) take less time than the packed ones. The two run in turns; the best of a few tries counts."""
    sample, begin = _sample(layers), time.perf_counter()
    low, high, shown = 0, len(TOKENS), ""
    while low < high:
        middle = (low + high) // 2
        packed, dense = _race(sample, TOKENS[middle])
        shown = f"{TOKENS[middle]} tokens {1e3 * packed:.1f} against {1e3 * dense:.1f} ms"
        low, high = (low, middle) if dense < packed else (middle + 1, high)
        if time.perf_counter() - begin > max_seconds:
            break
    found = (low + high) // 2  # low == high, or time is up and it lies between them
    tokens = TOKENS[found] if found < len(TOKENS) else NEVER
    return Crossover(tokens, f"measured on {len(sample)} layers; last {shown}")


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


def _race(sample: Sequence[nn.Module], tokens: int) -> tuple[float, float]:
    """Seconds of (packed, dense)."""
    x = {n_in: torch.randn(tokens, n_in).bfloat16() for n_in in {layer.matrix.n_in for layer in sample}}
    best = [float("inf")] * 2
    with torch.inference_mode():
        for _ in range(TRIES):
            for i in range(2):
                start = time.perf_counter()
                for layer in sample:
                    rows = x[layer.matrix.n_in]
                    layer.method.dense.apply(layer, rows) if i else layer.matrix(rows, layer.output_dtype)
                best[i] = min(best[i], time.perf_counter() - start)
    return best[0], best[1]
