"""The benchmark of the live view runs, small, and says what it claims."""

import json
import os
from pathlib import Path

import forked

ROOT = Path(__file__).parent.parent.parent


def test_a_step_is_measured_with_and_without_somebody_who_looks():
    sizes = ("--num-reqs", "2", "--rounds", "3", "--steps", "5")
    done = forked.run("bench/live.py", *sizes, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=250)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["results"]
    assert row["look_ms"]["median"] > 0
    for name in ("never", "left", "watched"):
        assert row[f"{name}_us_per_step"]["num_runs"] == 3
