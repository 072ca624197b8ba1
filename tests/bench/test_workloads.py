"""Workloads are drawn from a seed, and have the shapes that they claim."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"
sys.path.insert(0, str(BENCH))  # only while importing: bench/attention.py would hide tests/attention

from workloads import (  # noqa: E402
    ALPACA_IN,
    ALPACA_OUT,
    SERVED_IN,
    SERVED_OUT,
    SHAREGPT_IN,
    SHAREGPT_OUT,
    WORKLOADS,
    draw,
)

sys.path.remove(str(BENCH))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_fixes_a_workload_and_another_seed_changes_it(name):
    assert draw(name, 1) == draw(name, 1)
    assert draw(name, 1).arrivals != draw(name, 2).arrivals


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_scene_has_room_for_each_of_its_requests(name):
    scene = draw(name, vocab=300, scale=0.25, num_requests=18)
    assert len(scene.arrivals) == 18
    assert [a.time_s for a in scene.arrivals] == sorted(a.time_s for a in scene.arrivals)
    for arrival in scene.arrivals:
        assert len(arrival.prompt_token_ids) >= 1 and arrival.max_tokens >= 1
        assert len(arrival.prompt_token_ids) + arrival.max_tokens <= scene.max_model_len <= scene.pool_tokens
        assert all(0 <= token < 300 for token in arrival.prompt_token_ids)


@pytest.mark.parametrize(
    ("name", "mean_in", "mean_out", "lengths"),
    [
        ("sharegpt", 161, 338, (SHAREGPT_IN, SHAREGPT_OUT)),
        ("sharegpt_served", 202, 179, (SERVED_IN, SERVED_OUT)),
        ("alpaca", 19, 58, (ALPACA_IN, ALPACA_OUT)),
    ],
)
def test_mean_lengths_are_those_of_the_paper(name, mean_in, mean_out, lengths):
    num = 10_000
    arrivals = draw(name, num_requests=num).arrivals
    drawn = [len(a.prompt_token_ids) for a in arrivals], [a.max_tokens for a in arrivals]
    for found, mean, shape in zip(drawn, (mean_in, mean_out), lengths, strict=True):
        # Four standard errors of the mean, half a token of the rounded figure, and half a token of rounded lengths.
        assert abs(np.mean(found) - mean) < 4 * np.std(found) / math.sqrt(num) + 1
        assert shape.low <= min(found) and max(found) <= shape.high
        assert np.mean(found) > 1.1 * np.median(found)  # a long tail, as of a log-normal


def test_scale_multiplies_lengths_and_not_the_number_of_requests():
    half, full = (draw("sharegpt", num_requests=4000, scale=scale).arrivals for scale in (0.5, 1.0))
    ratio = sum(a.num_tokens for a in half) / sum(a.num_tokens for a in full)
    assert len(half) == len(full) and abs(ratio - 0.5) < 0.01  # equal draws: only rounding differs


def test_arrivals_are_a_poisson_process_of_the_given_rate():
    num, rate = 10_000, 5.0
    gaps = np.diff([a.time_s for a in draw("alpaca", num_requests=num, rate=rate).arrivals])
    # A gap's standard deviation is its mean, 1 / rate; so is that of an exponential's own spread, within a few percent.
    assert abs(gaps.mean() - 1 / rate) < 4 / rate / math.sqrt(num)
    assert abs(gaps.std() * rate - 1) < 0.1


def test_an_infinite_rate_is_all_at_once():
    for name in WORKLOADS:
        assert {a.time_s for a in draw(name, rate=math.inf).arrivals} == {0.0}


def test_shared_prefix_is_shared_and_what_follows_is_not():
    arrivals = draw("shared_prefix", scale=0.5).arrivals
    assert len({tuple(a.prompt_token_ids[:170]) for a in arrivals}) == 1
    assert len({tuple(a.prompt_token_ids[170:]) for a in arrivals}) == len(arrivals)


def test_each_of_many_prefixes_is_shared_by_its_group_alone():
    arrivals = draw("many_prefixes", num_requests=200, scale=0.5, groups=5).arrivals
    groups = {tuple(a.prompt_token_ids[:170]): 0 for a in arrivals}
    for arrival in arrivals:
        groups[tuple(arrival.prompt_token_ids[:170])] += 1
    assert len(groups) == 5 and min(groups.values()) > 200 / 5 / 2
    assert len({tuple(a.prompt_token_ids[170:]) for a in arrivals}) == len(arrivals)


def test_a_2000_token_prompt_joins_eight_chats():
    arrivals = draw("long_prompt_among_chats").arrivals
    assert [a.kind for a in arrivals] == ["chat"] * 8 + ["long"]
    assert len(arrivals[-1].prompt_token_ids) == 2000 and arrivals[-1].time_s > 0


def test_memory_pressure_brings_five_times_what_its_pool_holds():
    scene = draw("memory_pressure", num_requests=100)
    assert 4.9 < sum(a.num_tokens for a in scene.arrivals) / scene.pool_tokens < 5.1


def test_parallel_sampling_asks_for_several_outputs_of_a_prompt():
    assert {a.n for a in draw("parallel_sampling", n=6).arrivals} == {6}


def test_drawing_a_workload_imports_no_torch():
    code = "import sys, workloads; workloads.draw('sharegpt'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=BENCH, check=True)


def test_sequences_of_one_prompt_count_it_once_and_each_output():
    for name, width in (("parallel_sampling", {"n": 6}), ("beam", {"width": 6})):
        for arrival in draw(name, **width).arrivals:
            assert arrival.num_sequences == 6 == max(arrival.n, arrival.beam_width)
            assert arrival.num_tokens == len(arrival.prompt_token_ids) + 6 * arrival.max_tokens


def test_a_pool_holds_a_group_of_sequences_though_each_keeps_the_prompt():
    scene = draw("beam", num_requests=1, width=6)
    (arrival,) = scene.arrivals
    assert scene.pool_tokens >= 6 * (len(arrival.prompt_token_ids) + arrival.max_tokens)
