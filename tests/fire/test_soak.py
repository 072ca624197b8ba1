"""Twenty seconds of `make soak`, and what it says of runs that are made up."""

from __future__ import annotations

import random

import pytest
from fire.soak import Look, main, slope, verdicts

COUNTS = {"open_files": 20, "tasks": 5, "blocks": 0.0}


def looks(num=60, rss=lambda i, rng: 100.0, counts=lambda i: {}):
    rng = random.Random(1)
    return [Look(10.0 * i, {"server": rss(i, rng)}, COUNTS | counts(i)) for i in range(num)]


def growing(*args, **kwargs):
    return {row.what.partition(",")[0] for row in verdicts(looks(*args, **kwargs)) if row.grows}


def test_what_is_flat_noisy_or_jumps_once_does_not_grow():
    assert growing() == set()
    assert growing(rss=lambda i, rng: 100 + rng.gauss(0, 3)) == set()
    assert growing(rss=lambda i, rng: 100 + 20 * (i > 57)) == set()
    assert growing(rss=lambda i, rng: 100 + min(i, 20)) == set()  # warming up
    assert growing(counts=lambda i: {"open_files": 20 + i % 3}) == set()


def test_what_grows_is_seen_in_noise_and_in_ones():
    assert growing(rss=lambda i, rng: 100 + 0.5 * i + rng.gauss(0, 3)) == {"memory of server"}
    assert growing(counts=lambda i: {"open_files": 20 + i // 10, "tasks": 5 + i}) == {"open_files", "tasks"}
    assert growing(counts=lambda i: {"blocks": 0.01 * (i == 30)}) == {"blocks"}


def test_the_interval_of_a_slope_holds_the_slope():
    rng, hits = random.Random(3), 0
    for _ in range(200):
        found = slope(range(30), [0.1 * x + rng.gauss(0, 1) for x in range(30)])
        assert found.low <= found.middle <= found.high
        hits += found.low <= 0.1 <= found.high
    assert 180 <= hits <= 200  # 95 %


@pytest.mark.slow
def test_twenty_seconds_of_everything_leave_nothing(capsys):
    assert main(["--seconds", "20"]) == 0, capsys.readouterr().out
