"""The ablation: its metrics, its intervals, its comparisons, and one run from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"
sys.path.insert(0, str(BENCH))  # only while importing: bench/attention.py would hide tests/attention

import ablate  # noqa: E402
import comparisons  # noqa: E402
import drive  # noqa: E402
import drive_http  # noqa: E402
import latency  # noqa: E402
import plots  # noqa: E402

sys.path.remove(str(BENCH))

from minivllm.config import EngineConfig  # noqa: E402
from minivllm.errors import ConfigError  # noqa: E402
from minivllm.features import FEATURES, Conflict  # noqa: E402

# ---------------------------------------------------------------------------------------- metrics


def test_metrics_of_a_run_written_by_hand():
    # One request: wanted at 1 s, tokens at 2, 3 and 5 s; another: wanted at 2 s, its only token at 4 s.
    timelines = [
        latency.Timeline(1.0, 10, [2.0, 3.0, 5.0], [0, 1, 4], [7, 7, 7]),
        latency.Timeline(2.0, 20, [4.0], [3], [7]),
    ]
    steps = [latency.StepRecord(2.0, 30, 40, 0), latency.StepRecord(4.0, 10, 40, 2)]
    found = latency.metrics(timelines, steps)
    assert found["ttft_p50"] == 1500 and found["latency_p50"] == 3000  # medians of 1, 2 and of 4, 2 s
    assert found["itl_p50"] == 1500 and found["itl_max"] == 2000  # the gaps are 1 and 2 s
    assert found["tpot_p50"] == 500  # (4 - 1) / 3 and 0: latency = TTFT + TPOT * N
    assert found["throughput"] == (10 + 3 + 20 + 1) / 4
    assert found["host_ms"] == 3 and found["kv_used"] == 0.5 and found["preemptions"] == 2
    assert found["stall_steps"] == 2  # steps 2 and 3 brought the first request nothing


def test_latency_is_ttft_plus_tpot_times_output_tokens():
    timeline = latency.Timeline(0.25, 1, [1.0, 1.5, 3.25, 3.5], [0, 1, 2, 3], [1, 2, 3, 4])
    found = latency.metrics([timeline], [latency.StepRecord(1.0, 1, 1, 0)])
    assert found["latency_p50"] == pytest.approx(found["ttft_p50"] + 4 * found["tpot_p50"])


def test_metrics_are_those_of_the_table():
    found = latency.metrics([latency.Timeline(0.0, 1, [1.0], [0], [5])], [latency.StepRecord(1.0, 1, 1, 0)])
    assert found.keys() == latency.METRICS.keys() - {"kv_reserved", "kv_internal", "kv_external", "cpu_us"}


def test_waste_is_a_fraction_of_what_is_not_free_and_the_mean_of_its_samples():
    samples = [(0.2, 0.1, 0.1, 0.0), None, (0.5, 0.0, 0.0, 0.5)]
    steps = [latency.StepRecord(1.0, 1, 1, 0, waste) for waste in samples]
    found = latency.metrics([latency.Timeline(0.0, 1, [1.0], [0], [5])], steps)
    assert [found[f"kv_{part}"] for part in ("reserved", "internal", "external")] == pytest.approx([0.125, 0.125, 0.25])


# ---------------------------------------------------------------------------------------- intervals


def test_a_constant_ratio_has_an_interval_of_no_width():
    a = [1.0, 3.0, 0.5, 7.0, 2.0]  # the noise of a repetition cancels, because ratios are paired
    assert latency.bootstrap_ratio(a, [2 * x for x in a]) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_is_near_that_of_a_normal_mean():
    generator = np.random.default_rng(3)
    noise = generator.normal(0, 0.1, 400)
    ratio = latency.bootstrap_ratio([1.0] * 400, (1.5 * np.exp(noise)).tolist())
    half_width = 1.96 * noise.std() / 20  # of the mean logarithm
    # 10,000 resamples know a 2.5 % quantile to about 2 % of the half width; 10 % is ample.
    assert np.log(ratio.high / ratio.ratio) == pytest.approx(half_width, rel=0.1)
    assert np.log(ratio.ratio / ratio.low) == pytest.approx(half_width, rel=0.1)
    assert ratio == latency.bootstrap_ratio([1.0] * 400, (1.5 * np.exp(noise)).tolist())  # seeded


def test_the_interval_covers_the_truth_nearly_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        b = np.exp(generator.normal(np.log(2), 0.2, 30)).tolist()
        ratio = latency.bootstrap_ratio([1.0] * 30, b, num=500)
        hits += ratio.low <= 2 <= ratio.high
    assert 180 <= hits <= 199  # 95 % of 200 is 190; its standard deviation is 3, and percentiles are a little narrow


def test_a_count_of_zero_has_no_ratio_and_all_repetitions_must_agree():
    assert latency.bootstrap_ratio([0, 1], [1, 1]) is None
    assert latency.verdict("stall_steps", None, [3, 4, 5], [0, 0, 1]) == "better"
    assert latency.verdict("stall_steps", None, [0, 0, 0], [1, 2, 1]) == "worse"
    assert latency.verdict("stall_steps", None, [3, 0, 5], [0, 0, 1]) == ""


@pytest.mark.parametrize(
    ("metric", "ratio", "means"),
    [
        ("throughput", (1.2, 1.1, 1.3), "better"),
        ("throughput", (0.8, 0.7, 0.9), "worse"),
        ("itl_p99", (1.2, 1.1, 1.3), "worse"),
        ("itl_p99", (0.8, 0.7, 0.9), "better"),
        ("itl_p99", (0.9, 0.7, 1.1), ""),
    ],
)
def test_only_an_interval_without_1_is_better_or_worse(metric, ratio, means):
    assert latency.verdict(metric, latency.Ratio(*ratio)) == means


def test_a_difference_is_decided_at_99_percent_and_none_by_a_narrow_interval():
    generator = np.random.default_rng(0)

    def b(effect: float, noise: float, num: int = 10) -> list[float]:
        return np.exp(np.log(effect) + generator.normal(0, noise, num)).tolist()

    one = [1.0] * 10
    assert latency.is_decided(one, b(1.5, 0.05), 0.02)  # ten standard deviations away
    assert latency.is_decided(one, b(1.0, 0.001), 0.02)  # equal, and the interval is a tenth of the width
    assert not latency.is_decided(one, [0.8, 1.2] * 5, 0.02)  # 1 is in the middle of a wide one
    assert latency.is_decided([0] * 10, one, 0.02)  # a count of 0 has no interval to wait for
    # Of all noise for which the 95 % interval just leaves 1 out, the 99 % one holds it: asked again.
    found = [latency.bootstrap_ratio(one, b(1.03, 0.05)) for _ in range(50)]
    assert any(not ratio.low <= 1 <= ratio.high for ratio in found)


def test_equal_engines_are_rarely_called_different_though_it_is_looked_several_times():
    """The rule of bench/ablate.py: 10, 20 and 40 repetitions. 11 % of 600 were; of 60 that is 7, 15 is four sigma."""
    generator, deceived = np.random.default_rng(1), 0
    for _ in range(60):
        b = np.exp(generator.normal(0, 0.07, 40)).tolist()
        num = next((num for num in (10, 20) if latency.is_decided([1.0] * num, b[:num], 0.02)), 40)
        ratio = latency.bootstrap_ratio([1.0] * num, b[:num])
        deceived += not ratio.low <= 1 <= ratio.high
    assert deceived <= 15


def test_what_is_not_found_is_said_within_the_farther_end():
    assert latency.undecided_within(latency.Ratio(1.0, 0.8, 1.1)) == pytest.approx(0.25)
    assert latency.undecided_within(latency.Ratio(1.0, 0.95, 1.2)) == pytest.approx(0.2)


# ---------------------------------------------------------------------------------------- comparisons

A = {"kv.prefix": "none", "scheduler.chunked_prefill": False, "runner.inputs": "rebuild", "kv.block_size": 8}


def configs(a: dict | None = None) -> tuple[EngineConfig, EngineConfig]:
    return EngineConfig.build("v1", A if a is None else a), EngineConfig.build("v1")


def test_the_path_leads_from_a_to_b_one_switch_at_a_time_in_the_order_of_the_table():
    a, b = configs()
    path = [c for c in comparisons.plan_comparisons(a, b)[0] if c.kind == "path"]
    assert [c.switch.name for c in path] == ["chunked_prefill", "prefix", "inputs", "kv.block_size"]
    assert path[0].a == a and path[-1].b == b
    assert all(before.b == after.a for before, after in zip(path, path[1:], strict=False))
    assert all(len(comparisons.switches(c.a, c.b)) == 1 for c in path)


def test_alone_takes_one_switch_out_of_b():
    a, b = configs()
    alone = [c for c in comparisons.plan_comparisons(a, b)[0] if c.kind == "alone"]
    assert len(alone) == len(A)
    for comparison in alone:
        assert comparison.b == b
        ((field, values),) = comparison.switch.changes.items()
        assert comparison.a == b.override({field: values[0]}) and values == (a.get(field), b.get(field))


def test_one_difference_is_one_comparison_on_its_own_workload():
    ((comparison,), skipped) = comparisons.plan_comparisons(*configs({"kv.prefix": "none"}))
    assert (comparison.kind, comparison.workload, comparison.switch.metric) == ("whole", "shared_prefix", "ttft_p50")
    assert not skipped


def test_equal_configurations_are_refused():
    with pytest.raises(ConfigError, match="equal"):
        comparisons.plan_comparisons(*configs({}))


def test_a_switch_that_conflicts_with_what_comes_later_waits_for_it(monkeypatch):
    conflict = Conflict(("chunked_prefill", True), ("prefix", "none"), "for this test")
    monkeypatch.setattr("minivllm.config.CONFLICTS", (conflict,))
    found, skipped = comparisons.plan_comparisons(*configs())
    path = [c for c in found if c.kind == "path"]
    assert [c.switch.name for c in path] == ["prefix", "chunked_prefill", "inputs", "kv.block_size"]
    assert path[-1].b == configs()[1]
    assert not skipped
    alone = [c for c in found if c.kind == "alone"]
    assert [c.switch.name for c in alone][:2] == ["chunked_prefill", "prefix + chunked_prefill"]
    assert alone[1].workload == "shared_prefix"  # the switch's own


def test_switches_that_need_each_other_go_together(monkeypatch):
    either = Conflict(("chunked_prefill", True), ("prefix", "none"), "for this test")
    other = Conflict(("chunked_prefill", False), ("prefix", "hash"), "for this test")
    monkeypatch.setattr("minivllm.config.CONFLICTS", (either, other))
    path = [c for c in comparisons.plan_comparisons(*configs())[0] if c.kind == "path"]
    assert [c.switch.name for c in path] == ["inputs", "kv.block_size", "chunked_prefill + prefix"]
    assert path[-1].b == configs()[1]


def test_what_cannot_be_compared_is_said(monkeypatch):
    a, b = configs({"kv.prefix": "none", "kv.block_size": 8})
    conflict = Conflict(("inputs", "persistent"), ("prefix", "none"), "for this test")
    monkeypatch.setattr("minivllm.config.CONFLICTS", (conflict,))
    _, skipped = comparisons.plan_comparisons(a, b)
    assert len(skipped) == 1 and "prefix" in skipped[0] and "for this test" in skipped[0]


# ---------------------------------------------------------------------------------------- a run


SMALL = ["--quick", "--model", "dummy:tiny", "--scale", "0.1"]


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("ablate") / "ablate-test.json"
    args = [*SMALL, "--virtual", "--repetitions", "2", "--out", str(out)]
    assert ablate.main([*args, "--set-a", "kv.prefix=none", "--set-a", "runner.inputs=rebuild"]) == 0
    return out


def test_a_run_measures_every_metric_in_every_repetition(result):
    record = json.loads(result.read_text())
    assert record["schema"] == "minivllm.bench/1" and record["bench"] == "ablate"
    rows = record["results"]["rows"]
    assert [(row["kind"], row["switch"]) for row in rows[1:]] == [
        (kind, switch) for kind in ("path", "alone") for switch in ("prefix", "inputs")
    ]
    for row in rows:
        assert row["outputs"]["num_different"] == 0 < row["outputs"]["num"]
        for side in "ab":
            assert row["values"][side].keys() == latency.METRICS.keys() - {"cpu_us"}
            assert all(len(values) == 2 for values in row["values"][side].values())
        assert 0 < row["ratios"]["throughput"]["low"] <= row["ratios"]["throughput"]["ratio"]


def test_virtual_time_makes_the_same_plans_again(result, tmp_path):
    out = tmp_path / "again.json"
    args = [*SMALL, "--virtual", "--repetitions", "2", "--out", str(out), "--kinds", "whole"]
    ablate.main([*args, "--set-a", "kv.prefix=none", "--set-a", "runner.inputs=rebuild"])
    first, again = (json.loads(path.read_text())["results"]["rows"][0]["values"] for path in (result, out))
    for name in ("kv_used", "preemptions", "stall_steps", "num_steps"):
        assert [first[side][name] for side in "ab"] == [again[side][name] for side in "ab"]


def test_virtual_time_comes_to_every_arrival():
    """An engine that has nothing to do goes to the next arrival, also to one that rounding would put behind itself."""

    class Core:
        has_work, is_settled, clock = False, True, staticmethod(lambda: 0.0)
        added: list = []

        def add(self, request):
            self.added.append(request.id)
            self.has_work = True

        def step(self):
            self.has_work = False
            return []

    class Nobody:
        def expect(self, request, arrival, num_in):
            pass

    drawn = np.random.default_rng(0).random(1000).tolist()
    times = sorted(at for at in drawn if at * drive.VIRTUAL_STEPS / drive.VIRTUAL_STEPS < at)[:3]
    arrivals = [drive.Arrival(at, [1], 1) for at in (0.0, *times)]
    assert len(arrivals) == 4, "no time is rounded down"
    requests = [(a.time_s, drive.engine_requests(str(i), a, 0)) for i, a in enumerate(arrivals)]
    drive.drive(Core(), requests, Nobody(), virtual=True)
    assert Core.added == ["0", "1", "2", "3"]


def test_real_time_counts_the_wait_from_when_the_workload_wanted_the_request(tmp_path):
    out = tmp_path / "real.json"
    args = ["--quick", "--model", "dummy:tiny", "--repetitions", "1", "--rate", "30", "--out", str(out)]
    assert ablate.main([*args, "--set-a", "kv.prefix=none", "--workload", "alpaca"]) == 0
    (row,) = json.loads(out.read_text())["results"]["rows"]
    assert min(row["values"]["a"]["ttft_p50"]) > 0


@pytest.mark.parametrize("workload", ["beam", "parallel_sampling", "memory_pressure"])
def test_sequences_of_one_prompt_are_driven_and_come_out_equal(workload, tmp_path):
    out = tmp_path / "beams.json"
    num = {"memory_pressure": "12"}.get(workload, "4")
    args = ["--model", "dummy:tiny", "--scale", "0.1", "--num-requests", num, "--rate", "1000", "--repetitions", "1"]
    assert ablate.main([*args, "--from", "v0", "--workload", workload, "--kinds", "whole", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["results"]["rows"]
    assert row["outputs"]["num"] == (12 if workload == "memory_pressure" else 4 * 4)
    for side in "ab":
        assert row["values"][side]["ttft_p50"][0] < row["values"][side]["latency_p50"][0]
        assert (row["values"][side]["preemptions"][0] > 0) == (workload == "memory_pressure")  # which needs few blocks


def test_a_path_on_one_workload_is_measured_together_and_its_steps_multiply_up_to_the_whole(tmp_path):
    out = tmp_path / "path.json"
    args = ["--model", "dummy:tiny", "--scale", "0.05", "--virtual", "--num-requests", "7", "--repetitions", "2"]
    args += ["--workload", "mixed", "--kinds", "whole", "path", "--out", str(out), "--set", "executor.num_threads=1"]
    assert ablate.main([*args, "--set-a", "kv.prefix=none", "--set-a", "kv.fork=share"]) == 0
    whole, *path = json.loads(out.read_text())["results"]["rows"]
    assert [(row["kind"], row["switch"]) for row in path] == [("path", "prefix"), ("path", "fork")]
    assert path[0]["values"]["a"] == whole["values"]["a"] and path[-1]["values"]["b"] == whole["values"]["b"]
    assert all(one["values"]["b"] == other["values"]["a"] for one, other in zip(path, path[1:], strict=False))
    together = np.prod([row["ratios"]["throughput"]["ratio"] for row in path])
    assert together == pytest.approx(whole["ratios"]["throughput"]["ratio"], rel=1e-2)  # rounded to four digits each


@pytest.mark.parametrize("is_decided, repetitions", [(True, 2), (False, 8)])
def test_it_ends_when_the_intervals_have_decided_or_at_the_most(is_decided, repetitions, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(ablate, "is_decided", lambda a, b, width: asked.append(len(a)) or is_decided)
    out = tmp_path / "rounds.json"
    args = ["--model", "dummy:tiny", "--scale", "0.05", "--virtual", "--num-requests", "2", "--rate", "1000"]
    args += ["--repetitions", "2", "--max-repetitions", "8", "--workload", "alpaca", "--out", str(out)]
    ablate.main([*args, "--set-a", "kv.prefix=none"])
    (row,) = json.loads(out.read_text())["results"]["rows"]
    assert row["repetitions"] == repetitions == len(row["values"]["a"]["throughput"])
    assert asked == ([2] if is_decided else [2, 4, 8]), "it is asked at 2, twice as many, and so on"
    assert f"{repetitions} repetitions" in plots.markdown(json.loads(out.read_text()))


def test_the_mixed_workload_has_something_for_every_switch():
    scene = ablate.draw("mixed")
    kinds = [arrival.kind for arrival in scene.arrivals]
    assert set(kinds) == {"chat", "answer", "alone", "beam", "long"}
    shared = {tuple(a.prompt_token_ids[:341]) for a in scene.arrivals if a.kind in ("chat", "answer")}
    assert len(shared) == 1, "no common beginning"
    assert max(len(a.prompt_token_ids) for a in scene.arrivals) == 1500
    assert any(a.beam_width for a in scene.arrivals)
    assert scene.pool_tokens < sum(a.num_tokens for a in scene.arrivals) / 2, "the pool holds them all at once"


def test_no_panel_has_two_metrics_and_each_shows_what_it_is_for(result):
    rows = json.loads(result.read_text())["results"]["rows"]
    own = plots.plot_own(rows)
    titles = [axes.get_title(loc="left") for axes in own.axes]
    assert titles == [latency.METRICS[name].what for name in latency.METRICS if any(r["metric"] == name for r in rows)]
    assert sum(len(axes.get_yticks()) for axes in own.axes) == len(rows)
    path = plots.plot_path([row for row in rows if row["kind"] != "alone"])
    titles = [axes.get_title().replace("\n", " ") for axes in path.axes]
    wanted = {*plots.PANELS, *(row["metric"] for row in rows if row["kind"] == "path")}
    assert titles == [latency.METRICS[name].what for name in latency.METRICS if name in wanted]


def test_plots_and_table_are_written_beside_the_result(result):
    written = [result.with_suffix(suffix) for suffix in (".png", ".svg", ".md")]  # by the one command
    assert written == plots.write(result)
    assert [path.suffix for path in written] == [".png", ".svg", ".md"]
    png, svg, md = (path.read_bytes() for path in written)
    assert png.startswith(b"\x89PNG") and b"<svg" in svg
    assert md.decode().count("\n|") == 2 + 5  # head, rule, and a line a comparison


def a_record(low: float, high: float, different: int = 0, repetitions: int = 5) -> dict:
    switch = comparisons.Switch("prefix", {"kv.prefix": ("none", "hash")}, "shared_prefix", "ttft_p50")
    comparison = comparisons.Comparison("whole", switch, *configs(), "shared_prefix")
    values = {
        "a": [dict.fromkeys(latency.METRICS, 1.0) for _ in range(repetitions)],
        "b": [dict.fromkeys(latency.METRICS, value) for value in np.linspace(low, high, repetitions)],
    }
    row = ablate.row(comparison, values, {"num": 4, "num_different": different})
    params = {"repetitions": 2, "model": "m", "dtype": "float32", "virtual": False}
    machine = {"num_cores": 2, "cpu": "c"}
    results = {"from": "v1", "to": "v1", "rows": [row], "skipped": []}
    row["shape"] = {"scale": 0.5}
    return {"params": params, "machine": machine, "commit": "c", "date": "2026-11-21T", "results": results}


@pytest.mark.parametrize(
    ("low", "high", "says"), [(1.2, 1.3, "**LOSES**"), (0.5, 0.6, "wins"), (0.9, 1.1, "no difference found within")]
)
def test_a_switch_that_loses_is_marked_in_the_table_and_the_title_concludes(low, high, says):
    record = a_record(low, high)
    assert says in plots.markdown(record)
    word = {"wins": "better", "**LOSES**": "worse"}.get(says, "no difference")
    assert word in plots.conclusion(record) and "prefix: none → hash" in plots.conclusion(record)


def test_too_few_repetitions_mark_nothing():
    assert "no difference shown" in plots.markdown(a_record(1.2, 1.3, repetitions=ablate.ENOUGH - 1))


def test_outputs_that_differ_are_said_loudly():
    record = a_record(1.0, 1.0, different=3)
    assert "OUTPUTS DIFFER (3 of 4)" in plots.markdown(record) and "OUTPUTS" in plots.conclusion(record)


def test_a_pool_has_equal_memory_whatever_its_block_size():
    scenes = [ablate.draw("fixed", num_requests=3, scale=0.5)]
    sizes = []
    for block_size in (1, 16):
        config = drive.sized(EngineConfig.build(overrides={"kv.block_size": block_size}), scenes, None)
        sizes.append(config.kv.num_blocks * block_size)
    assert 0 <= sizes[1] - sizes[0] <= 31  # rounded up to blocks, and one more


def test_a_core_in_another_process_is_refused():
    with pytest.raises(ConfigError, match="engine.core=process"):
        drive.Side(EngineConfig.build("v1", {"engine.core": "process"}))


def test_clients_see_what_needs_no_step():
    found = latency.request_metrics([latency.Timeline(0.0, 1, [1.0], [0], [5])])
    assert {*found, "cpu_us"} == {*latency.SEEN_BY_CLIENTS} <= latency.METRICS.keys()
    told = [ablate.seen_by("http", name) for name in ("itl_p99", "host_ms", "kv_used")]
    assert told == ["itl_p99", "cpu_us", "throughput"] and ablate.seen_by("core", "host_ms") == "host_ms"


def test_servers_are_driven_over_http_and_the_core_s_process_is_a_switch_there(tmp_path):
    out = tmp_path / "served.json"
    args = ["--over", "http", "--model", "dummy:tiny", "--set", "executor.kind=simulated", "--scale", "0.1"]
    args += ["--workload", "parallel_sampling", "--num-requests", "4", "--rate", "200", "--repetitions", "2"]
    sides = ["--set-a", "runner.inputs=rebuild", "--set-b", "engine.core=process", "--kinds", "path"]
    assert ablate.main([*args, *sides, "--out", str(out)]) == 0
    inputs, row = json.loads(out.read_text())["results"]["rows"]
    assert inputs["metric"] == "cpu_us" and inputs["ratios"]["cpu_us"]["ratio"] > 0  # it was made for host_ms
    assert row["changes"] == {"engine.core": ["inproc", "process"]} and row["outputs"]["num"] == 2 * 4 * 4
    for side in "ab":
        values = row["values"][side]
        assert min(values["throughput"] + values["cpu_us"]) > 0 and "host_ms" not in values
        assert all(0 < first <= last for first, last in zip(values["ttft_p50"], values["latency_p50"], strict=True))


@pytest.mark.parametrize(
    ("workload", "says"), [("beam", "beams cannot be timed"), ("alpaca", "which --over http cannot see")]
)
def test_what_a_client_cannot_see_is_refused(workload, says, tmp_path, capsys):
    args = ["--over", "http", "--model", "dummy:tiny", "--set", "executor.kind=simulated", "--set-a", "kv.prefix=none"]
    args += ["--workload", workload, "--scale", "0.1", "--repetitions", "1", "--out", str(tmp_path / "no.json")]
    if workload == "beam":
        ablate.main(args)
    else:
        with pytest.raises(SystemExit):
            ablate.main([*args, "--virtual"])
    told = capsys.readouterr()
    assert says in told.out + told.err


def test_a_server_is_told_all_that_differs_from_its_preset():
    config = EngineConfig.build("v0", {"model.path": "dummy:tiny", "kv.prefix": "hash", "kv.num_blocks": 7})
    told = drive_http.command_of(config.override({"engine.core": "inproc"}))
    assert told[told.index("--preset") + 1] == "v0"
    sets = {word for flag, word in zip(told, told[1:], strict=False) if flag == "--set"}
    assert sets == {"model.path=dummy:tiny", "kv.prefix=hash", "kv.num_blocks=7", "engine.core=inproc"}


def test_the_feature_table_names_workloads_and_metrics_that_exist():
    for feature in FEATURES:
        assert feature.workload in ("", *ablate.WORKLOADS), feature.name
        assert feature.metric in ("", *latency.METRICS), feature.name
