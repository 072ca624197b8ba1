"""Two servers that differ in the class of their connections: over a tiny model, for the shape of what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_both_ways_to_write_a_stream_are_measured():
    command = [sys.executable, "bench/quick_send.py", "--streams", "4", "--output-len", "300", "--rounds", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert list(results["us_per_token"]) == ["quick", "h11"]
    assert all(found["num_runs"] == 2 and found["min"] > 0 for found in results["us_per_token"].values())
    assert results["quick_to_h11"]["ratio"] > 0
