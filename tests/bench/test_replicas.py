"""One core beside two replicas, over a tiny model: the shape of what is printed, and that a router by prefix finds more
of them than one that looks at nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def row():
    small = ["--scale", "0.25", "--groups", "4", "--num-requests", "24", "--rounds", "1", "--pool-tokens", "4096"]
    sides = ["--only", "round_robin", "prefix", "--rates", "10", "--set", "executor.num_threads=1"]
    command = [sys.executable, "bench/replicas.py", "--model", "dummy:tiny", *small, *sides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["results"]["rows"]
    return row


def test_each_side_has_its_figures_and_stands_beside_the_first(row):
    assert row["rate"] == 10 and list(row["sides"]) == ["round_robin", "prefix"]
    for side in row["sides"].values():
        assert side["throughput"]["min"] > 0 and side["ttft_p99"]["min"] >= side["ttft_p50"]["min"] > 0
    assert list(row["to_round_robin"]) == ["prefix"]


def test_a_beginning_is_computed_once_where_requests_go_by_prefix(row):
    """Of 24 requests in 4 groups the first of each group misses: on one replica there, on each of the two else."""
    rates = {name: side["hit_rate"]["median"] for name, side in row["sides"].items()}
    assert rates["prefix"] > rates["round_robin"] > 0
