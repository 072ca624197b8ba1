"""How long prompts and answers are: distributions as functions of a standard normal number, so that two of them can be
drawn with a correlation, and so that a length depends on its own number alone, whatever else is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np

ENDS = 3.5  # standard normal numbers at which a table's first and last quantile lie
NORMAL = NormalDist()


class Lengths(Protocol):
    def at(self, normals: np.ndarray) -> np.ndarray:
        """[N] float64 -> [N] int64, at least 1. Grows with its argument."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Clipped to [low, high], with the given mean after clipping."""

    mean: float
    sigma: float  # of the logarithm
    low: int
    high: int

    def at(self, normals: np.ndarray) -> np.ndarray:
        return _whole(np.exp(self.mu() + self.sigma * normals).clip(self.low, self.high))

    def mu(self) -> float:
        """Of the logarithm. Bisection: the clipped mean grows with it."""
        low, high = math.log(self.low), math.log(self.high)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._clipped_mean(middle) < self.mean else (low, middle)
        return (low + high) / 2

    def _clipped_mean(self, mu: float) -> float:
        cdf, sigma = NORMAL.cdf, self.sigma
        a, b = (math.log(self.low) - mu) / sigma, (math.log(self.high) - mu) / sigma
        middle = math.exp(mu + sigma**2 / 2) * (cdf(b - sigma) - cdf(a - sigma))
        return self.low * cdf(a) + middle + self.high * (1 - cdf(b))


@dataclass(frozen=True, slots=True)
class Constant:
    length: int

    def at(self, normals: np.ndarray) -> np.ndarray:
        return np.full(len(normals), self.length)


class Quantiles:
    """Of a data set: its least length, evenly spaced quantiles, its greatest. Between them, straight lines in the
    normal number. All are scaled to have the given mean."""

    def __init__(self, quantiles: Sequence[float], mean: float):
        inner = [NORMAL.inv_cdf(i / (len(quantiles) - 1)) for i in range(1, len(quantiles) - 1)]
        self._normals = np.array([-ENDS, *inner, ENDS])
        evenly = np.array([NORMAL.inv_cdf((i + 0.5) / 10_000) for i in range(10_000)])
        self._lengths = np.array(quantiles, float)
        self._lengths *= mean / np.interp(evenly, self._normals, self._lengths).mean()

    def at(self, normals: np.ndarray) -> np.ndarray:
        return _whole(np.interp(normals, self._normals, self._lengths))


def _whole(lengths: np.ndarray) -> np.ndarray:
    return np.rint(lengths).astype(np.int64).clip(1)
