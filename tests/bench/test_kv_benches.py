"""The benchmarks of the KV cache, small: what they claim in bench/results/ must hold in its order here."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run(script, *args):
    command = [sys.executable, str(ROOT / "bench" / script), *args]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["results"]


def test_each_step_from_static_batches_to_paging_uses_more_of_the_pool():
    results = run("kv_waste.py", "--num-requests", "120")
    order = ["static", "orca-max", "orca-pow2", "orca-oracle", "v0"]
    for worse, better in zip(order, order[1:], strict=False):
        assert results[worse]["tokens"] < results[better]["tokens"]
        assert results[worse]["requests_at_once"] < results[better]["requests_at_once"]
        assert results[worse]["steps"] > results[better]["steps"]
    assert results["v0"]["tokens"] > 95 and results["v1"]["tokens"] > 95
    assert results["v0"]["internal"] < 1  # less than a block a request


def test_prefix_caching_without_hits_costs_little_beside_the_model():
    results = run("prefix.py", "--num-requests", "60", "--rounds", "3")
    assert results["overhead"]["hash"]["percent_of_model_time"]["median"] < 1
    assert set(results["lookup_and_eviction_us"]) == {"1000", "10000", "100000", "1000000"}
