"""What a reader sees of a widget at step k is what Python worked out for it, and every reader can get there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bookext import batchrows, charts, replay, widgets

pytestmark = pytest.mark.process

TAGS = ["mv-timeline", "mv-blocks", "mv-prefix", "mv-rows", "mv-tokens", "mv-guesses", "mv-roofline", "mv-chart"]
MEASURED = json.loads((Path(__file__).parent / "fixtures" / "roof.json").read_text())["results"]["rows"]


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
