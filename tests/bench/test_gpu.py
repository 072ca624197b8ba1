"""bench/gpu runs end to end on a CPU, its kernels in triton's interpreter; without a card its tables hold no times."""

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
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: minivllm[gpu]")


def run(*args: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "bench/gpu/run.py", *args]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)


@needs_triton
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


@needs_triton
def test_without_a_gpu_and_without_the_interpreter_it_says_what_to_do():
    done = run("--part", "kernels", "--device", "cpu", TRITON_INTERPRET="0")
    assert done.returncode == 2 and "TRITON_INTERPRET=1" in done.stderr


@pytest.mark.parametrize(
    "part, rows", [("engine", 4), ("ablation", 7), ("peers", 4)], ids=["engine", "ablation", "peers"]
)
def test_a_part_of_whole_engines_runs_end_to_end_without_a_gpu(part, rows):
    done = run("--part", part, "--device", "cpu", "--rounds", "1", "--set", "executor.num_threads=1")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert len(results["rows"]) == rows and "CPU" in results["gpu"]
    assert done.stderr.rstrip().count("\n") >= rows and "not measured" in done.stderr, "a table comes last"
    for row in results["rows"]:
        assert "not measured" in row.values(), row
        assert row.get("outputs differ", 0) == 0
    if part == "peers":
        why = {row["engine"]: row["why"] for row in results["rows"]}
        assert "CPU" in why["minivllm"] and "CPU" in why["transformers"], why


def test_the_requests_are_those_of_nano_vllms_benchmark():
    """Its totals, as its authors and others report them."""
    code = """
import sys; sys.path[:0] = ["bench/gpu", "bench"]
from serving import nano_requests
requests = nano_requests()
print(sum(map(len, requests.prompts)), sum(requests.num_tokens))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["142827", "133966"], done.stderr
