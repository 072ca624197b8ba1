"""The benchmarks of the KV cache, small: what they claim in bench/results/ must hold in its order here."""

import json
import os
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parent.parent.parent
TINY = ("--model", "dummy:tiny", "--vocab", "256", "--set", "executor.num_threads=1")


def run(script, *args):
    done = forked.run(f"bench/{script}", *args, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=250)
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


def test_at_equal_memory_paging_holds_most_requests_at_once_and_the_longest_reservation_fewest():
    results = run("equal_memory.py", *TINY, "--num-requests", "40", "--repetitions", "1")
    at_once = [results["allocations"][name]["running"]["median"] for name in ("max", "pow2", "oracle", "paged")]
    assert at_once == sorted(at_once) and at_once[-1] > 1.3 * at_once[-2] and results["outputs_that_differ"] == 0
    assert results["paged_to"]["max"]["running"]["ratio"] == pytest.approx(at_once[3] / at_once[0], rel=1e-3)


def test_swapping_and_recomputing_are_compared_for_each_block_size():
    rows = run(
        "swap.py",
        *TINY,
        "--num-requests",
        "16",
        "--pool-tokens",
        "420",
        "--repetitions",
        "1",
        "--block-sizes",
        "4",
        "64",
    )
    assert [row["block_size"] for row in rows] == [4, 64]
    for row in rows:
        assert row["outputs_that_differ"] == 0 and row["one_preemption_swap_to_recompute"]["ratio"] > 0
        assert row["preemptions"].keys() == {"recompute", "swap"}
    assert rows[0]["preemptions"]["swap"]["median"] > 0


def test_sequences_of_one_prompt_share_its_blocks_and_beams_more_than_that():
    args = ("--scale", "0.25", "--num-prompts", "3", "--shapes", "sharegpt", "--widths", "2", "4")
    rows = {(row["kind"], row["width"]): row["saved_percent"] for row in run("sharing.py", *TINY, *args)}
    assert 0 < rows["parallel", 2] < rows["parallel", 4] < rows["beam", 4]
    assert rows["parallel", 2] < rows["beam", 2] < rows["beam", 4] < 75  # four sequences cannot share more
