"""oneDNN's cache of compiled products has the capacity that its variable says, in the torch that is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minivllm.layers.linear import _onednn_packs

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(
    not _onednn_packs(torch.float32),
    reason="no packed products on this CPU",
)
def test_a_smaller_cache_keeps_less_of_the_same_products():
    command = [sys.executable, "bench/dense_memory.py", "--dtype", "float32", "--sizes", "48", "--capacities", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    own, one = json.loads(done.stdout)["results"]
    assert (own["capacity"], one["capacity"]) == (1024, 1)
    assert 0 < one["mib_by_sizes"]["47"] < 0.8 * own["mib_by_sizes"]["47"]
    assert own["compile_ms"] > 0
