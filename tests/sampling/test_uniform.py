from __future__ import annotations

import numpy as np

from minivllm.sampling.uniform import exponential, uniform

NUM = 200_000


def chi2(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def grid(seeds, positions, lanes, stream=0):
    """Broadcasts scalars; one number for each."""
    seeds, positions, lanes = np.broadcast_arrays(seeds, positions, lanes)
    return uniform(seeds.astype(np.uint64), positions, lanes[:, None], stream)[:, 0]


def test_a_pure_function_of_seed_position_and_lane():
    seeds, positions, lanes = np.arange(10, dtype=np.uint64), np.arange(10), np.arange(5)
    u = uniform(seeds, positions, lanes)
    assert u.shape == (10, 5)
    for i in range(10):
        one = uniform(seeds[i : i + 1], positions[i : i + 1], lanes[::-1])
        assert u[i].tolist() == one[0, ::-1].tolist()
    assert (u != uniform(seeds, positions, lanes, stream=1)).all()


def test_inside_the_open_unit_interval_and_even():
    u = grid(0, 0, np.arange(NUM))
    assert u.min() > 0 and u.max() < 1
    # 100 bins: 99 degrees of freedom, 0.1 % tail is 148.
    assert chi2(np.bincount((u * 100).astype(int), minlength=100)) < 148


def test_neighbouring_seeds_positions_lanes_and_streams_are_unrelated():
    n = np.arange(NUM)
    base = grid(0, n, 0)
    others = [grid(0, n + 1, 0), grid(1, n, 0), grid(0, n, 1), grid(0, n, 0, stream=1), grid(n, 0, 0), grid(0, 0, n)]
    for other in others:
        pairs = (base * 10).astype(int) * 10 + (other * 10).astype(int)
        assert chi2(np.bincount(pairs, minlength=100)) < 148
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / NUM**0.5


def test_exponential_noise_has_mean_and_deviation_one():
    e = exponential(np.zeros(1, np.uint64), np.zeros(1, np.int64), np.arange(NUM))
    assert e.min() > 0
    assert abs(e.mean() - 1) < 4 / NUM**0.5 and abs(e.std() - 1) < 12 / NUM**0.5  # its square's deviation is sqrt(8)
