"""The two benches that compare a server: over a tiny model, for the shape of what they print."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked

ROOT = Path(__file__).parent.parent.parent


def record_of(*command: str) -> dict:
    done = forked.run(*command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_overhead_of_the_server_is_measured_on_equal_texts():
    sizes = ["--streams", "3", "--input-len", "5", "--output-len", "8", "--singles", "2", "--rounds", "2"]
    fp32 = ["--set", "model.dtype=float32"]  # equal texts in any batch
    record = record_of("bench/serve_overhead.py", "--model", "dummy:tiny", *sizes, *fp32)
    results = record["results"]
    assert results["same"]["min"] == 1 and results["overhead"]["num_runs"] == 2
    assert all(results[name]["min"] > 0 for name in ("offline_rate", "server_rate", "server_ttft_ms"))
    assert all(results[name]["min"] >= 0 for name in ("server_us", "core_us", "client_us"))  # in ticks of 10 ms


def test_servers_take_turns_at_the_same_arrivals(tmp_path):
    few = ["--rates", "20", "--num-requests", "8", "--repetitions", "2", "--scale", "0.2", "--warmup", "2"]
    sides = ["--only", "minivllm", "vllm-unbound", "--peers", str(tmp_path)]
    results = record_of("bench/serve_beside.py", "--model", "dummy:tiny", "--max-model-len", "512", *few, *sides)[
        "results"
    ]
    (row,) = results["rows"]
    assert list(row["runs"]) == ["minivllm"] and "not installed" in results["left_out"]["vllm-unbound"]
    assert [run["failed"] for run in row["runs"]["minivllm"]] == [0, 0]
    assert all(run["ttft_p99"] >= run["ttft_p50"] > 0 and run["output_rate"] > 0 for run in row["runs"]["minivllm"])
