"""The benchmark of the live view runs, small, and says what it claims."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_step_is_measured_with_and_without_somebody_who_looks():
    command = [sys.executable, str(ROOT / "bench" / "live.py"), "--num-reqs", "2", "--rounds", "3", "--steps", "5"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["results"]
    assert row["look_ms"]["median"] > 0
    for name in ("never", "left", "watched"):
        assert row[f"{name}_us_per_step"]["num_runs"] == 3
