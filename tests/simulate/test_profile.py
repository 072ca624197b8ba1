"""A profile of the machine at hand: measured, fitted, written, and taken by simulated devices."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from machine_profiles import BOUNDS, HOST, MODEL, make, samples, seconds_of, written

from minivllm.cli.profile import main
from minivllm.cli.simulate import main as simulate
from minivllm.config import EngineConfig
from minivllm.engine.build import profile as building
from minivllm.engine.build.capacity import error_of
from minivllm.engine.build.simulated import SimulatedWorkerBuilder
from minivllm.errors import ConfigError
from minivllm.plan import StepOutput
from minivllm.simulate.clock import VirtualClock
from minivllm.simulate.cost import Held, Step
from minivllm.simulate.machines import find_machine
from minivllm.simulate.measure import Bounds, Point, Stand, decodes, grid
from minivllm.simulate.profile import Terms, read_profile
from minivllm.simulate.regression import OUTLIER, fit, fit_host, nnls, solve

BEYOND = [Point((0,), (4000,)), decodes(256, 3000), Point((2000, 5), (1, 1500))]  # what nobody measured


# --------------------------------------------------------------------------------------------------------------- fits


def test_no_term_is_negative_and_none_could_be_better():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(12, 4)), rng.normal(size=12)

    def left(columns: tuple[int, ...]) -> float:
        part = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
        return float(np.linalg.norm(b - a[:, columns] @ part)) if (part >= 0).all() else np.inf

    subsets = [c for n in range(1, 5) for c in itertools.combinations(range(4), n)]
    found = nnls(a, b)
    assert (found >= 0).all()
    assert np.linalg.norm(b - a @ found) == pytest.approx(min(left(subset) for subset in subsets))


def test_a_fit_finds_the_terms_that_steps_were_made_of_and_goes_on_beyond_them():
    found = fit(samples())
    assert found.errors["all"].mean < 1e-3 and set(found.errors) == {"all", "decodes", "prompts", "both"}
    terms = Terms(make())
    for point in BEYOND:
        assert terms(point.step) == pytest.approx(seconds_of(point), rel=0.01)


def test_errors_are_of_steps_that_the_fit_had_not_seen():
    """Chance has no terms: what was fitted to half of it says nothing of the other half."""
    rng = np.random.default_rng(0)
    noisy = [sample._replace(seconds=sample.seconds * rng.uniform(0.5, 1.5)) for sample in samples()]
    assert fit(noisy).errors["all"].mean > 0.2


def test_steps_that_something_held_up_are_left_out_of_a_recorded_run():
    held_up = [s._replace(seconds=20 * s.seconds) if i % 20 == 0 else s for i, s in enumerate(samples())]
    found = fit(held_up, OUTLIER)
    assert found.num_left_out == len(held_up[::20]) and found.errors["all"].mean < 0.01
    assert fit(held_up).errors["all"].mean > 0.1


def test_held_up_steps_make_all_longer_in_the_mean_and_not_shorter():
    """Of errors relative to what was measured, the least are those of the shortest times."""
    terms, seconds = np.ones((4, 1)), np.array([1.0, 1.0, 1.0, 3.0])
    assert solve(terms, seconds)[0] == pytest.approx(1.5)


def test_a_hosts_pauses_are_not_its_work():
    steps = [(count, 50e-6 + 2e-6 * count) for count in (1, 4, 16) for _ in range(9)]
    assert fit_host([*steps, (1, 0.5), (16, 0.5)]) == pytest.approx((50e-6, 2e-6))


# ---------------------------------------------------------------------------------------------------------- measuring


class Known(Held):
    """A StepCost."""

    def __init__(self, device, shape, numbers):
        super().__init__(shape, numbers)

    def step_seconds(self, step: Step) -> float:
        return seconds_of(Point(tuple(step.start.tolist()), tuple(step.num_new.tolist())))

    def move_seconds(self, num_tokens: float, across: bool) -> float:
        return (20e-6 + num_tokens * (3e-6 if across else 1e-6)) if num_tokens else 0.0


@pytest.mark.parametrize("inputs", ["persistent", "rebuild"])
def test_plans_made_by_hand_run_through_the_engines_inputs_and_are_timed(inputs):
    options = {"model.path": MODEL, "executor.kind": "simulated", "executor.device": "b200", "kv.num_blocks": 900}
    options |= {"runner.inputs": inputs, "kv.preemption": "swap", "kv.swap_memory": "8MiB"}
    clock = VirtualClock()
    make_worker = partial(SimulatedWorkerBuilder, clock=clock, make_cost=Known)
    worker = make_worker(EngineConfig.build("v1", options)).build()
    bounds = Bounds(128, 2048, 2048, 900, 16)
    points = grid(bounds)
    assert len(points) > 50 and all(point.fits(bounds) for point in points)
    points = points[::3]
    stand = Stand(worker.execute, bounds, clock)
    assert stand.times(points[0])[-1] == pytest.approx(Known(*_of(worker)).step_seconds(_later(points[0])))
    found = fit([*stand.measure(points, 20.0), *stand.moves(100)])
    assert found.errors["all"].mean < 0.01
    assert found.seconds["moved_token"] == pytest.approx(3e-6, rel=1e-3)
    assert found.seconds["copied_token"] == pytest.approx(1e-6, rel=1e-3)


def _of(worker):
    return None, worker.cost.shape, worker.cost.numbers


def _later(point: Point) -> Step:
    """The last of its timed decodes."""
    return Point(tuple(start + 3 for start in point.start), point.num_new).step


def test_what_would_take_too_long_is_not_measured():
    clock = VirtualClock()

    def execute(plan):
        clock.now += 1e-3 * plan.total_tokens
        return StepOutput()

    found = Stand(execute, BOUNDS, clock).measure(grid(BOUNDS), 5.0)
    assert max(int(sample.step.num_new.sum()) for sample in found) == 48  # of 50 ms
    assert clock.now < 10


# ------------------------------------------------------------------------------------------------------------- files


def test_a_profile_is_a_device_of_simulate(tmp_path, capsys):
    asked = [MODEL, "--gpu", written(tmp_path), "--num-requests", "20", "--rate", "0.1", "--json", "-"]
    assert simulate(asked) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["host"] == {"step": pytest.approx(HOST.step), "request": pytest.approx(HOST.request)}
    decode = seconds_of(decodes(1, 512 + 64)) + HOST.seconds(1)
    assert record["result"]["itl"]["p50"] == pytest.approx(decode, rel=0.01)
    simulate([*asked, "--host", "none"])
    assert json.loads(capsys.readouterr().out)["host"] == {"step": 0.0, "request": 0.0}


def test_what_a_profile_says_is_what_was_written(tmp_path):
    path, first = written(tmp_path), make()
    again = read_profile(Path(path))
    assert (again.seconds, again.errors, again.model) == (first.seconds, first.errors, first.model)
    assert error_of(path) == first.errors["all"].mean and again.dtype == "float32"


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"schema": "minivllm.trace/1"}, "its schema is 'minivllm.trace/1'"),
        ({"seconds": {"step": 1.0}}, "no seconds of request"),
        ({"seconds": -1}, "damaged"),
        ({"host": {"step": 1.0}}, "its host has not step and request"),
        ({"memory": 0}, "it has no memory"),
        ({"unknown": 1}, "damaged"),
        ({"errors": {}}, "its errors"),
    ],
)
def test_a_damaged_profile_is_refused_in_a_sentence(changes, says, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(json.loads(Path(written(tmp_path)).read_text()) | changes))
    with pytest.raises(ConfigError, match=says) as error:
        find_machine(str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_none_is_refused_in_a_sentence(tmp_path):
    path = tmp_path / "here.json"
    with pytest.raises(ConfigError, match="no profile of a machine .No such file"):
        find_machine(str(path))
    path.write_text('{"schema": "minivllm.pro')
    with pytest.raises(ConfigError, match="damaged, not JSON"):
        find_machine(str(path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="its schema is None"):
        find_machine(str(path))


@pytest.mark.parametrize(
    "options, says",
    [
        (["dummy:tiny-moe"], "was measured with dummy:tiny, and says nothing of a model with"),
        ([MODEL, "--dtype", "bfloat16"], "says nothing of a model with dtype=bfloat16, not float32"),
        ([MODEL, "--kv-cache-dtype", "int8"], "says nothing of a model with kv_bytes=1, not 4"),
    ],
)
def test_another_model_than_was_measured_is_refused_in_a_sentence(options, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        simulate([*options, "--gpu", written(tmp_path), "--num-requests", "2"])


def test_several_of_a_measured_machine_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    with pytest.raises(ConfigError, match="executor.device=2xmachine.json: a machine that was measured"):
        find_machine("2xmachine.json")


# ----------------------------------------------------------------------------------------------------------- the whole


def test_the_command_measures_a_real_engine(tmp_path, monkeypatch, capsys):
    few = [decodes(1, 16), decodes(2, 16), decodes(4, 40), Point((0,), (8,)), Point((0,), (16,)), Point((9, 0), (1, 8))]
    monkeypatch.setattr(building, "grid", lambda bounds: few)
    monkeypatch.setattr(building, "HOST_BATCHES", (1, 2))
    out = tmp_path / "here.json"
    options = ["--max-model-len", "100", "--set", "kv.num_blocks=60", "--set", "executor.num_threads=1"]
    assert main(["dummy:tiny-short", *options, "--seconds", "0.5", "--out", str(out)]) == 0
    assert "decodes beside prompts" in capsys.readouterr().out
    profile = read_profile(out)
    assert {point["kind"] for point in profile.points} == {"decodes", "prompts", "both", "moves"}
    assert profile.host["step"] > 0 and profile.options["executor.num_threads"] == 1
    assert simulate(["dummy:tiny-short", "--gpu", str(out), "--num-requests", "3", "--output-len", "4"]) == 0


def test_time_that_is_none_and_a_machine_that_is_none_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([MODEL, "--seconds", "0"])
    assert "--seconds 0: must be above 0" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is no machine that could be measured"):
        main([MODEL, "--executor", "simulated"])
