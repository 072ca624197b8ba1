"""The page in a real Chromium, over the real engine with a tiny model: what a user sees, and what leaves the house."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from types import SimpleNamespace

import pytest

from minivllm.engine.core import EngineCore

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
TINY = {"kv.num_blocks": 120, "kv.block_size": 16, "executor.num_threads": 1}
KEYS = ["one", "zwei ü"]

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: apt install chromium"),
]
expect = playwright.expect


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def servers(serving):
    """Over one engine and model; the second one has keys."""
    from minivllm.engine.async_llm import AsyncLLM

    engines = [AsyncLLM("dummy:tiny", overrides=TINY) for _ in range(2)]
    with serving(engines[0], names=("tiny",)) as url, serving(engines[1], names=("tiny",), api_keys=KEYS) as locked:
        yield SimpleNamespace(url=url, locked=locked)


@pytest.fixture
def open_page(browser, servers):
    """open_page(...) gives a page; at its end nothing has left the machine, and its console has no complaint."""
    opened = []

    def open(url=None, expected=(), **options):
        """expected: what the console may say."""
        context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
        page, url = context.new_page(), url or servers.url
        asked, said = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        opened.append((context, url, asked, said, expected))
        page.goto(url)
        expect(page.locator("#theme")).to_contain_text("Theme")
        return page

    yield open
    for context, url, asked, said, expected in opened:
        context.close()
        assert asked and all(request.startswith(f"{url}/") for request in asked)
        assert [text for text in said if not any(re.search(known, text) for known in expected)] == []


def set_up(page, **settings):
    for name, value in {"max_tokens": "40", "seed": "1", "temperature": "1", **settings}.items():
        page.locator(f"mv-settings [name={name}]").evaluate(
            "(e, value) => { e.value = value; e.dispatchEvent(new Event('input', { bubbles: true })) }", value
        )


def talk_on(page, max_tokens=1200):
    """From now on an answer lasts until it is stopped."""

    def without_end(route):
        asked = {**route.request.post_data_json, "ignore_eos": True, "max_tokens": max_tokens}
        route.continue_(post_data=json.dumps(asked))

    page.route("**/v1/chat/completions", without_end)


def slow_down(monkeypatch, seconds=0.005):
    """Of each step: else a tiny model's longest answer can be over before one has looked at it."""
    step = EngineCore.step

    def slow_step(core):
        time.sleep(seconds)
        return step(core)

    monkeypatch.setattr(EngineCore, "step", slow_step)


def ask(page, text="Hello"):
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def answered(page, number=1):
    expect(page.locator("mv-answer:not([aria-busy])")).to_have_count(number, timeout=60_000)
    return page.locator("mv-answer").nth(number - 1)


# ---- the chat


def test_an_answer_streams_in_and_says_how_fast_it_came(open_page, monkeypatch):
    slow_down(monkeypatch)
    page = open_page()
    expect(page.locator("#model")).to_have_value("tiny")
    set_up(page, max_tokens="400")
    page.evaluate("""() => {
        window.lengths = new Set();
        const look = () => window.lengths.add(document.querySelector("mv-answer .text")?.textContent.length ?? 0);
        const all = { subtree: true, childList: true, characterData: true };
        new MutationObserver(look).observe(document.querySelector(".log"), all);
    }""")
    ask(page)
    answer = answered(page)
    expect(answer.locator(".stats")).to_have_text(
        re.compile(r"^TTFT [\d.]+ m?s · [\d.,]+ tokens/s · \d+ tokens · (cut at max tokens|ended by itself)$")
    )
    assert page.evaluate("lengths.size") > 3, "the answer did not come piece by piece"
    expect(page.locator("#status")).to_contain_text("Answer complete")
    expect(page.locator(".question")).to_contain_text("Hello")


def test_the_sampling_controls_are_what_is_asked_for(open_page):
    page = open_page()
    set_up(page, top_p="0.5", top_k="3", system="Be brief.", temperature="")
    with page.expect_request("**/v1/chat/completions") as first:
        ask(page, "One")
    body = first.value.post_data_json
    answered(page)
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}]
    assert (body["top_p"], body["top_k"], body["max_tokens"], body["seed"]) == (0.5, 3, 40, 1)
    assert "temperature" not in body and "logprobs" not in body and body["model"] == "tiny"
    with page.expect_request("**/v1/chat/completions") as second:
        ask(page, "Two")
    assert [m["role"] for m in second.value.post_data_json["messages"]] == ["system", "user", "assistant", "user"]
    answered(page, 2)


def test_stop_ends_the_answer_and_the_request(open_page, servers, monkeypatch):
    page = open_page()
    slow_down(monkeypatch)
    talk_on(page)
    ask(page)
    expect(page.locator("mv-answer .stats")).to_contain_text("tokens/s")
    page.get_by_role("button", name="Stop").click()
    answer = answered(page)
    expect(answer.locator(".stats")).to_contain_text("stopped by you")
    kept = answer.locator(".text").text_content()
    assert kept
    page.wait_for_timeout(300)
    assert answer.locator(".text").text_content() == kept
    metrics = page.request.get(f"{servers.url}/metrics").text()
    assert re.search(r"num_requests_running\{[^}]*\} 0\.0", metrics), "the engine still works on it"


def test_a_double_click_on_send_does_not_stop_what_it_sent(open_page):
    page = open_page()
    set_up(page)
    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").dblclick()
    expect(answered(page).locator(".stats")).to_contain_text("cut at max tokens")


def test_regenerate_clear_and_the_same_seed(open_page):
    page = open_page()
    set_up(page)
    ask(page, "One")
    said = answered(page).locator(".text").text_content()
    ask(page, "Two")
    second = answered(page, 2)
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(1)
    again = second.locator(".text").text_content()
    second.get_by_role("button", name="Regenerate").click()
    expect(page.locator("mv-answer")).to_have_count(2)
    assert answered(page, 2).locator(".text").text_content() == again != said
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("mv-answer")).to_have_count(0)
    expect(page.get_by_role("heading", name="Ask the model")).to_be_visible()


def test_copying_puts_the_conversation_on_the_clipboard(open_page, eventually):
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    set_up(page)
    ask(page, "One")
    answer = answered(page)
    page.get_by_role("button", name="Copy all").click()
    expect(page.locator("#status")).to_have_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("You: One\n\ntiny: ")
    answer.get_by_role("button", name="Copy").click()
    answer_alone = copied.partition("tiny: ")[2]
    eventually(lambda: page.evaluate("navigator.clipboard.readText()") == answer_alone)


def test_a_tokens_tint_is_its_surprise_and_a_character_of_several_tokens_is_one(open_page):
    page = open_page()
    shown = page.evaluate("""async () => {
        const { Tokens } = await import("/page/tokens.js");
        const tokens = new Tokens();
        const token = (bytes, p) => ({ token: "x", bytes, logprob: Math.log(p), top_logprobs: [] });
        tokens.add([token([72, 105], 0.95), token([32, 195], 0.7), token([169], 0.4)]);
        tokens.add([token([33], 0.2), token([63], 0.01)]);
        return [...tokens.element.querySelectorAll(".token")].map((span) => [span.className, span.textContent]);
    }""")
    texts = ["Hi", " ", "é", "!", "?"]
    assert shown == [[f"token t{i}", text] for i, text in enumerate(texts)]


def test_tokens_are_tinted_and_tell_what_else_was_likely(open_page):
    page = open_page()
    set_up(page)
    page.get_by_label("Log-probabilities").check()
    ask(page)
    answer = answered(page)
    tokens = answer.locator(".tokens > .token")
    expect(tokens).to_have_count(40)
    colour = tokens.first.evaluate("span => getComputedStyle(span).backgroundColor")
    assert not colour.endswith(", 0)"), "a model with random weights is never sure"
    tokens.nth(5).hover()
    rivals = answer.locator(".rivals")
    expect(rivals).to_be_visible()
    chosen = float(re.search(r"Chosen with (?:< )?([\d.]+) %", rivals.text_content())[1])
    listed = [float(p) for p in re.findall(r"([\d.]+) %", rivals.locator("ol").text_content())]
    assert 5 <= len(listed) <= 6 and chosen in listed and listed[:5] == sorted(listed[:5], reverse=True)
    page.get_by_label("Log-probabilities").uncheck()
    expect(answer.locator(".tokens")).to_have_count(0)
    expect(answer.locator(".text")).not_to_be_empty()


def test_a_tokens_rivals_are_reached_by_the_keyboard(open_page):
    page = open_page()
    set_up(page)
    page.get_by_label("Log-probabilities").check()
    ask(page)
    answer = answered(page)
    group = answer.locator(".tokens")
    page.locator(".log").focus()
    page.keyboard.press("Tab")
    expect(group).to_be_focused()
    expect(answer.locator(".token.here")).to_have_count(1)
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert group.locator(".token").nth(3).get_attribute("class").endswith("here")
    expect(answer.locator(".rivals")).to_be_visible()
    expect(group.locator("[aria-live]")).to_contain_text("Chosen with")
    page.keyboard.press("Escape")
    expect(answer.locator(".rivals")).to_be_hidden()


def test_a_pool_of_any_size_has_a_map(open_page):
    page = open_page()
    made = page.evaluate("""async () => {
        const { BlockMap } = await import("/page/blocks.js");
        const map = new BlockMap();
        document.querySelector("mv-chat").append(map.element);
        map.element.style.width = "600px";
        const look = { blocks: "c3u7s2f999988", block_size: 16 };
        map.draw(look, { name: "x", blocks: [[3, 7], [999999, 1]], ended: false });
        const box = map.picture.getBoundingClientRect();
        return [map.total, map.inUse, map.about.textContent, box.height, map.detail.textContent];
    }""")
    assert made[:2] == [1_000_000, 9] and made[3] <= 220
    assert re.fullmatch(r"1,000,000 blocks of 16 tokens; a square is \d+ of them, and shows the busiest", made[2])
    assert made[4] == "999,988 free, 3 cached, 7 used, 2 shared. Request x has the 8 blocks with an outline."


def test_what_a_model_writes_is_never_markup(open_page):
    page = open_page()
    made = page.evaluate("""async () => {
        const { markdown } = await import("/page/markdown.js");
        const box = document.createElement("div");
        box.append(...markdown([
            "# Title", "Some **bold *and* italic** and `<b>code</b>` <img src=x onerror=alert(1)>", "",
            "1. one", "2. two", "   more", "", "- dot", "", "[link](https://example.org)", "", "```js", "if (a < b) {}",
        ].join("\\n")));
        return [box.innerHTML, box.textContent];
    }""")
    html, text = made
    assert html == (
        "<h3>Title</h3><p>Some <strong>bold <em>and</em> italic</strong> and <code>&lt;b&gt;code&lt;/b&gt;</code> "
        '&lt;img src=x onerror=alert(1)&gt;</p><ol start="1"><li>one</li><li>two<br>more</li></ol><ul><li>dot</li></ul>'
        '<p>[link](https://example.org)</p><pre tabindex="0"><code>if (a &lt; b) {}</code></pre>'
    )


def test_errors_are_told_in_words_where_they_happen(open_page):
    page = open_page(expected=["status of 400", "ERR_FAILED", "Failed to load resource"])
    set_up(page, top_p="7")
    ask(page)
    answer = answered(page)
    expect(answer.get_by_role("alert")).to_contain_text("Top_p must be above 0 and at most 1")
    expect(page.locator("mv-settings [name=top_p]")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("mv-settings [name=top_p]")).to_be_focused()
    set_up(page, top_p="")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Again")
    expect(answered(page, 2).get_by_role("alert")).to_contain_text("The server does not answer")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("alert")).to_have_count(1)
    expect(answered(page, 2).locator(".stats")).to_contain_text("tokens")


def test_a_key_is_asked_for_sent_and_forgotten_with_the_tab(open_page, servers):
    page = open_page(servers.locked, expected=["status of 401"])
    expect(page.locator("#model")).to_contain_text("needs an API key")
    ask(page)
    expect(answered(page).get_by_role("alert")).to_contain_text("This server asks for an API key")
    field = page.locator("mv-settings [name=key]")
    expect(field).to_be_focused()
    field.fill("wrong")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("alert")).to_contain_text("does not accept this API key")
    field.fill(KEYS[1])
    field.press("Tab")
    expect(page.locator("#model")).to_have_value("tiny")
    set_up(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(answered(page).locator(".stats")).to_contain_text("tokens")
    page.get_by_role("link", name="Engine").click()
    expect(page.locator("mv-engine .state")).to_have_text("Live")
    stored = page.evaluate("JSON.stringify(localStorage) + document.cookie")
    assert "zwei" not in stored and "zwei" not in page.url


# ---- the engine


def test_the_live_view_shows_a_requests_blocks_and_its_steps(open_page, eventually, monkeypatch):
    slow_down(monkeypatch)
    page = open_page()
    talk_on(page)
    page.get_by_role("link", name="Engine").click()
    expect(page.locator("mv-engine .state")).to_have_text("Live")
    expect(page.locator(".pool")).to_have_attribute("aria-label", re.compile("^120 blocks: "))
    expect(page.locator(".rows table")).to_be_hidden()
    page.get_by_role("link", name="Chat").click()
    ask(page)
    page.get_by_role("link", name="Engine").click()
    row = page.locator(".rows tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("yours")
    row.get_by_role("button").click()
    expect(row.get_by_role("button")).to_have_attribute("aria-pressed", "true")
    about_pool = page.locator("section[aria-label='Block pool'] .detail")
    expect(about_pool).to_contain_text(re.compile(r"has the \d+ blocks? with"))

    def squares():
        """How many the outline goes around."""
        path = page.locator(".pool .mine").get_attribute("d")
        return sum(int(width) // 16 for width in re.findall(r"h(\d+)v16h-", path))

    before = squares()
    eventually(lambda: squares() > before)
    used = re.search(r"(\d+) used", page.locator(".pool").get_attribute("aria-label"))
    assert 0 < before <= int(used[1])
    assert page.locator(".charts path.decode").get_attribute("d").count("M") > 5
    expect(page.locator(".figures")).to_contain_text("Running1 of")
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("button", name="Stop").click()
    answered(page).get_by_role("button", name="Show its blocks").click()
    expect(about_pool).to_contain_text("has ended; it had")
    expect(page.locator(".rows table")).to_be_hidden()


def test_nobody_looks_unless_the_view_is_open(open_page, servers):
    page = open_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "debug/live" in request.url else None)
    page.on("requestfailed", lambda request: asked.append("end") if "debug/live" in request.url else None)
    page.wait_for_timeout(300)
    assert asked == []
    page.get_by_role("link", name="Engine").click()
    expect(page.locator("mv-engine .state")).to_have_text("Live")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("mv-engine .state")).to_have_text("Paused")
    page.get_by_role("button", name="Go on").click()
    expect(page.locator("mv-engine .state")).to_have_text("Live")
    page.get_by_role("link", name="Chat").click()
    page.wait_for_timeout(200)
    assert asked == [f"{servers.url}/debug/live", "end"] * 2


def test_a_step_is_told_by_pointer_and_by_keyboard(open_page):
    page = open_page()
    set_up(page)
    page.get_by_role("link", name="Engine").click()
    expect(page.locator("mv-engine .state")).to_have_text("Live")
    page.get_by_role("link", name="Chat").click()
    ask(page)
    answered(page)
    page.get_by_role("link", name="Engine").click()
    detail = page.locator("section[aria-label=Steps] .detail")
    expect(page.locator(".charts path.decode")).to_have_attribute("d", re.compile("M"))
    page.locator(".charts").focus()
    page.keyboard.press("End")
    expect(detail).to_have_text(
        re.compile(r"^Step [\d,]+: 1 of [\d,]+ tokens \(1 decode\) in .*; 1 running, 0 waiting\.$")
    )
    last = detail.text_content()
    page.keyboard.press("ArrowLeft")
    expect(detail).not_to_have_text(last)
    box = page.locator(".charts").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 40)
    expect(detail).to_have_text(last)


@pytest.fixture(scope="module")
def replicated(serving):
    """Two replicas that take requests in turns, behind server 1 of four. The model is slow enough to be looked at."""
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.serve.live import Place

    two = {"engine.core": "process", "engine.replicas": 2, "engine.router": "round_robin", "engine.restart": False}
    engine = AsyncLLM("dummy:smollm2-135m", overrides={**TINY, **two, "kv.num_blocks": 500})
    with serving(engine, names=("tiny",), place=Place(1, 4)) as url:
        yield SimpleNamespace(url=url, cores=[replica.link for replica in engine._link.replicas])


def test_one_core_behind_one_server_is_not_called_a_replica(open_page):
    page = open_page()
    page.get_by_role("link", name="Engine").click()
    expect(page.locator("mv-engine .state")).to_have_text("Live")
    expect(page.locator(".figures")).to_contain_text("of 120")
    for hidden in (".lanes", ".whose", ".place"):
        expect(page.locator(f"mv-engine {hidden}")).to_be_hidden()


def test_all_replicas_are_seen_and_whose_request_runs_where(open_page, replicated):
    page = open_page(replicated.url)
    talk_on(page, max_tokens=7500)
    for busy in range(2):
        ask(page)
        expect(page.locator("mv-answer .stats")).to_contain_text("tokens/s")
        page.get_by_role("link", name="Engine").click()
        expect(page.locator("mv-engine .place")).to_have_text("told by server 1 (of 0 to 3)")
        lanes = page.locator(".lanes tbody tr")
        expect(lanes).to_have_count(2)
        for lane, running in ((lanes.nth(busy), 1), (lanes.nth(1 - busy), 0)):
            in_use = re.compile(r"^[1-9]\d* of 500$") if running else "0 of 500"
            expect(lane.locator("td")).to_have_text([re.compile(f"^{running} of "), "0", in_use])
            expect(lane.locator(".tag")).to_be_visible(visible=bool(running))
            lane.get_by_role("button").click()
            expect(lane.get_by_role("button")).to_have_attribute("aria-pressed", "true")
            expect(page.locator("[aria-pressed=true]")).to_have_count(1)
            expect(page.locator("mv-engine .whose")).to_have_text(lane.get_by_role("button").text_content())
            expect(page.locator(".rows tbody tr")).to_have_count(running)
            expect(page.locator(".figures")).to_contain_text(f"Running{running} of")
        page.get_by_role("link", name="Chat").click()
        page.get_by_role("button", name="Stop").click()
        answered(page)
        page.get_by_role("button", name="Clear").click()  # however much was said: a question has no room beside it
        expect(page.locator("mv-answer")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_replicas_fit_and_can_be_read(open_page, replicated, scheme, viewport):
    page = open_page(replicated.url, color_scheme=scheme, viewport=viewport)
    page.get_by_role("link", name="Engine").click()
    expect(page.locator(".lanes tbody tr")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator(".lanes").evaluate("e => e.scrollWidth <= e.clientWidth"), "a lane is cut off"
    check_contrast(page)
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    faults = axe.Axe().run(page).response["violations"]
    assert [(fault["id"], [node["html"] for node in fault["nodes"]]) for fault in faults] == []


def test_a_replica_that_dies_is_shown_as_down_and_the_other_one_lives(open_page, replicated):
    """The last test with these replicas: it ends one."""
    page = open_page(replicated.url)
    page.get_by_role("link", name="Engine").click()
    lanes = page.locator(".lanes tbody tr")
    expect(lanes.nth(1)).to_contain_text("of 500")
    lanes.nth(1).get_by_role("button").click()
    os.kill(replicated.cores[1].pid, signal.SIGKILL)
    expect(lanes.nth(1)).to_contain_text("does not run")
    expect(page.get_by_text("This replica does not run. The others go on.")).to_be_visible()
    expect(page.locator(".figures")).to_be_hidden()
    expect(page.locator("#status")).to_have_text("Replica 1 does not run any more")
    lanes.nth(0).get_by_role("button").click()
    expect(page.locator(".figures")).to_be_visible()
    expect(page.locator("mv-engine .state")).to_have_text("Live")


# ---- everybody's


def test_it_can_be_used_by_keyboard_alone(open_page):
    page = open_page()
    order = []
    while "key" not in order:
        page.keyboard.press("Tab")
        name, shown = page.evaluate("""() => {
            const here = document.activeElement;
            const styles = [here, here.closest(".field") ?? here].map((e) => getComputedStyle(e));
            const shown = styles.some((style) => style.outlineStyle !== "none" || style.boxShadow !== "none");
            return [here.name || here.ariaLabel || here.id || here.textContent.trim(), shown];
        }""")
        order.append(name)
        assert shown, f"{name} does not show that it has the focus"
        assert len(order) < 30, order
    wanted = ["Skip to the content", "Chat", "Engine", "model", "theme", "Conversation", "Message", "Send", "system"]
    assert [name for name in order if name in wanted] == wanted, order
    page.get_by_label("Message").focus()
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    expect(page.locator("mv-answer")).to_have_count(1)
    page.keyboard.press("Escape")
    answered(page)
    expect(page.get_by_label("Message")).to_be_focused()


def test_axe_finds_no_fault(open_page, monkeypatch):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = open_page(viewport=PHONE)
    page.get_by_label("Log-probabilities").check()
    set_up(page)
    ask(page)
    answered(page).locator(".tokens").focus()
    page.get_by_role("button", name="Settings").click()
    faults = axe.Axe().run(page).response["violations"]
    slow_down(monkeypatch)
    talk_on(page)
    ask(page)
    page.get_by_role("link", name="Engine").click()
    expect(page.locator(".rows tbody tr")).to_have_count(1)
    faults += axe.Axe().run(page).response["violations"]
    assert [(fault["id"], [node["html"] for node in fault["nodes"]]) for fault in faults] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_both_views_fit_and_can_be_read(open_page, scheme, viewport):
    page = open_page(color_scheme=scheme, viewport=viewport, has_touch=viewport is PHONE)
    set_up(page)
    page.get_by_label("Log-probabilities").check()
    ask(page, "A question with averyveryverylongwordthatmustnotmakethepagewiderthanitsscreenhoweverlongitgetsandgets")
    answered(page)
    fits = "document.documentElement.scrollWidth <= innerWidth"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 380) == (scheme == "light")
    assert page.evaluate(fits), "the chat is wider than the screen"
    check_contrast(page)
    page.get_by_role("link", name="Engine").click()
    expect(page.locator("mv-engine .state")).to_have_text("Live")
    assert page.evaluate(fits), "the engine's view is wider than the screen"
    check_contrast(page)


def check_contrast(page):
    """Every text on its background: 4.5 to 1, WCAG's AA."""
    poor = page.evaluate("""() => {
        const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
        const over = (colours) => {
            canvas.clearRect(0, 0, 1, 1);
            for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
            return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
        };
        const light = (rgb) => {
            const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            const [r, g, b] = rgb.map((v) => linear(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const found = [];
        const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
            const element = walker.currentNode.parentElement;
            if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
            if (element.closest(".unseen, .skip, [disabled]")) continue;
            const behind = [];
            for (let e = element; e; e = e.parentElement) behind.unshift(getComputedStyle(e).backgroundColor);
            const style = getComputedStyle(element);
            const colour = element.closest("svg") ? style.fill : style.color;
            const [a, b] = [light(over(behind)), light(over([...behind, colour]))].sort((x, y) => y - x);
            if ((a + 0.05) / (b + 0.05) < 4.5) found.push([walker.currentNode.data, (a + 0.05) / (b + 0.05)]);
        }
        return found;
    }""")
    assert poor == []


def test_the_settings_of_a_phone_open_and_close(open_page):
    page = open_page(viewport=PHONE)
    toggle = page.get_by_role("button", name="Settings")
    panel = page.locator("mv-settings")
    expect(panel).to_be_hidden()
    toggle.click()
    expect(panel).to_be_visible()
    expect(toggle).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    expect(toggle).to_be_focused()


def test_the_theme_can_be_chosen_and_is_kept(open_page):
    page = open_page(color_scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    for theme in ("light", "dark"):
        page.get_by_role("button", name="Theme").click()
        expect(page.get_by_role("button", name="Theme")).to_have_text(f"Theme: {theme}")
    assert page.evaluate(colour) != light
    page.reload()
    expect(page.get_by_role("button", name="Theme")).to_have_text("Theme: dark")
    assert page.evaluate(colour) != light
