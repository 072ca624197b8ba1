"""Each benchmark prints one JSON line that says what was measured, where and from which commit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
import pytest

from minivllm.features import INPUT_BUILDERS

ROOT = Path(__file__).parent.parent.parent


def run(script: str, *args: str) -> dict:
    done = forked.run(f"bench/{script}", *args, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    record = json.loads(line)
    assert record["schema"] == "minivllm.bench/1"
    assert {"date", "commit", "command", "machine", "versions", "params", "results"} <= record.keys()
    return record


def test_host_measures_each_phase_with_each_input_builder(tmp_path):
    out = tmp_path / "results.jsonl"
    args = ("--num-reqs", "1", "3", "--num-steps", "2", "--repetitions", "2", "--out", str(out))
    results = run("host.py", *args)["results"]
    rows = results["step_ms"]
    assert [(row["num_reqs"], row["inputs"]) for row in rows] == [
        (n, inputs) for n in (1, 3) for inputs in INPUT_BUILDERS.names()
    ]
    assert all(row[phase]["median"] > 0 for row in rows for phase in ("schedule", "prepare", "update", "trace"))
    ratios = [(row["num_reqs"], row["prepare"]) for row in results["ratios"]]
    assert [n for n, _ in ratios] == [1, 1, 3, 3] and all(0 < r["low"] <= r["ratio"] <= r["high"] for _, r in ratios)
    run("host.py", *args)
    assert len(out.read_text().splitlines()) == 2  # results are appended


def test_startup_splits_the_time_to_the_first_token():
    parts = run("startup.py", "--model", "dummy:tiny", "--runs", "1")["results"]["warm_seconds"]
    assert list(parts) == [
        "interpreter",
        "import torch",
        "import minivllm",
        "load",
        "first token",
        "beyond torch",
        "total",
    ]


@pytest.mark.parametrize("forward, inside", [("auto", "stack"), ("eager", "attention")])
def test_step_profile_times_the_parts_of_a_step(forward, inside):
    """All layers are one call, whose inside is not seen, or each is."""
    args = ("--model", "dummy:tiny", "--num-reqs", "2", "--length", "24", "--steps", "12", "--tries", "2")
    (row,) = run("step_profile.py", *args, "--forward", forward, "--quantization", "int4")["results"]
    assert {"sampler", "LM head", "prepare", "schedule", "update"} <= row["parts_ms"].keys()
    assert {"stack", "attention"} & row["parts_ms"].keys() == {inside}
    assert sum(row["bound_ms"].values()) > 0 and row["read_ms"] > 0


@pytest.mark.model
@pytest.mark.slow
def test_quality_compares_forms_of_the_weights_on_one_text():
    (row,) = run("quality.py", "--num-tokens", "6", "--forms", "int8")["results"]
    assert row["quantization"] == "int8" and row["positions"] == 36
    assert 0 < row["logprob_rms"] < 0.5 and 0 <= row["top1_percent"] < 50


@pytest.mark.model
@pytest.mark.slow
def test_offline_compares_with_transformers_on_the_same_tokens():
    args = ("--num-reqs", "2", "--rounds", "1", "--input-len", "8", "--output-len", "4")
    (row,) = run("offline.py", *args)["results"]
    assert row["ratio"]["median"] > 0 and set(row["tokens_per_second"]) == {"minivllm", "transformers"}


def test_offline_compares_with_another_checkout():
    args = ("--num-reqs", "1", "--rounds", "1", "--input-len", "8", "--output-len", "4", "--vocab", "500")
    (row,) = run("offline.py", *args, "--model", "dummy:tiny", "--before", str(ROOT))["results"]
    assert set(row["tokens_per_second"]) == {"minivllm", "before"} and row["equal_tokens"]["min"] == 4


@pytest.mark.model
def test_embed_compares_equal_vectors():
    (row,) = run("embed.py", "--num-texts", "8", "--longest", "12", "--rounds", "1")["results"]
    assert row["ratio"]["median"] > 0 and row["largest_difference"] < 1e-5


def test_spec_decode_compares_each_method_with_none():
    args = ("--model", "dummy:tiny", "--rounds", "1", "--num-tokens", "12", "--threads", "1", "--only", "json", "story")
    results = run("spec_decode.py", *args, "--dtype", "float32")["results"]
    for name in ("json", "story"):
        assert {"ms_per_token", "ngram", "suffix"} == results[name].keys()
        assert results[name]["suffix"]["same"] == "1/1"
    assert "copying, ngram" in results and "free, suffix" in results
