"""Chapter 15: check guesses without changing what comes out. Fill in `verify`, then run the tests:

python -m minivllm chapter 15 --exercise
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def race(noise: np.ndarray, weights: np.ndarray) -> int:
    """Chapter 4's draw: each token as often as its weight says. They need not add up to one."""
    with np.errstate(divide="ignore"):
        return int((noise / weights).argmin())


def verify(
    guesses: Sequence[int],
    q: np.ndarray,
    p: np.ndarray,
    coins: np.ndarray,
    noise: np.ndarray,
) -> list[int]:
    """What a step makes of k guesses: those that it accepts, and one token more.

    q [k, V]: what each guess was drawn from. p [k + 1, V]: what the model says of each guess's
    place, and of the place behind the last one. A row of p is worth something only if all guesses
    before it are right. coins [k]: a random number in (0, 1) for each guess. noise [k + 1, V]: for
    `race`, a row for each place.

    Each token comes as often as p says, whatever q is, and no guess is refused without need.
    """
    raise NotImplementedError("yours to write")
