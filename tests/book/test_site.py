"""The built site: no warning, no dead link, nothing typed that should be measured, and it looks right in a browser."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from bookext import charts, codemap, records

from minivllm.__main__ import COMMANDS
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
CHAPTERS = sorted((ROOT / "chapters").glob("ch*/index.md"))
PAGES = [*sorted((ROOT / "chapters").glob("*.md")), *sorted((ROOT / "chapters" / "reference").glob("*.md")), *CHAPTERS]
TOLD = [ROOT / "chapters" / "index.md", *CHAPTERS]  # what tells, rather than lists
MAX_PAGE_BYTES = 350_000
OUTSIDE = ("https://github.com/pradyunsg", "https://pradyunsg.me")  # furo's own credits: links, which load nothing


class Page(HTMLParser):
    def __init__(self, path: Path):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs["id"]} if attrs.get("id") else set()
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        elif tag == "link" and attrs.get("rel") == "stylesheet":
            self.loads.append(attrs["href"])
        elif attrs.get("src"):
            self.loads.append(attrs["src"])


@pytest.fixture(scope="module")
def pages(built) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(built.rglob("*.html"))}


def test_every_internal_link_and_anchor_resolves(built, pages):
    assert built / "index.html" in pages and len(pages) > 3
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(unquote(link))
            if target.startswith(("http:", "https:")):
                assert target.startswith(OUTSIDE), f"{path.name} leads outside: {link}"
                continue
            there = (path.parent / target).resolve() if target else path
            assert there.is_file(), f"{path.name}: {link}"
            assert not anchor or there.suffix != ".html" or anchor in pages[there].ids, f"{path.name}: {link}"


def test_a_page_loads_nothing_from_outside_and_is_light(built, pages):
    fonts = sum(font.stat().st_size for font in (built / "_static" / "fonts").glob("*.woff2"))
    assert fonts
    for path, page in pages.items():
        for load in page.loads:
            assert "//" not in load and (path.parent / load.partition("?")[0]).is_file(), f"{path.name} loads {load}"
        heavy = sum((path.parent / load.partition("?")[0]).stat().st_size for load in page.loads)
        assert path.stat().st_size + heavy + fonts < MAX_PAGE_BYTES, path


def prose(page: Path) -> str:
    """What is said in words: without blocks, figures and code."""
    text = re.sub(
        r"^```\{?(?:snippet|console|run-output).*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)
    return re.sub(r"\{num\}`[^`]*`|`[^`]*`", "", text)


@pytest.mark.parametrize("page", TOLD, ids=lambda p: p.parent.name)
def test_no_measurement_is_typed(page):
    """A number with a unit of measurement is a figure that {num} should show."""
    typed = re.findall(r"\b\d[\d.,]*\s?(?:ms|s|us|µs|seconds|MiB|GiB|MB|GB|%|percent|times|x|×)(?!\w)", prose(page))
    assert not typed, typed


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_the_prose_promises_nothing(page):
    assert not re.findall(r"\b(?:simply|just|blazing\w*|obviously|easily)\b", prose(page), re.IGNORECASE)


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda p: p.parent.name)
def test_a_chapter_has_all_its_parts(page):
    text = page.read_text()
    parts = ("Feel it", "Run it", "What we saw", "Where it loses", "Exercise", "Check yourself", "In vLLM")
    places = [text.find(f"\n## {part}\n") for part in parts]
    assert min(places) > 0 and places == sorted(places), "a part is missing, or not in its place"
    for directive in ("chart", "predict", "run-output", "exercise", "sources"):
        assert f"{{{directive}}}" in text, directive
    assert "{snippet}" in text or "{compare}" in text, "no quote"
    assert 1500 <= len(prose(page).split()) <= 2500


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda p: p.parent.name)
def test_a_chapter_asks_measures_and_lets_the_reader_predict(page):
    text = page.read_text()
    begun, felt = text.split("\n## ")[:2]
    assert re.search(r"^\*\*[^*]+\?\*\*$", begun, re.MULTILINE), "it begins with no question"
    assert re.search("{chart}|{widget}|<figure>", felt), "nothing is seen before something is explained"
    assert "{num}" in felt, "nothing is measured before something is explained"
    (asked,) = re.findall(r"^:::\{predict\} .*?^:::$", text, re.DOTALL | re.MULTILINE)
    choices, _, answer = asked.partition("\n+++\n")
    assert re.findall(r"^([A-Z])\. ", choices, re.MULTILINE) == list("ABCD"), "not four choices"
    assert re.match(r"\*\*[A-D]\.?\*\*", answer), "the answer names no choice"
    end = text.rpartition("\n## ")[2]
    assert "**What now works:**" in end and re.search(r"\*\*What\sis\sstill\sbad:\*\*", end)


def options_named(page: Path) -> list[dict[str, str]]:
    """What each piece of code in a page's words sets: {"kv.prefix": "none"}."""
    named = [dict(re.findall(r"(?<![\w.])([a-z_]+\.[a-z_]+)=([\w.+-]+)", code)) for code in codes(page)]
    return [options for options in named if options]


def codes(page: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", page.read_text())


@pytest.mark.parametrize("page", [*CHAPTERS, ROOT / "chapters" / "clients.md"], ids=lambda p: p.parent.name)
def test_every_option_that_a_page_names_exists_and_may_be_set_so(page):
    for options in options_named(page):
        EngineConfig.build("v1", options)
    with pytest.raises(ConfigError):
        EngineConfig.build("v1", {"kv.prefix": "nothing"})


def is_there(command: str) -> bool:
    """A target of make, a command of the package, or a script or module of this repository."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    match command.split():
        case ["make", *wanted]:
            return set(wanted) <= targets
        case ["python", "-m", "minivllm", name, *_]:
            return name in COMMANDS
        case ["python", "-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        case ["pip", "install", *_]:  # of others' packages, for which tests/clients asks
            return True
        case ["python", script, *_]:
            return (ROOT / script).is_file()
    return False


def test_every_command_of_a_page_exists():
    """The chapters' own are run by test_chapters.py."""
    for page in PAGES:
        for command in re.findall(r"^(?:\$|:by:) (.*)$", page.read_text(), re.MULTILINE):
            assert is_there(command), command
    assert not is_there("make nothing") and not is_there("python -m minivllm nothing") and not is_there("python no.py")


def test_a_number_that_no_result_has_is_an_error():
    assert records.figure("ch02:rows.0.tokens d")[1] == "5"
    for wrong in ("ch02:rows.0.nothing", "ch02:rows.99.tokens", "ch99:rows", "ch02:rows"):
        with pytest.raises(records.RecordError):
            records.figure(wrong)


def test_ticks_are_round_and_cover_the_data():
    for top in (0.03, 1, 3.3, 97.1, 2825, 4486):
        marks = charts.ticks(top)
        assert marks[0] == 0 and marks[-1] >= top and 3 <= len(marks) <= 7, marks


def test_the_map_has_every_part_and_points_down():
    uses, height = codemap.imports(), codemap.ranks(codemap.imports())
    assert {"engine", "scheduler", "kv", "runner", "serve", "kernels"} <= set(uses)
    assert "engine" in uses["serve"] and "engine" not in uses["scheduler"] | uses["kv"]
    assert height["serve"] > height["engine"] > height["scheduler"]
    drawn = codemap.draw()
    assert all(f">{part}</text>" in drawn for part in uses)


# ---------------------------------------------------------------------------------------- in a browser

# Every page is audited in each colour scheme at each width. Contrast takes longer than all the rest: it is looked at
# everywhere once a scheme, and at the other width in what is not shown at the first.
WHOLLY = {"light": 1280, "dark": 390}
WIDTHS = (1280, 390)
TABLET = 1024  # the sidebar is just there: nothing but the width is looked at
AT_ONE_WIDTH = [".on-desk", ".on-phone", ".mobile-header", ".toc-drawer"]
GENERATED = {"genindex.html", "py-modindex.html"}  # furo's own, which no page links to
WHOLE = {"index.html", "ch02_kv_cache/index.html", "reference/server.html"}  # audited with all that is on them
REPEATED = [".highlight span", ".sidebar-drawer"]  # the same on every page: a hundred colours of code, the contents
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]

# What sticks out: of the page, or of a picture; an answer that is given away.
FAULTS = """() => {
  const faults = [], root = document.documentElement, width = innerWidth;
  if (root.scrollWidth > width) faults.push(`${root.scrollWidth} px wide`);
  for (const svg of document.querySelectorAll("svg.chart-svg, svg.codemap")) {
    if (!svg.getClientRects().length) continue;  // the other width's
    const box = svg.viewBox.baseVal;
    for (const text of svg.querySelectorAll("text")) {
      const b = text.getBBox();
      if (b.x < -1 || b.y < -1 || b.x + b.width > box.width + 1 || b.y + b.height > box.height + 1)
        faults.push(`"${text.textContent}" is cut off`);
    }
  }
  if (width > 1000) for (const line of document.querySelectorAll(".compare pre, .run-output pre"))
    if (line.scrollWidth > line.clientWidth + 1) faults.push("cut off: " + line.innerText.slice(0, 40));
  for (const box of document.querySelectorAll(".predict, .exercise"))
    if (parseFloat(getComputedStyle(box).paddingLeft) < 8) faults.push("no room in a box");
  for (const folded of document.querySelectorAll("details")) if (folded.open) faults.push("an answer is given away");
  for (const widget of document.querySelectorAll(".widget"))
    if (!widget.querySelector(".mv-controls")) faults.push(`${widget.localName} has not started`);
  return faults;
}"""
AUDIT = """async ([rules, exclude, contrast]) => {
  const options = {resultTypes: ["violations"]}, some = contrast.filter((place) => document.querySelector(place));
  const all = {...options, runOnly: rules, rules: {"color-contrast": {enabled: !contrast.length}}};
  const {violations} = await axe.run({exclude}, all);
  if (some.length) {
    const found = await axe.run({include: some}, {...options, runOnly: {type: "rule", values: ["color-contrast"]}});
    violations.push(...found.violations);
  }
  const where = (node) => node.target.join(" ") + " " + node.html.slice(0, 120);
  return violations.map((v) => `${v.id}: ${v.help}: ` + v.nodes.slice(0, 3).map(where).join("; "));
}"""
# Of each widget, by its slider's keys: the frames that it does not get to.
KEYS = [("Home", "0"), ("ArrowRight", "Math.min(1, last)"), ("End", "last"), ("ArrowLeft", "Math.max(0, last - 1)")]


def shown(pages: dict[Path, Page]) -> list[Path]:
    return [path for path in pages if path.name not in GENERATED]


@pytest.mark.parametrize("of", ["chapters", "other pages"])
@pytest.mark.parametrize("scheme", WHOLLY)
def test_every_page_is_whole_and_open_to_all_on_a_phone_and_a_desk(browser, built, pages, scheme, of):
    """Nothing is cut off, nothing was asked of another machine, and axe-core finds no violation of WCAG 2.2 AA."""
    axe = Path(pytest.importorskip("axe_playwright_python", reason='pip install -e ".[dev]"').__file__).parent
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")
    asked, faults = [], []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(f"{page.url}: {error}"))
    for path in shown(pages):
        name = path.relative_to(built).as_posix()
        if name.startswith("ch") != (of == "chapters"):
            continue
        page.goto(path.as_uri())
        page.set_viewport_size({"width": TABLET, "height": 900})
        if (wide := page.evaluate("document.documentElement.scrollWidth")) > TABLET:
            faults.append(f"{name} at {TABLET} px: {wide} px wide")
        page.add_script_tag(path=axe / "axe.min.js")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            found, is_whole = page.evaluate(FAULTS), width == WHOLLY[scheme]
            exclude = [] if is_whole and name in WHOLE else REPEATED
            found += page.evaluate(AUDIT, [RULES, exclude, [] if is_whole else AT_ONE_WIDTH])
            faults += [f"{name} at {width} px: {fault}" for fault in found]
    context.close()
    assert not faults, "\n".join(faults)
    outside = [url for url in asked if not url.startswith(("file:", "data:"))]
    assert asked and not outside, outside


@pytest.fixture(scope="module")
def server(built):
    handler = functools.partial(Quiet, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_address[1]}"
        served.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_): ...


def test_over_http_no_request_leaves_the_machine_and_search_finds(browser, server, pages, built):
    context = browser.new_context()
    asked, heavy = [], {}
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    for path in shown(pages):
        before = len(asked)
        page.goto(f"{server}/{path.relative_to(built)}")
        page.evaluate("document.fonts.ready.then(() => 0)")
        loaded = [url.removeprefix(f"{server}/").partition("?")[0] for url in asked[before:] if url.startswith(server)]
        size = sum((built / name).stat().st_size for name in loaded if (built / name).is_file())
        heavy |= {path.name: size} if size > MAX_PAGE_BYTES else {}
    page.goto(f"{server}/search.html?q=preempted")
    page.wait_for_selector("ul.search li a")
    context.close()
    assert len(asked) > len(pages) and all(url.startswith((server, "data:")) for url in asked), asked
    assert not heavy, f"heavier than {MAX_PAGE_BYTES} bytes as a browser loads them: {heavy}"


def test_every_widget_of_the_book_can_be_stepped_through_by_keys(browser, pages):
    """On the pages as they are; what a step shows is looked at in test_widgets.py."""
    page = browser.new_page(reduced_motion="reduce")
    page.set_default_timeout(120_000)
    num_widgets = 0
    for path in shown(pages):
        page.goto(path.as_uri())
        for widget in page.locator(".widget").all():
            slider = widget.locator("input[type=range]")
            slider.focus()
            for key, wanted in KEYS:
                page.keyboard.press(key)
                at = widget.evaluate(f"(w) => {{ const last = w.frames.length - 1; return [w.k, {wanted}]; }}")
                assert at[0] == at[1], f"{path.parent.name}: {key} leads to frame {at[0]} and not {at[1]}"
            num_widgets += 1
    page.close()
    assert num_widgets > 20


def test_keys_scroll_what_is_wider_than_a_phone(browser, built):
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.goto((built / "ch10_one_budget" / "index.html").as_uri())
    for wide in (page.locator("figure .scroll").first, page.locator(".snippet pre").first):
        wide.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.activeElement.scrollLeft > 0")
        assert page.url.endswith("/ch10_one_budget/index.html")
    page.close()


def test_the_letters_come_with_the_site(browser, built):
    page = browser.new_page()
    page.goto((built / "ch02_kv_cache" / "index.html").as_uri())
    loaded = "document.fonts.ready.then((all) => [...all].filter((f) => f.status === 'loaded').map((f) => f.family))"
    assert {family.strip('"') for family in page.evaluate(loaded)} == {"Source Sans 3", "Source Code Pro"}
    page.close()


def test_search_finds_from_a_file(browser, built):
    page = browser.new_page()
    page.goto(f"{(built / 'search.html').as_uri()}?q=preempted")
    page.wait_for_selector("ul.search li a")
    page.close()


def test_the_landing_page_moves_once_by_itself_and_ends_whole(browser, built):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((built / "index.html").as_uri())
    # Every frame that is shown is written down: a busy machine is not asked in time for those in the middle.
    last = page.evaluate("""() => {
      const widget = document.querySelector("mv-timeline"), show = widget.show;
      window.seen = [];
      widget.show = (k) => { seen.push(k); show.call(widget, k); };
      return widget.frames.length - 1;
    }""")
    page.locator("mv-timeline").scroll_into_view_if_needed()
    page.wait_for_function(f"seen.length > 1 && seen.at(-1) === {last}", timeout=60_000)
    seen = page.evaluate("seen")
    assert seen[0] < last / 2 and seen == sorted(seen) and len(seen) > 3, seen
    page.close()


def test_without_javascript_the_pages_say_the_same(browser, built):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((built / "index.html").as_uri())
    assert page.locator("mv-timeline .mv-count").first.is_visible()
    page.goto((built / "ch02_kv_cache" / "index.html").as_uri())
    assert page.locator(".chart svg.chart-svg").first.is_visible()
    assert page.get_by_text("The numbers").first.is_visible()
    context.close()
