"""bench/gpu runs end to end in triton's interpreter; without a card its tables hold no times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from minivllm.kernels.table import KERNELS

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: minivllm[gpu]")


def run(*args: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "bench/gpu/run.py", *args]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("part", ["correctness", "kernels"])
def test_a_part_runs_end_to_end_without_a_gpu(part, tmp_path):
    out = tmp_path / "results.jsonl"
    done = run("--part", part, "--device", "cpu", "--out", str(out), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert json.loads(out.read_text()) == record and record["params"]["part"] == part
    rows = record["results"]["rows"]
    assert {row["kernel"] for row in rows} <= {kernel.name for kernel in KERNELS} | {"copy"}
    if part == "correctness":
        assert len(rows) > 4 and all(row["right"] for row in rows)
    else:
        assert all(row["gb_per_s"] == "not measured" for row in rows)


def test_without_a_gpu_and_without_the_interpreter_it_says_what_to_do():
    done = run("--part", "kernels", "--device", "cpu", TRITON_INTERPRET="0")
    assert done.returncode == 2 and "TRITON_INTERPRET=1" in done.stderr
