"""bench/gpu runs end to end on a CPU, its kernels in triton's interpreter; without a card its tables hold no times."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest

from minivllm.kernels.table import KERNELS

ROOT = Path(__file__).parent.parent.parent
GPU = ROOT / "bench" / "gpu"
TRITON = {kernel.name for kernel in KERNELS if kernel.family == "triton"}
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: minivllm[gpu]")


def run(*args: str, stderr: int = subprocess.PIPE, **env: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return forked.run("bench/gpu/run.py", "--device", "cpu", *args, env=env, stderr=stderr)


@pytest.fixture(scope="module")
def imported():
    """bench/gpu's own modules, as its scripts import each other."""
    before = sys.path[:]
    sys.path[:0] = [str(GPU), str(GPU.parent)]
    yield __import__
    sys.path[:] = before


def results(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["results"]


@needs_triton
def test_every_kernel_is_right_without_a_gpu(tmp_path):
    done = run("--part", "correctness", "--seed", "0", "--out", str(tmp_path), TRITON_INTERPRET="1")
    rows = results(done)["rows"]
    assert [path.name for path in tmp_path.iterdir()] == ["correctness.jsonl"], "no partial rows are left"
    record = json.loads((tmp_path / "correctness.jsonl").read_text())
    assert record == json.loads(done.stdout)
    assert record["params"]["part"] == "correctness" and record["params"]["seed"] == 0
    assert {"date", "commit", "versions"} <= set(record)
    assert {row["kernel"] for row in rows} == TRITON, "every kernel of the table has a case"
    assert all(row["right"] for row in rows)


@needs_triton
def test_every_kernel_would_be_timed_beside_what_would_do_in_its_place():
    found = results(run("--part", "kernels", TRITON_INTERPRET="1"))
    rows = {row["kernel"]: row for row in found["rows"]}
    assert set(rows) == TRITON | {"copy", "matrix product"}
    assert all(rows[name]["fraction"] == "not measured" for name in TRITON)
    assert "times sort" in rows["top-k, top-p and min-p"] and "times bf16" in rows["w4a16 linear"]
    assert len(found["targets"]) == 3 and {row["verdict"] for row in found["targets"]} == {"not measured"}


@needs_triton
def test_attention_is_compared_with_what_is_installed():
    rows = results(run("--part", "attention", TRITON_INTERPRET="1"))["rows"]
    assert [row["way"] for row in rows] == ["triton", "sdpa math", "flex", "flash 3"] * 2
    for row in rows:
        assert row.get("right") is True or "not installed" in row["note"], row


@needs_triton
def test_a_wrong_kernel_is_found_and_a_broken_one_takes_no_other_along(imported, tmp_path):
    """Cases of one's own in place of a kernel's: one that leaves a number unwritten, and one that raises."""
    (tmp_path / "cases.py").write_text("""
import torch
from case import Case
out = torch.tensor([1.0, torch.nan])
def broken(setting): raise RuntimeError("an illegal access")
def raises(): raise ValueError("a wrong shape")
def of(name, call): return lambda setting: iter([Case(name, "2", call, lambda: torch.ones(2), 1.0, 8)])
CASES = {"broken": broken, "raises": of("raises", raises), "unwritten": of("unwritten", lambda: out),
         "right": of("right", lambda: torch.ones(2))}
""")
    code = f"""
import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(GPU)!r}, {str(GPU.parent)!r}]
import runpy; sys.argv = ["run.py", "--part", "correctness", "--device", "cpu"]
import cases  # these, and not bench/gpu's
runpy.run_path({str(GPU / "run.py")!r}, run_name="__main__")
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    rows = json.loads(done.stdout)["results"]["rows"]
    assert done.returncode == 1 and "1 of 4 rows are wrong" in done.stderr
    assert [row.get("right") for row in rows] == [None, None, False, True]
    assert [row.get("error", "").partition(":")[0] for row in rows] == ["RuntimeError", "ValueError", "", ""]


@needs_triton
def test_without_a_gpu_and_without_the_interpreter_it_says_what_to_do():
    done = run("--part", "kernels", TRITON_INTERPRET="0")
    assert done.returncode == 2 and "TRITON_INTERPRET=1" in done.stderr


def test_what_would_come_too_late_is_not_begun_and_the_targets_come_last():
    done = run("--part", "engine", "--seconds", "0", stderr=subprocess.STDOUT)
    lines = done.stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("{"))
    found = json.loads(lines[place])["results"]
    assert done.returncode == 1 and "left out" in found["rows"][0]["error"]
    assert lines[-1].startswith("1 of 2 rows failed") and lines[-2].startswith(found["targets"][-1]["target"])


@pytest.mark.parametrize(
    "part, names", [("engine", 7), ("ablation", 10), ("peers", 4)], ids=["engine", "ablation", "peers"]
)
def test_a_part_of_whole_engines_runs_end_to_end_without_a_gpu(part, names):
    done = run("--part", part, "--rounds", "1", "--set", "executor.num_threads=1")
    found = results(done)
    assert len(found["rows"]) == names and "CPU" in found["gpu"]
    assert done.stderr.rstrip().count("\n") >= names and "not measured" in done.stderr, "a table comes last"
    for row in found["rows"]:
        assert "not measured" in row.values() or row.get("note") == "started", row
        assert row.get("outputs differ", 0) == 0
    assert {row["verdict"] for row in found["targets"]} <= {"not measured"}
    if part == "peers":
        why = {row["engine"]: row["why"] for row in found["rows"]}
        assert "CPU" in why["minivllm"] and "CPU" in why["transformers"], why


def test_a_switch_that_an_engine_could_not_turn_is_no_row_of_times():
    """sdpa cannot be part of a captured decode: the engine says so and runs without graphs."""
    only = "graphs of whole decodes"
    done = run("--part", "ablation", "--rounds", "1", "--only", only, "--set", "runner.attention=sdpa")
    rows = json.loads(done.stdout)["results"]["rows"]
    assert done.returncode == 1 and "runner.graphs became none: " in rows[0]["error"], rows


def test_the_requests_and_the_floor_are_those_of_nano_vllms_benchmark(imported):
    """Its totals, as its authors and others report them, and what Qwen3-0.6B needs at least on an H200: 36.2k tokens a
    second."""
    code = f"""
import sys; sys.path[:0] = [{str(GPU)!r}, {str(GPU.parent)!r}]
from card import Ceilings
from engine import Sizes, nano_floor
from serving import nano_requests
requests = nano_requests()
layers, head = 28 * (1024 * (2048 + 2 * 1024 + 2048) + 3 * 1024 * 3072), 151_936 * 1024
sizes = Sizes(layers, head, 2 * (layers + head), 28 * 2 * 8 * 128 * 2)
floor = nano_floor(requests, sizes, Ceilings(4300.0, 788.0))
print([sum(map(len, requests.prompts)), sum(requests.num_tokens), floor])
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    num_in, num_out, floor = ast.literal_eval(done.stdout)
    assert (num_in, num_out) == (142_827, 133_966)
    assert floor == pytest.approx(3.70, rel=0.01) and num_out / floor == pytest.approx(36.2e3, rel=0.01)


def test_a_device_is_busy_while_at_least_one_thing_runs(imported):
    from busy import share, spans_of

    assert share([(0, 10), (2, 4), (8, 12), (15, 20)]) == pytest.approx(17 / 20)
    assert share([]) is None
    events = [("kernel", 5, 1), ("cpu_op", 0, 100), ("gpu_memcpy", 8, 2)]
    trace = {"traceEvents": [{"cat": cat, "ts": ts, "dur": dur} for cat, ts, dur in events] + [{"ph": "M"}]}
    assert spans_of(trace) == [(5, 6), (8, 10)] and share(spans_of(trace)) == pytest.approx(3 / 5)


def test_targets_are_judged_by_the_worst_row_and_not_where_one_is_missing(imported):
    from targets import TARGETS, judge

    def rows(*fractions, **more):
        known = {"way": "triton", "case": "decode 32 x 4096", "kv_bytes": 1 << 29}
        return [known | {"fraction": fraction} | more for fraction in fractions]

    def verdict(found, target=0):
        return judge("attention", found)[target]["verdict"]

    assert verdict(rows(0.9, 0.86)) == "reached" and verdict(rows(0.9, 0.84)) == "not reached"
    assert verdict([]) == verdict(rows(0.9, "not measured")) == "not measured"
    assert verdict(rows(0.9) + rows(0.1, kv_bytes=1 << 20)) == "reached"
    assert verdict(rows(0.9, **{"times flash 3": 0.95}), 1) == "reached"
    passes = [{"kernel": "top-k, top-p and min-p", "fraction": 0.2, "times sort": 5.0}]
    assert [row["verdict"] for row in judge("kernels", passes)] == ["reached", "reached", "not measured"]
    few = [{"kernel": "w4a16 linear", "shape": f"{n} x 4096 x 14336", "times bf16": t} for n, t in ((1, 3), (256, 1))]
    assert judge("kernels", few)[2]["verdict"] == "reached"
    rates = [{"engine": "minivllm", "tokens_per_s": 30.0}, {"engine": "nano-vllm", "tokens_per_s": 20.0}]
    assert judge("peers", rates)[0]["measured"] == 1.5
    assert len(TARGETS) == 13
