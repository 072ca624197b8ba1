"""Traces: what was recorded is what happened, and can be run again."""

from __future__ import annotations

import errno
import json
import math
import os

import pytest
from fakes import FakeEngine, FakeWorker

from minivllm import trace
from minivllm.config import EngineConfig
from minivllm.engine.build import build
from minivllm.errors import TraceError, UserError
from minivllm.executor.uni import UniExecutor
from minivllm.plan import AsyncOutput, Delta, Join, StepOutput, StepPlan, StepStats
from minivllm.request import EngineRequest, SamplingParams

PARAMS = SamplingParams(
    temperature=0.0,
    stop=["\n"],
    stop_token_ids=[2],
    logit_bias={5: -1.5},
    eos_token_ids=(0,),
    bad_words_token_ids=((1, 2),),
)


def hand_made_steps() -> list[tuple[StepPlan, StepOutput, list[Delta]]]:
    """Two requests: a is prefilled in two chunks beside b, b ends, a decodes."""
    joins = [Join("a", [1, 2, 3], 3, PARAMS), Join("b", [9, 8, 7], 2, SamplingParams(), adapter="x")]
    stats = StepStats(num_running=2, num_free_blocks=7, num_cached_blocks=1, num_total_blocks=10)
    logprobs = {"b": [[(4, -0.5, 1), (6, -math.inf, 2)]]}
    return [
        (StepPlan(0, {"b": 1, "a": 2}, {"b": 2, "a": 0}, joins, {"a": [3, 4], "b": [0]}, [], stats),
         StepOutput({"b": [4]}, logprobs, {"a": [[(2, -1.0, 3)]]}),
         [Delta("b", [4], finish_reason="stop", stop_reason=4)]),
        (StepPlan(1, {"a": 1}, {"a": 2}, leaves=["b"], stats=stats), StepOutput({"a": [5]}), [Delta("a", [5])]),
        (StepPlan(2, {"a": 1}, {"a": 3}, new_blocks={"a": [6]}, stats=stats), StepOutput({"a": [7]}), []),
    ]  # fmt: skip


class Clock:
    """A second passes between any two looks."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def recorded(tmp_path):
    """A trace of the steps above, with b's arrival and an abort of a."""
    recorder = trace.TraceRecorder(tmp_path / "run.jsonl", clock=Clock())
    recorder.on_start({"kv.prefix": "none"}, {"num_blocks": 10})
    recorder.on_add(EngineRequest("b", [9, 8], PARAMS, 1.5, priority=2, cache_salt="s"), 0)
    for step in hand_made_steps():
        recorder.on_step(*step, {"schedule": 2.0, "execute": 500.0})
    recorder.on_abort("a")
    recorder.close()
    return tmp_path / "run.jsonl"


class Scripted:
    """An executor that gives prepared outputs."""

    def __init__(self, outputs):
        self.outputs = list(outputs)
        self.plans = []

    def submit(self, plan):
        self.plans.append(plan)
        return AsyncOutput.ready(self.outputs.pop(0))


def fake_run(path, **overrides) -> FakeEngine:
    """Six requests over a pool that is too small for them, so that some are preempted and recomputed."""
    engine = FakeEngine(num_blocks=12, **{"scheduler.max_num_batched_tokens": 16, **overrides})
    engine.core.observers.append(trace.TraceRecorder(path))
    engine.core.observers[0].on_start(engine.config.flat(), {"num_blocks": 12})
    for i in range(6):
        engine.add(f"r{i}", [i, *range(20, 20 + 2 * i)], max_tokens=12)
    engine.run()
    engine.core.shutdown()
    return engine


def test_a_recorded_plan_and_output_are_rebuilt_exactly(recorded):
    steps = hand_made_steps()
    assert trace.plans(recorded) == [plan for plan, _, _ in steps]
    assert [list(p.num_tokens) for p in trace.plans(recorded)] == [["b", "a"], ["a"], ["a"]]  # the batch order
    assert [trace.output_of(r) for r in trace.read(recorded).steps()] == [out for _, out, _ in steps]


def test_arrivals_are_rebuilt_exactly(recorded):
    expected = EngineRequest("b", [9, 8], PARAMS, 1.5, priority=2, cache_salt="s")
    assert trace.requests(recorded) == [(1.0, expected)]


def test_the_schema_is_what_the_docstring_says(recorded):
    header, add, first, second, _, abort = map(json.loads, recorded.read_text().splitlines())
    assert list(header) == ["schema", "versions", "machine", "config", "info"]
    assert header["schema"] == "minivllm.trace/1" and header["versions"]["minivllm"]
    assert (add["type"], add["step"], add["request"]["id"]) == ("add", 0, "b")
    assert first["sched"] == [["b", 1, 2], ["a", 2, 0]]
    assert first["times"] == {"schedule": 2.0, "execute": 500.0}
    assert first["stats"]["num_free_blocks"] == 7 and first["stats"]["num_cached_blocks"] == 1
    assert first["new_blocks"] == {"a": [3, 4], "b": [0]} and second["leaves"] == ["b"]
    assert first["finished"] == {"b": ["stop", 4]} and "finished" not in second
    assert first["logprobs"]["b"][0][1] == [6, None, 2]  # -inf
    assert (abort["type"], abort["step"], abort["id"]) == ("abort", 3, "a")


def test_every_line_is_on_disk_when_it_is_written(tmp_path):
    recorder = trace.TraceRecorder(tmp_path / "run.jsonl")
    recorder.on_start({}, {})
    for i, step in enumerate(hand_made_steps()):
        recorder.on_step(*step, {})
        assert len(trace.plans(tmp_path / "run.jsonl")) == i + 1


def test_a_trace_cut_by_a_kill_is_read_up_to_its_last_whole_line(recorded):
    data = recorded.read_bytes()
    last_step = data.rindex(b'{"type":"step"')
    for cut in range(last_step, data.index(b"\n", last_step)):
        recorded.write_bytes(data[:cut])
        assert trace.plans(recorded) == [plan for plan, _, _ in hand_made_steps()[:2]]


def test_a_file_that_is_no_trace_is_a_clear_error(tmp_path, recorded):
    other = tmp_path / "other.jsonl"
    other.write_text('{"schema": "something else"}\n')
    with pytest.raises(UserError, match="other.jsonl is not a trace"):
        trace.read(other)
    lines = recorded.read_bytes().splitlines(keepends=True)
    recorded.write_bytes(b"".join([lines[0], lines[1][:10] + b"\n", *lines[2:]]))
    with pytest.raises(UserError, match="line 2 is damaged"):
        trace.read(recorded)
    with pytest.raises(UserError, match="cannot read the trace"):
        trace.read(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="cannot write the trace"):
        trace.TraceRecorder(tmp_path / "no" / "folder.jsonl")


def test_a_disk_that_is_full_ends_the_trace_and_not_the_run(caplog):
    engine = FakeEngine()
    engine.core.observers.append(recorder := trace.TraceRecorder("/dev/full"))
    recorder.on_start({}, {})
    engine.add("a", [1, 2, 3], max_tokens=3)
    while engine.core.has_work:
        engine.core.step()
    recorder.close()
    (record,) = caplog.records
    assert "the trace /dev/full ends here" in record.getMessage() and "No space left" in record.getMessage()


def test_a_disk_that_fills_up_leaves_all_lines_before(tmp_path, monkeypatch, caplog):
    write, room = os.write, [400]

    def until_full(fd, data):
        room[0] -= (taken := write(fd, data[: room[0]]) if room[0] else 0)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken

    recorder = trace.TraceRecorder(tmp_path / "run.jsonl")
    recorder.on_start({"kv.prefix": "none"}, {"num_blocks": 10})
    whole = (tmp_path / "run.jsonl").read_bytes()
    monkeypatch.setattr(trace.os, "write", until_full)
    for step in hand_made_steps():
        recorder.on_step(*step, {"schedule": 2.0})
    monkeypatch.undo()
    written = (tmp_path / "run.jsonl").read_bytes()
    assert written.startswith(whole) and len(written) == len(whole) + 400 and len(caplog.records) == 1
    assert trace.read(tmp_path / "run.jsonl").header["config"] == {"kv.prefix": "none"}


def test_earlier_traces_of_a_name_are_kept_up_to_a_number(tmp_path):
    path = tmp_path / "run.jsonl"
    for run in range(trace.NUM_KEPT + 3):
        trace.keep_earlier(path)
        path.write_text(str(run))
    kept = {file.name: file.read_text() for file in tmp_path.iterdir()}
    newest = trace.NUM_KEPT + 2
    assert kept == {"run.jsonl": str(newest)} | {
        f"run.jsonl.{age}": str(newest - age) for age in range(1, trace.NUM_KEPT + 1)
    }


def test_replay_submits_the_recorded_plans_and_finds_equal_tokens(recorded):
    executor = Scripted(out for _, out, _ in hand_made_steps())
    assert trace.replay(recorded, executor) == trace.ReplayReport(num_steps=3, num_tokens=3, divergence=None)
    assert executor.plans == [plan for plan, _, _ in hand_made_steps()]


@pytest.mark.parametrize("wrong", [{"a": [6]}, {}, {"a": [5], "b": [1]}])
def test_replay_names_step_and_request_of_the_first_divergence(recorded, wrong):
    outputs = [out for _, out, _ in hand_made_steps()]
    outputs[1] = StepOutput(wrong)
    report = trace.replay(recorded, Scripted(outputs))
    req_id = "b" if "b" in wrong else "a"
    expected = {"a": [5]}.get(req_id, [])
    assert report.divergence == (1, req_id, expected, wrong.get(req_id, []))
    assert report.num_steps == 2


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("inputs", ["rebuild", "persistent"])
def test_a_recorded_run_with_preemptions_replays_on_a_fresh_worker(tmp_path, inputs, overlap):
    engine = fake_run(tmp_path / "run.jsonl", **{"engine.overlap": overlap})
    recorded = trace.plans(tmp_path / "run.jsonl")
    assert sum(plan.stats.num_preempted for plan in recorded) > 0
    report = trace.replay(tmp_path / "run.jsonl", UniExecutor(lambda: FakeWorker(engine.worker.sizes, inputs)))
    assert report.divergence is None and report.num_steps == len(recorded)
    num_tokens = sum(map(len, engine.tokens.values()))
    assert report.num_tokens == num_tokens if overlap == 1 else report.num_tokens > num_tokens  # some are dropped


def test_the_recorder_changes_no_token(tmp_path):
    recorded = fake_run(tmp_path / "run.jsonl")
    alone = FakeEngine(num_blocks=12, **{"scheduler.max_num_batched_tokens": 16})
    for i in range(6):
        alone.add(f"r{i}", [i, *range(20, 20 + 2 * i)], max_tokens=12)
    assert alone.run() == recorded.tokens


def test_the_replayed_configuration_has_the_recorded_pool(recorded):
    config = trace.config_of(trace.read(recorded), {"runner.inputs": "rebuild"})
    assert (config.kv.prefix, config.kv.num_blocks, config.runner.inputs) == ("none", 10, "rebuild")


def test_the_chrome_trace_has_a_track_a_request_and_nested_phases(recorded, tmp_path):
    count = trace.to_chrome(recorded, tmp_path / "chrome.json")
    events = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    assert len(events) == count
    tracks = {e["args"]["name"]: (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(tracks) == {"steps", "a", "b"} and len(set(tracks.values())) == 3
    slices = [e for e in events if e["ph"] == "X"]
    by_track = {t: [e["name"] for e in slices if (e["pid"], e["tid"]) == at] for t, at in tracks.items()}
    assert by_track["a"] == ["prefill", "prefill", "decode"]
    assert by_track["b"] == ["waiting", "recompute"]  # it came back with a token of output
    step, schedule, execute = (e for e in slices if e["pid"] == trace.ENGINE and e["ts"] < 2e6)
    assert step["name"] == "step 0" and step["ts"] == schedule["ts"]
    assert schedule["ts"] + schedule["dur"] == execute["ts"]
    assert execute["ts"] + execute["dur"] == step["ts"] + step["dur"] == 2e6  # the record's t, in microseconds
    blocks = next(e for e in events if e["ph"] == "C" and e["name"] == "blocks")
    assert blocks["args"] == {"in use": 3, "cached": 1, "free": 6}


@pytest.mark.parametrize("overlap", [1, 2])
def test_the_slices_of_a_real_run_do_not_overlap_within_a_track(tmp_path, overlap):
    fake_run(tmp_path / "run.jsonl", **{"engine.overlap": overlap})
    trace.to_chrome(tmp_path / "run.jsonl", tmp_path / "chrome.json")
    events = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    for tid in {e["tid"] for e in events if e["pid"] == trace.REQUESTS}:
        track = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (trace.REQUESTS, tid)]
        for one, two in zip(track, track[1:], strict=False):
            assert one["ts"] + one["dur"] <= two["ts"] + 0.01  # rounding to nanoseconds


def test_a_run_of_a_real_model_replays_to_the_same_tokens(tmp_path):
    """fp32, so that no tie of rounding can be broken the other way by another batch."""
    path = tmp_path / "run.jsonl"
    overrides = {"model.path": "dummy:tiny", "model.dtype": "float32", "kv.num_blocks": 24}
    engine = build(EngineConfig.build(overrides=overrides), [trace.TraceRecorder(path)])
    for i in range(5):
        params = SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=40, ignore_eos=True)
        engine.core.add(EngineRequest(f"r{i}", list(range(3, 90 + i)), params))
    while engine.core.has_work:
        engine.core.step()
    engine.core.shutdown()
    assert sum(plan.stats.num_preempted for plan in trace.plans(path)) > 0
    for inputs in ("persistent", "rebuild"):
        report = trace.replay(path, overrides={"runner.inputs": inputs})
        assert report.divergence is None and report.num_tokens == 5 * 40


def test_a_trace_is_its_users_alone(tmp_path):
    recorder = trace.TraceRecorder(path := tmp_path / "run.jsonl")
    recorder.close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"type": "encode"},
        {"type": "step"},
        {"type": "add", "t": 1.0},
        {"type": "abort", "t": 0.0, "id": 3},
        {"type": 1},
    ],
)
def test_what_is_no_record_is_told_by_its_line(tmp_path, record):
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"schema": trace.SCHEMA}) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(TraceError, match="line 2 is no record"):
        trace.read(path)
