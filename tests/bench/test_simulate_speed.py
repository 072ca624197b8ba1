"""The benchmark of simulated clusters, at a size that says nothing of speed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

BENCH = str(Path(__file__).parents[2] / "bench")
sys.path.insert(0, BENCH)  # only while importing: bench/attention.py would hide tests/attention

import simulate_speed  # noqa: E402

sys.path.remove(BENCH)

ARGS = {"model": "dummy:llama-3.1-8b", "gpu": "h100", "router": "round_robin", "prefix": "none"}
ARGS |= {"prompt": 32, "output": 4, "rate": 50.0}


def test_a_row_counts_what_was_run_and_growth_compares_it_with_the_next():
    args = argparse.Namespace(**ARGS)
    few, many = (simulate_speed.measure(args, 2, number) for number in (5, 20))
    assert many["requests"] == 20 and many["steps"] > few["steps"] > 4 and many["requests_per_s"] > 0
    (slope,) = simulate_speed.growth([few, many])
    assert slope["times_requests"] == 4 and slope["times_cpu"] == many["cpu_s"] / few["cpu_s"]


def test_the_parts_of_a_run_are_all_of_it():
    found = simulate_speed.shares(argparse.Namespace(**ARGS), 2, 20)
    assert set(found) == {*simulate_speed.PARTS, "rest"} and abs(sum(found.values()) - 1) < 1e-9
    assert all(share > 0 for share in found.values())
