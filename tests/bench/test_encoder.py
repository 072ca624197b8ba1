"""Whisper beside arriving recordings, a tiny one: the script counts what a step encodes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
from models.speech import save_speaking

ROOT = Path(__file__).parent.parent.parent


def test_a_bound_keeps_a_step_to_one_encode_and_without_one_a_step_has_them_all(tmp_path):
    save_speaking(tmp_path)
    small = ["--num-transcripts", "2", "--num-tokens", "50", "--num-new", "5", "--quiet-steps", "3", "--rounds", "1"]
    command = ["bench/encoder.py", "--model", str(tmp_path), "--num-threads", "1", *small]
    done = forked.run(*command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert results["bounded"]["most_encodes"] == 1 and results["unbounded"]["most_encodes"] == 5
    assert results["encode"]["p50"] > 0
    for name in ("bounded", "unbounded"):
        assert 0 < results[name]["loaded"]["p50"] <= results[name]["loaded"]["p99"] <= results[name]["loaded"]["max"]
