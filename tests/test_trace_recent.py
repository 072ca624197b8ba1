"""The last steps of a running engine are drawn as the whole trace would draw them, and hold nobody's text."""

from __future__ import annotations

import json

import pytest
from fakes import FakeEngine

from minivllm.trace import REQUESTS, TraceRecorder, to_chrome
from minivllm.trace_recent import RecentSteps, chrome


def run(tmp_path, *observers, **overrides):
    """Requests over a pool that is too small for them: some wait, some are preempted, one is aborted. The whole trace's
    events."""
    engine = FakeEngine(num_blocks=12, **{"scheduler.max_num_batched_tokens": 16, **overrides})
    recorder = TraceRecorder(tmp_path / "run.jsonl")
    recorder.on_start({}, {})
    engine.core.observers += [recorder, *observers]
    for i in range(6):
        engine.add(f"r{i}", [i, *range(20, 20 + 5 * i)], max_tokens=12)
    for _ in range(9):
        engine.step()
    engine.core.abort(["r2"])
    engine.run()
    recorder.close()
    to_chrome(tmp_path / "run.jsonl", tmp_path / "run.json")
    return json.loads((tmp_path / "run.json").read_text())["traceEvents"]


def by_request(events):
    """{request: what its track shows, in order}; steps under "steps"."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {name: [] for name in names.values()}
    for e in events:
        if e["ph"] in "Xi":
            found[names[e["pid"], e["tid"]]].append((e["ph"], e["name"], json.dumps(e.get("args"))))
    return found


@pytest.mark.parametrize("kept", [1, 2, 7, 1000])
@pytest.mark.parametrize("asked", [1, 5, 1000])
def test_a_window_shows_the_end_of_the_whole_trace(tmp_path, kept, asked):
    recent = RecentSteps(kept)
    whole = by_request(run(tmp_path, recent))
    snapshot = recent.snapshot(asked)
    shown = by_request(json.loads(chrome(snapshot))["traceEvents"])
    num_steps = sum(record["type"] == "step" for record in snapshot["records"])
    total = sum(name.startswith("step ") for _, name, _ in whole["steps"])
    assert num_steps == min(kept, asked, total)
    assert any("recompute" in slice for slices in whole.values() for slice in slices)
    for name, slices in shown.items():
        assert slices == whole[name][len(whole[name]) - len(slices) :], name
    if num_steps == total:
        assert shown == whole


def test_at_any_step_the_last_one_is_drawn_as_the_whole_trace_draws_it(tmp_path):
    """Also what it takes from before: a prompt's later piece, a wait that began earlier."""
    recent, one_by_one = RecentSteps(1), {}

    class Look:
        def on_add(self, *_): ...
        def on_abort(self, *_): ...
        def on_step(self, *_):
            for name, slices in by_request(json.loads(chrome(recent.snapshot(1)))["traceEvents"]).items():
                one_by_one.setdefault(name, []).extend(s for s in slices if s[0] == "X")

    whole = by_request(run(tmp_path, recent, Look()))
    assert one_by_one == {name: [s for s in slices if s[0] == "X"] for name, slices in whole.items()}


def test_nothing_is_kept_of_requests_that_have_ended(tmp_path):
    recent = RecentSteps(1)
    run(tmp_path, recent)
    assert len(recent._records) <= 2 and not recent._before.arrived and len(recent._before.joins) <= 1


def test_a_snapshot_holds_no_token(tmp_path):
    recent = RecentSteps(1000)
    run(tmp_path, recent)
    records = recent.snapshot(1000)["records"]
    assert not any({"tokens", "token_ids", "request_prompt", "new_blocks"} & record.keys() for record in records)
    assert "token_ids" not in json.dumps(records)
    assert REQUESTS in {e["pid"] for e in json.loads(chrome(recent.snapshot(3)))["traceEvents"]}
