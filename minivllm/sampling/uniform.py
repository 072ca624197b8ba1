"""Random numbers without state: each is a function of (seed, position, lane), so that a draw depends on nothing else.

A stateful generator per request would have to survive preemption, move with the batch and replay rejected drafts. Here
the draw of a token needs only its request's seed and its index in the sequence: the same tokens come out whatever the
neighbours, the batch order, the chunking or the number of preemptions.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): a hash of seed and
position is the generator's state, the lane is how far it has run. `stream` separates the uses of one position.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MUL1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL2 = np.uint64(0x94D049BB133111EB)


def uniform(seeds: np.ndarray, positions: np.ndarray, lanes: np.ndarray, stream: int = 0) -> np.ndarray:
    """seeds [S] uint64, positions [S] int64 >= 0, lanes [L] or [S, L] int64 >= 0 -> [S, L] float64 in (0, 1)."""
    state = _mix(seeds ^ _mix(np.full(1, stream + 1, np.uint64) * _GOLDEN))
    state = _mix(state + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    bits = _mix(state[:, None] + (lanes.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # 52 bits: the half is exact


def exponential(seeds: np.ndarray, positions: np.ndarray, lanes: np.ndarray, stream: int = 0) -> np.ndarray:
    """The same, distributed as -log(uniform): mean 1, all above 0."""
    return -np.log(uniform(seeds, positions, lanes, stream))


def _mix(z: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits in which each input bit flips each output bit about half of the time. Wraps by design."""
    z = (z ^ (z >> np.uint64(30))) * _MUL1
    z = (z ^ (z >> np.uint64(27))) * _MUL2
    return z ^ (z >> np.uint64(31))
