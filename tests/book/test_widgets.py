"""What a widget shows at step k is what the engine did at step k, and every reader can get there."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

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
TAGS = ["mv-timeline", "mv-blocks", "mv-prefix", "mv-rows", "mv-tokens", "mv-guesses", "mv-roofline", "mv-chart"]
MEASURED = json.loads((Path(__file__).parent / "fixtures" / "roof.json").read_text())["results"]["rows"]

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


# ---------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def page(browser, gallery):
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.goto((gallery / "index.html").as_uri())
    yield opened
    opened.close()


# The text of every slot of the first widget of a kind, after step k.
SHOW = """([tag, k]) => {
  const widget = document.querySelector(tag);
  widget.show(k);
  return Object.fromEntries([...widget.querySelectorAll("[data-slot]")].map((e) => [e.dataset.slot, e.textContent]));
}"""


# Where the cursor of a picture stands, and where its points do.
MARKED = """(tag) => {
  const picture = document.querySelector(`${tag} .on-desk svg`);
  const at = (text) => +/[\\d.]+/.exec(text)[0];
  const dots = [...picture.querySelectorAll(".dot")].map((dot) => at(dot.getAttribute("d")));
  return [at(picture.querySelector("[data-slot^=cursor]").getAttribute("transform")), dots];
}"""


@pytest.mark.parametrize(("tag", "name"), [("mv-blocks", "small-pool"), ("mv-prefix", "ten-blocks")])
def test_the_pool_that_is_seen_at_step_k_is_the_replays(page, tag, name):
    for step, state in replay.pool_states(replay.load(name)):
        seen = page.evaluate(SHOW, [tag, step])
        for i, req_id in enumerate(state.known):
            assert seen[f"t{i}"] == (" → ".join(map(str, state.tables.get(req_id, ()))) or "–"), f"step {step}"
            assert seen[f"s{i}"] == state.status(req_id)
        assert seen["said"].startswith(f"Step {step}.")
        if tag == "mv-prefix":
            assert seen["queue"] == (" ".join(map(str, state.queue)) or "none")


def test_the_tokens_that_are_seen_at_time_t_are_the_replays(page):
    lanes = [replay.lane(replay.load(f"stall-{preset}")) for preset in ("v0", "v1")]
    times = [0.0, *sorted({end for lane in lanes for end in lane.ends})]
    for k in range(0, len(times), 7):
        seen = page.evaluate(SHOW, ["mv-timeline", k])
        for i, lane in enumerate(lanes):
            assert seen[f"gap{i}"] == f"{lane.longest_gap(times[k]):.0f} ms"
            for req_id in lane.arrivals:
                assert seen[f"out{i}-{req_id}"] == str(lane.num_out(req_id, times[k]))


def test_the_choice_that_is_seen_at_a_token_is_the_replays(page):
    _, made = replay.choices(replay.load("sampled-text"))
    for k, choice in enumerate(made):
        seen = page.evaluate(SHOW, ["mv-tokens", k])
        assert seen["n0"] == widgets.visible(choice.candidates[0][0]) and seen["q0"] == f"{choice.candidates[0][1]:.0%}"
        assert seen["said"] == f"Token {k + 1}: {widgets.visible(choice.text)}, which had {choice.probability:.0%}."


def test_the_rows_that_are_seen_at_step_k_are_the_replays(page):
    told = written = 0
    for k, state in enumerate(batchrows.row_states(replay.load("seats-continuous"))):
        seen = page.evaluate(SHOW, ["mv-rows", k])
        for i, owner in enumerate(state.owners):
            assert seen[f"o{i}"] == f"row {i}: {owner or 'nobody'}" and (seen[f"k{i}"] == "–") == (not owner)
        told, written = told + state.told, written + state.written
        assert (seen["v0"], seen["v1"]) == (str(state.told), str(state.written))
        assert seen["sum"] == f"Numbers written so far: {told:,} by V0, {written:,} by V1."


def test_the_guesses_that_are_seen_at_a_step_are_the_replays(page):
    run = replay.load("guessed-records")
    prompt, made = replay.turns(run)
    (request,) = (record["request"]["id"] for record in run.records if record["type"] == "add")
    text, tokens = replay.words(run), [t for record in run.steps() for t in record["tokens"].get(request, ())]
    assert "".join(turn.right + turn.own for turn in made) == "".join(text[token] for token in tokens)
    assert any(turn.right and turn.refused for turn in made) and "ann@example.com" in prompt
    for k, turn in enumerate(made):
        seen = page.evaluate(SHOW, ["mv-guesses", k])
        assert [seen[name] for name in ("right", "refused", "own")] == [widgets.visible(part) for part in turn]
        assert seen["said"].startswith(f"Step {k + 1}. ")


def test_the_points_that_are_seen_at_step_k_are_the_results(page):
    """Of a chart and of a roof: what is said, and that the cursor stands at the point."""
    for k, row in enumerate(MEASURED):
        said = page.evaluate(SHOW, ["mv-chart", k])["said"]
        assert said == f"At {row['tokens']} (tokens), ms: milliseconds {charts.shown(row['ms'])}."
        said = page.evaluate(SHOW, ["mv-roofline", k])["said"]
        assert f"{charts.shown(row['intensity'])} FLOP for each byte." in said
        assert said.endswith(f"measured: {charts.shown(row['mflops'] / row['ms'])} GFLOP/s.")
        for tag in ("mv-chart", "mv-roofline"):
            cursor, dots = page.evaluate(MARKED, tag)
            assert cursor == pytest.approx(dots[k], abs=0.2), f"{tag}, point {k}"


# What is in each of these slots of the first widget of a kind, after step k, and what who hears its slider is told. A
# slot that a kind does not draw has null.
FILLED = """([tag, k, slots]) => {
  const widget = document.querySelector(tag);
  widget.show(k);
  const held = slots.map((slot) => {
    const [name, place] = slot.split("@"), element = widget.querySelector(`[data-slot="${name}"]`);
    if (!element) return null;
    if (!place) return element.textContent;
    return place.startsWith("--") ? element.style.getPropertyValue(place) : element.getAttribute(place);
  });
  return [held, widget.querySelector("input").getAttribute("aria-valuetext")];
}"""


@pytest.mark.parametrize("tag", TAGS)
def test_every_slot_at_every_step_holds_what_python_worked_out(page, gallery, tag):
    """Colours, bars and cursors too. What Python works out is held against the replay in the tests above."""
    source = (gallery / "index.html").read_text().partition(f"<{tag} ")[2]
    data = json.loads(source.partition('<script type="application/json">')[2].partition("</script>")[0])
    now = data["frames"][0]
    for k, row in enumerate(data["frames"]):
        now = [old if value == 0 else value for value, old in zip(row, now, strict=True)]
        if k % 3 == 0 or k == len(data["frames"]) - 1:
            held, heard = page.evaluate(FILLED, [tag, k, data["slots"]])
            wanted = dict(zip(data["slots"], now, strict=True))
            drawn = {slot: value for slot, value in zip(data["slots"], held, strict=True) if value is not None}
            assert drawn == {slot: wanted[slot] for slot in drawn} and len(drawn) >= len(wanted) - 1, f"step {k}"
            assert heard == wanted.get("said", wanted.get("time"))


def test_a_roof_says_what_bounds_a_point(page):
    assert "set by the memory" in page.evaluate(SHOW, ["mv-roofline", 0])["said"]
    last = page.evaluate(SHOW, ["mv-roofline", 2])["said"]
    assert "32 FLOP for each byte" in last and "set by the arithmetic" in last and "measured: 80 GFLOP/s" in last


@pytest.mark.parametrize("tag", TAGS)
def test_the_keyboard_reaches_every_step(page, tag):
    slider = page.locator(f"{tag} input[type=range]").first
    slider.focus()
    last = int(slider.get_attribute("max"))
    for key, wanted in (("Home", 0), ("ArrowRight", 1), ("End", last), ("ArrowLeft", last - 1)):
        page.keyboard.press(key)
        assert page.evaluate(f"document.querySelector('{tag}').k") == wanted, key
        assert slider.get_attribute("aria-valuetext")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # one step on
    assert page.evaluate(f"document.querySelector('{tag}').k") == last


@pytest.mark.parametrize("tag", TAGS)
def test_what_is_drawn_without_javascript_is_what_the_first_frame_shows(browser, gallery, tag):
    seen = []
    for enabled in (False, True):
        context = browser.new_context(java_script_enabled=enabled)
        opened = context.new_page()
        opened.goto((gallery / "index.html").as_uri())
        slots = opened.locator(tag).first.locator("[data-slot]")
        seen.append(slots.all_text_contents())
        context.close()
    assert seen[0] == seen[1] and any(seen[0])


def test_playing_moves_on_and_pauses_and_who_wants_no_motion_gets_none(browser, gallery):
    opened = browser.new_page()
    opened.goto((gallery / "index.html").as_uri())
    button = opened.locator("mv-prefix .mv-play")
    opened.locator("mv-prefix input").focus()
    opened.keyboard.press("Home")
    button.click()
    opened.wait_for_function("document.querySelector('mv-prefix').k >= 2")
    button.click()
    stopped = opened.evaluate("document.querySelector('mv-prefix').k")
    opened.wait_for_timeout(1500)
    assert opened.evaluate("document.querySelector('mv-prefix').k") == stopped
    opened.close()
    context = browser.new_context(reduced_motion="reduce")
    calm = context.new_page()
    calm.goto((gallery / "index.html").as_uri())
    assert calm.locator(".mv-play").count() == 0 and calm.locator("mv-prefix input").count() == 1
    context.close()


def test_the_data_of_a_widget_cannot_end_its_element():
    assert json.loads(
        frames.element("mv-x", "", [{"a": "</script>"}], "x").partition('json">')[2].partition("</script>")[0]
    )["frames"] == [["</script>"]]


def test_a_wait_that_goes_on_is_counted_as_far_as_it_has_come():
    slices = [replay.Slice("a", t, t + 1, 1, False, 1) for t in (0, 9)]
    lane = replay.Lane({"a": 0}, slices)
    assert [lane.longest_gap(until) for until in (0.5, 1, 4, 10, 20)] == [0, 0, 3, 9, 9]
