"""The benchmark of fidelity: on a machine that takes exactly what its profile says, nothing is off."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from machine_profiles import HOST, MODEL, make

from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import build_cluster
from minivllm.engine.build.engine import build_over
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.profile import ProfileCost, Terms
from minivllm.simulate.regression import OUTLIER, fit, fit_host
from minivllm.simulate.timeline import TimelineExecutor

BENCH = str(Path(__file__).parents[2] / "bench")
sys.path.insert(0, BENCH)  # only while importing: bench/attention.py would hide tests/attention

import fidelity  # noqa: E402

sys.path.remove(BENCH)

ARGS = {"model": MODEL, "threads": None, "clock": "real", "seconds": 4.0, "least": 12, "grid_seconds": 1.0, "seed": 0}


@pytest.fixture(scope="module")
def profile():
    return make()


@pytest.fixture
def bench():
    return fidelity.Bench(argparse.Namespace(**ARGS))


def simulated(config: EngineConfig) -> EngineConfig:
    return config.override({"executor.kind": "simulated", "executor.device": "b200", "model.dtype": "float32"})


def serve(bench, case, requests, profile) -> fidelity.Served:
    """By the loop of the real engine, whose executor takes what the profile says."""
    clock, stopwatch = VirtualClock(), VirtualClock()
    config, make_cost = simulated(bench.config(case.preset, case.pool)), lambda _, *of: ProfileCost(profile, *of)
    worker = SimulatedWorkerBuilder(config, clock=stopwatch, make_cost=make_cost).build()
    core = build_over(TimelineExecutor(worker, stopwatch, clock, HOST), config, clock=clock).core
    return fidelity.serve(core, 500, fidelity.BLOCK, requests, 100_000, clock)


CASES = fidelity.cases((*fidelity.SEEN, *fidelity.UNSEEN))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_small_pools_preempt_and_roomy_ones_do_not(case, bench, profile):
    config, make_cost = simulated(bench.config(case.preset, case.pool)), lambda _, *of: ProfileCost(profile, *of)
    found = build_cluster(config, 1, HOST, make_cost=make_cost).run(bench.requests(case, profile)).summary()
    assert (found["preemptions"] > 0) == (case.pool == "small") and found["num_refused"] == 0


@pytest.mark.parametrize("case", [CASES[1], CASES[-1]], ids=lambda case: case.name)
def test_a_machine_as_it_was_profiled_is_predicted_to_the_token(case, bench, profile):
    requests = bench.requests(case, profile)
    served = serve(bench, case, requests, profile)
    predicted = bench.simulate(case, requests, profile, "same")
    assert served.preemptions == predicted.preemptions > 0
    assert served.figures() == pytest.approx(predicted.figures(), rel=1e-6)


def test_what_a_run_recorded_says_what_its_steps_and_its_host_took(bench, profile):
    case = CASES[0]
    served = serve(bench, case, bench.requests(case, profile), profile)
    again = fit(served.samples, OUTLIER)
    assert again.errors["all"].mean < 0.02 and again.num_left_out == 0
    terms = Terms(profile)
    for sample in served.samples[::50]:  # TimelineExecutor's execute has the host's part in it
        assert sample.seconds == pytest.approx(terms(sample.step) + HOST.seconds(len(sample.step.num_new)), rel=1e-6)
    assert fit_host([(1, 1e-4), (2, 2e-4)])[1] == pytest.approx(1e-4)


def test_rows_say_how_far_the_simulator_is_off_and_how_far_two_runs_are_apart():
    def served(value: float) -> fidelity.Served:
        times = {"p50": value / 1e3, "p99": value / 1e3}
        return fidelity.Served({"output_tokens_per_s": value, "ttft": times, "itl": times}, 0)

    rows = list(fidelity.rows_of(CASES[0], [served(90), served(110)], served(106), served(120)))
    assert [row["metric"] for row in rows] == list(fidelity.BARS)
    assert all(row["error_percent"] == 6 and row["profile_error_percent"] == 20 for row in rows)
    assert [row["within"] for row in rows] == [False, True, True, True, True]
    throughput, *_ = fidelity.totals(rows)
    assert throughput["within"] == 0 and throughput["further_apart"] == 1 and throughput["apart_mean_percent"] == 22.22
