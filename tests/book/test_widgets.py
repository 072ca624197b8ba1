"""What a widget shows at step k is what the engine did at step k (in a browser: test_widgets_browser.py)."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from bookext import batchrows, charts, figures, frames, records, replay, widgets

from chapters import record_traces
from chapters.record_traces import MAX_BYTES, SCENES
from minivllm.batch import BatchKey, InputSizes
from minivllm.runner.inputs import Rows
from minivllm.runner.inputs_persistent import PersistentInputs
from minivllm.trace import plan_of

RUNS = list(SCENES)

# ---------------------------------------------------------------------------------------- the replay


def tables_of(state):
    return {req_id: list(blocks) for req_id, blocks in state.tables.items()}


def test_the_replayed_pool_is_the_engines_at_every_step(tmp_path, monkeypatch):
    """Tables, the queue of free blocks and what can be reused, against the real manager after each schedule()."""
    core, _, _ = built = record_traces.ten_blocks_core()
    kv, seen = core.scheduler.base.kv, []
    schedule = core.scheduler.schedule

    def watched(now):
        plan = schedule(now)
        tables = {req_id: list(table.blocks) for req_id, table in kv.tables.items()}
        free = list(kv.pool.free_list())
        seen.append((tables, free, {block for block in free if block in kv.index}))
        return plan

    monkeypatch.setattr(core.scheduler, "schedule", watched)
    monkeypatch.setattr(record_traces, "ten_blocks_core", lambda: built)
    monkeypatch.setattr(replay, "TRACES", tmp_path)
    (tmp_path / "again.jsonl").write_bytes(record_traces.ten_blocks())
    states = [
        (tables_of(state), list(state.queue), {b for b in state.queue if state.is_reusable(b)})
        for _, state in replay.pool_states(replay.load("again"))
    ]
    assert len(states) == len(seen) > 6
    for step, (replayed, real) in enumerate(zip(states, seen, strict=True)):
        assert replayed == real, f"step {step}"


def test_ten_blocks_is_the_example_of_vllms_documentation():
    """Its figures say: blocks 0, 1, 2 are found; the queue was 7-8-9-4-3-2-6-5-1-0; block 3 is evicted."""
    states = replay.pool_states(replay.load("ten-blocks"))
    shown = {step: (tables_of(state), list(state.queue)) for step, state in states}
    assert shown[0][0] == {"first": [0, 1, 2, 3]} and shown[2][0] == {"first": [0, 1, 2, 3, 4]}
    assert shown[3][0]["second"] == [0, 1, 5, 6]
    assert shown[5] == ({}, [7, 8, 9, 4, 3, 2, 6, 5, 1, 0])
    assert shown[6] == ({"third": [0, 1, 2, 7, 8, 9, 4, 3]}, [6, 5])


@pytest.mark.parametrize("name", RUNS)
def test_the_committed_runs_are_light_and_whole(name):
    path = replay.TRACES / f"{name}.jsonl"
    assert path.stat().st_size <= MAX_BYTES
    run = replay.load(name)
    added = {r["request"]["id"] for r in run.records if r["type"] == "add"}
    ended = {req_id for step in run.steps() for req_id in step.get("finished", ())}
    assert added == ended and run.header["book"]["command"].endswith(name)


def test_the_two_lanes_show_what_the_page_says_of_them():
    """V1's chats wait much less for a token, and the report is done later."""
    v0, v1 = (replay.lane(replay.load(f"stall-{preset}")) for preset in ("v0", "v1"))
    assert v1.longest_gap() < v0.longest_gap() / 3
    assert [r for r in v0.arrivals] == [r for r in v1.arrivals]

    def first(lane):
        return min(s.end for s in lane.slices if s.req_id == "report" and s.num_out) - lane.arrivals["report"]

    assert first(v1) > first(v0)


def test_a_burst_is_seen_in_the_one_process_and_not_in_the_two():
    """Chapter 12: one bar is much broader than the others, and with a core apart none is as broad."""
    beside, apart = (replay.lane(replay.load(f"core-{core}")) for core in ("inproc", "process"))
    steps = sorted(b - a for a, b in pairwise(sorted(set(beside.ends))))
    assert beside.longest_gap() > 2 * steps[len(steps) // 2]
    assert apart.longest_gap() < beside.longest_gap()


def test_an_even_run_has_no_stall_and_a_stopped_one_has():
    def run(*ends):
        return replay.Lane({"a": 0.0}, [replay.Slice("a", end - 1, end, 1, False, 1) for end in ends])

    even, stopped = run(1.0, 2.0, 3.2, 4.1), run(1.0, 2.0, 3.0, 14.0, 15.0)
    assert widgets.shortest_stall([even]) > even.longest_gap()
    assert widgets.shortest_stall([even, stopped]) < stopped.longest_gap()
    assert widgets.shortest_stall([run(1.0)]) == 0


def test_somebody_is_preempted_in_the_small_pool_and_comes_back():
    said = [" ".join(state.said) for _, state in replay.pool_states(replay.load("small-pool"))]
    assert any("is preempted" in text for text in said)


def test_probabilities_of_a_choice_are_a_distributions_head():
    prompt, made = replay.choices(replay.load("sampled-text"))
    assert prompt.startswith("The lighthouse") and len(made) == 32
    for choice in made:
        likely = [p for _, p in choice.candidates]
        assert likely == sorted(likely, reverse=True) and sum(likely) <= 1.001 and 0 < choice.probability <= 1


@pytest.mark.parametrize("name", ["seats-continuous", "small-pool"])
def test_the_replayed_rows_are_the_persistent_batchs_at_every_step(name):
    """Whose a row is, its tokens and its blocks; and that what was not news was in the row before."""
    found = replay.load(name)
    config, info = found.header["config"], found.header["info"]
    max_rows = config["scheduler.max_num_seqs"]
    kept = PersistentInputs(InputSizes(max_rows, info["max_model_len"], info["block_size"], info["num_blocks"]))
    table, states, num_steps = Rows(max_rows), batchrows.row_states(found), 0
    for record in found.steps():
        plan = plan_of(record)
        for req_id in plan.leaves:
            table.leave(req_id)
        before = [kept.token_ids.copy(), kept.block_tables.copy()]
        kept.apply(plan, [table.join(join.req_id) for join in plan.joins])
        if not plan.num_tokens:
            continue
        batch = kept.build(plan, BatchKey(plan.total_tokens))
        sampled = [record["tokens"][batch.req_ids[i]][0] for i in batch.sample_requests]
        kept.append(batch, batch.sample_requests, np.array(sampled))
        state, num_steps = next(states), num_steps + 1
        assert {req_id: row for row, req_id in enumerate(state.owners) if req_id} == table.of
        num_requests, width = batch.block_tables.shape
        assert state.told == 3 * batch.num_tokens + (3 + width) * num_requests + 1 + 3 * len(sampled)
        for req_id, row in table.of.items():
            tokens, blocks = kept.token_ids[row, : kept.num_tokens[row]], kept.block_tables[row, : kept.num_blocks[row]]
            assert (state.tokens[req_id], state.blocks[req_id]) == (tokens.tolist(), blocks.tolist())
            changed = (before[0][row, : len(tokens)] != tokens).sum() + (before[1][row, : len(blocks)] != blocks).sum()
            assert changed <= state.news.get(req_id, 0), "more was written than what is called news"
    assert num_steps > 20 and next(states, None) is None


# ---------------------------------------------------------------------------------------- frames and charts


def test_packed_frames_unpack_to_themselves():
    shown = [{"a": "1", "b@x": "2"}, {"a": "1", "b@x": "3"}, {"a": "0", "b@x": "3"}]
    packed, before, again = frames.packed(shown), [], []
    for row in packed["frames"]:
        before = [old if value == 0 else value for value, old in zip(row, before or row, strict=True)]
        again.append(dict(zip(packed["slots"], before, strict=True)))
    assert again == shown
    with pytest.raises(AssertionError, match="every frame"):
        frames.packed([{"a": "1"}, {"b": "1"}])


def test_a_slot_is_filled_and_escaped():
    made = frames.slot({"a": "<b>", "a@data-is": "x", "a@--w": "0.5"}, "a", look="wide")
    assert made == '<span class="wide" data-slot="a" style="--w:0.5;" data-is="x">&lt;b&gt;</span>'


def test_logarithmic_ticks_hold_the_data_between_them():
    for low, high in ((0.3, 700), (1, 2), (5, 5.1), (1e-3, 1e6)):
        marks = charts.log_ticks(low, high)
        assert marks[0] <= low * 1.001 and marks[-1] >= high * 0.999 and 2 <= len(marks) <= 12, (low, high, marks)
    with pytest.raises(ValueError, match="no place for 0"):
        charts.scale([0, 1], 0, 1, is_log=True)


def test_the_steps_of_a_path_multiply_up_to_its_end():
    bars = [charts.Ratio(str(i), ratio, ratio, ratio, "") for i, ratio in enumerate((1.25, 0.8, 1.5))]
    stacked = figures.stacked(bars)
    assert [bar.starts for bar in stacked] == pytest.approx([1, 1.25, 1.0])
    x = charts.Scale([0.5, 2.0], 0, 100, is_log=True)
    lengths = [x(bar.starts * bar.ratio) - x(bar.starts) for bar in stacked]
    assert sum(lengths) == pytest.approx(x(1.5) - x(1))


def test_a_list_of_runs_is_a_median_with_its_range():
    assert figures.spread({"rates": [3.0, 1.0, 2.0]}, "rates") == (2.0, 1.0, 3.0)
    assert figures.spread({"rates": []}, "rates") is None
    assert figures.spread({"a": {"median": 2, "min": 1, "max": 5}}, "a.median") == (2.0, 1.0, 5.0)


def test_results_that_are_missing_leave_nothing_and_results_that_are_there_are_drawn(gallery):
    page = (gallery / "index.html").read_text()
    assert "What nobody measured" not in page and "A heading of what was measured</h2>" in re.sub("<a.*?</a>", "", page)
    assert "Not measured" not in page
    assert "together" in page and "1.25 ×" in page


def test_no_panel_of_an_ablation_has_time_and_throughput_and_what_was_not_found_is_said(gallery):
    page = (gallery / "index.html").read_text()
    own = page[: page.index("Each by its own metric.")].rsplit("The path.", 1)[1]
    titles = re.findall(r'aria-label="([^"]+): times as much \((more|less) is better\)"', own)
    assert {title for title, _ in titles} == {"time between two tokens, 99th percentile", "throughput"}
    assert ("throughput", "more") in titles and ("throughput", "less") not in titles
    assert own.count("no difference found within ") == 1 and "neither" not in own


def test_nothing_is_listed_of_results_that_do_not_exist():
    assert not records.exists("bench/absent")


def test_the_data_of_a_widget_cannot_end_its_element():
    assert json.loads(
        frames.element("mv-x", "", [{"a": "</script>"}], "x").partition('json">')[2].partition("</script>")[0]
    )["frames"] == [["</script>"]]


def test_a_wait_that_goes_on_is_counted_as_far_as_it_has_come():
    slices = [replay.Slice("a", t, t + 1, 1, False, 1) for t in (0, 9)]
    lane = replay.Lane({"a": 0}, slices)
    assert [lane.longest_gap(until) for until in (0.5, 1, 4, 10, 20)] == [0, 0, 3, 9, 9]
