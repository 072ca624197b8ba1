"""From how many tokens on the dense copy is faster: measured in whole steps, in a fraction of a second.

Products alone say too little: either form may run inside of one call for the whole stack or be called product by
product, and dense weights are four times the bytes, from wherever the rest of the step has left them. So a race is a
step in each form.

A machine that does other work only ever makes a measurement longer. So what counts is the fastest of several short
races, the two forms in turns, and not a sum that any disturbance spoils; and a time that is longer than one with more
tokens is replaced by that one, because it can only have been disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from minivllm.quantization.packed import NEVER, TYPICAL, Limit

MIDDLE = (12, 24)  # where it lies on most machines; the others are tried if it does not
FEWER, MORE = (4, 8), (32, 48, 64, 96, 128)
TOKENS = (*FEWER, *MIDDLE, *MORE)
ROUNDS = 3
MAX_SECONDS = 0.3

Race = Callable[
    [int], Sequence[Sequence[float]]
]  # tokens -> seconds of the packed form, part by part, and of the dense


class Crossover(NamedTuple):
    tokens: int
    reason: str


def settle(limit: Limit, run: Callable[[int], None], max_seconds: float = MAX_SECONDS) -> str:
    """Find and set a limit. run(tokens): what is to be fast, with the limit as it is then. -> what was found."""

    def race(tokens: int) -> list[list[float]]:
        seconds = []
        for form in (NEVER, 0):
            limit.tokens, begin = form, time.perf_counter()
            run(tokens)
            seconds.append([time.perf_counter() - begin])
        return seconds

    limit.tokens, reason = measure(race, max_seconds)
    return f"{'never' if limit.tokens == NEVER else f'from {limit.tokens} tokens on'} ({reason})"


def measure(race: Race, max_seconds: float = MAX_SECONDS) -> Crossover:
    """The first of TOKENS from which on the dense form takes less time than the packed one. TYPICAL if there is no time
    for a second look at each count."""
    end = time.perf_counter() + max_seconds
    seconds = _best(race, MIDDLE, end)
    wins = _dense_wins(seconds) if seconds else []
    if seconds and (wins[0] or not wins[-1]):
        others = _best(race, FEWER if wins[0] else MORE, end)
        seconds |= others
        wins = _dense_wins(seconds)
        if not others and not wins[-1]:
            return Crossover(MORE[0], f"measured up to {MIDDLE[-1]} tokens: no time for more")
    if not seconds:
        return Crossover(TYPICAL, "as on most machines: this one is too busy to measure")
    tried = sorted(seconds)
    if not wins[-1]:
        return Crossover(NEVER, f"measured up to {tried[-1]} tokens")
    tokens = tried[len(wins) - int(np.argmin(wins[::-1])) if not all(wins) else 0]
    packed, dense = seconds[tokens]
    return Crossover(tokens, f"measured: {tokens} tokens {1e3 * packed.sum():.1f} against {1e3 * dense.sum():.1f} ms")


def _best(race: Race, counts: Sequence[int], end: float) -> dict[int, np.ndarray]:
    """{tokens: [2 forms, parts] seconds}, each the least of up to ROUNDS rounds; nothing if there is no time for 2."""
    best: dict[int, np.ndarray] = {}
    for i in range(ROUNDS):
        for tokens in counts:
            if i < 2 and time.perf_counter() > end:
                return {}
            found = np.asarray(race(tokens))
            best[tokens] = np.minimum(best.get(tokens, found), found)
        if i and time.perf_counter() > end:
            break
    return best


def _dense_wins(seconds: dict[int, np.ndarray]) -> list[bool]:
    """By rising number of tokens. A count takes no longer than a larger one."""
    totals = np.array([seconds[tokens].reshape(2, -1).sum(1) for tokens in sorted(seconds)])  # [counts, 2]
    packed, dense = np.minimum.accumulate(totals[::-1])[::-1].T
    return (dense < packed).tolist()


def run_layer(layer: nn.Module, x: Tensor) -> Callable[[int], None]:
    """For `settle`: one layer over the first rows of x [T, n_in]."""
    return lambda tokens: layer(x[:tokens])
