"""The built site in a browser: it looks right, on a phone and a desk, for all, and asks nothing of another machine."""

from __future__ import annotations

import functools
import http.server
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from book.html_pages import MAX_BYTES, Page

pytestmark = pytest.mark.process

# Every page is audited in each colour scheme at each width. Colours take longer than all the rest, and what looks the
# same (LOOKS) is as easy to read on every page: a look that has passed in a scheme is not computed again, but on the
# pages of WHOLE. What is not about colours is looked at again in the second scheme only in what it may change (TOGGLE),
# unless anything else lies or shows otherwise there.
WHOLLY = {"light": 1280, "dark": 390}
COLOURS = {"color-contrast": "text", "link-in-text-block": "links"}  # axe-core's rules about them, and of what
TOGGLE = ".theme-toggle"  # its picture is the scheme's
WIDTHS = (1280, 390)
TABLET = 1024  # the sidebar is just there: nothing but the width is looked at
GENERATED = {"genindex.html", "py-modindex.html"}  # furo's own, which no page links to
WHOLE = {"chapters/index.html", "chapters/ch02_kv_cache/index.html", "docs/reference/server.html"}  # with all in them
GROUPS = ("chapters/ch0", "chapters/ch1", "docs/benchmarks", "docs/reference", "docs", "")  # a page is in its first
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
# Whether this is the first time at this width, or anything but the toggle lies or shows otherwise than then.
# Transitions to these colours and to this width are waited for.
CHANGED = """async (toggle) => {
  const moving = document.getAnimations().filter((one) => one instanceof CSSTransition);
  await Promise.all(moving.map((one) => one.finished.catch(() => 0)));
  const all = [...document.querySelectorAll("*")], now = all.map((element) => {
    const box = element.getBoundingClientRect(), style = getComputedStyle(element);
    return [box.x + scrollX, box.y + scrollY, box.width, box.height, style.display, style.visibility, style.opacity,
            style.position, style.overflow, style.zIndex, style.pointerEvents, style.fontSize].join();
  });
  const first = ((window.places ??= {})[innerWidth] ??= now);
  return first === now || first.length !== now.length
    || all.some((element, i) => now[i] !== first[i] && !element.closest(toggle));
}"""
# Of what axe-core looks at in a rule of COLOURS, all that it works its answer out from: an element's colours, its size
# and what lies behind it; of a link in a text, how it stands out and the text's look, too; of the toggle, what it is.
LOOKS = """window.looks = (toggle) => {
  const behind = new Map([[null, ""]]), text = new Map(), links = new Map(), toggles = new Map();
  const plain = "rgba(0, 0, 0, 0)|none|1|none|normal|none|none|none|static";
  const exempt = "[disabled], [aria-disabled=true], [aria-hidden=true], [inert], label";
  const look = (element) => {
    const s = getComputedStyle(element);
    return [behind.get(element), s.color, s.fill, s.fontSize, s.fontWeight, s.textShadow, s.webkitTextStroke,
            s.webkitTextFillColor, s.textIndent, s.overflow, element.closest(exempt) ? "exempt" : ""].join(";");
  };
  const inText = (link) => {  // with its look, that of the text around it: none, where there is no text but links
    let block = link.parentElement;
    while (/^(inline|contents)$/.test(getComputedStyle(block).display)) block = block.parentElement;
    const without = block.cloneNode(true);
    without.querySelectorAll("a, button").forEach((one) => one.remove());
    if (!without.textContent.trim()) return;
    const s = getComputedStyle(link);
    return [look(link), look(block), s.display, s.textDecoration, s.border, s.boxShadow, s.outline, s.fontStyle,
            s.fontFamily, link.children.length && link.innerHTML.replace(/>[^<]*</g, "><")].join(";");
  };
  for (const element of document.querySelectorAll("*")) {
    const s = getComputedStyle(element), under = behind.get(element.parentElement) ?? "";
    const own = [s.backgroundColor, s.backgroundImage, s.opacity, s.filter, s.mixBlendMode, s.clipPath, s.maskImage,
                 s.transform, s.position === "relative" ? "static" : s.position].join("|");
    behind.set(element, own === plain ? under : `${under}/${own}`);
    if (!element.checkVisibility({visibilityProperty: true})) continue;
    const has = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    const told = has || element.shadowRoot || element.matches("input, select, textarea, option");
    if (told) text.set(element, look(element));
    if (element.matches("a, [role=link]")) links.set(element, inText(element));
    if (element.matches(toggle)) {
      const box = element.getBoundingClientRect();
      toggles.set(element, [box.x, box.y, box.width, box.height, element.outerHTML].join(";"));
    }
  }
  for (const [link, key] of links) if (!key) links.delete(link);
  return {text, links, toggles};
}"""
# passed: of each rule, the looks that need not be looked at again; alike: the place in which all else is, if not
# everywhere. Returns what is wrong, and the looks that have passed now.
AUDIT = """async ([rules, colours, passed, alike]) => {
  const found = [], right = {}, looks = window.looks(alike ?? "html");
  const audit = async (where, rules, more) => {
    const results = await axe.run(where, {resultTypes: ["violations"], runOnly: rules, ...more});
    found.push(...results.violations);
    return results;
  };
  const fresh = (name, looks) => [...looks.keys()].filter((one) => !passed[name]?.includes(looks.get(one)));
  const others = {rules: Object.fromEntries(Object.keys(colours).map((name) => [name, {enabled: false}]))};
  if (alike) {
    const include = fresh("toggle", looks.toggles);
    if (include.length && !(await audit({include}, rules, others)).violations.length)
      right.toggle = include.map((one) => looks.toggles.get(one));
  } else await audit(document, rules, others);
  for (const [name, of] of Object.entries(colours)) {
    const include = fresh(name, looks[of]);
    if (!include.length) continue;
    const {passes} = await audit({include}, {type: "rule", values: [name]},
      {resultTypes: ["violations", "passes"], elementRef: true});
    const these = passes.flatMap((rule) => rule.nodes.map((node) => looks[of].get(node.element)));
    right[name] = [...new Set(these.filter((look) => look))];
  }
  const where = (node) => node.target.join(" ") + " " + node.html.slice(0, 120);
  return [found.map((v) => `${v.id}: ${v.help}: ` + v.nodes.slice(0, 3).map(where).join("; ")), right];
}"""
# Of each widget, by its slider's keys: the frames that it does not get to.
KEYS = [("Home", "0"), ("ArrowRight", "Math.min(1, last)"), ("End", "last"), ("ArrowLeft", "Math.max(0, last - 1)")]


def shown(pages: dict[Path, Page]) -> list[Path]:
    """All but what leads on at once, or is never led to."""
    return [path for path, page in pages.items() if path.name not in GENERATED and page.loads]


@pytest.mark.parametrize("of", GROUPS)
def test_every_page_is_whole_and_open_to_all_on_a_phone_and_a_desk(browser, built, pages, of):
    """Nothing is cut off, nothing was asked of another machine, and axe-core finds no violation of WCAG 2.2 AA."""
    context = browser.new_context(reduced_motion="reduce")
    asked, faults = [], []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(f"{page.url}: {error}"))
    for path in shown(pages):
        name = path.relative_to(built).as_posix()
        if next(group for group in GROUPS if name.startswith(group)) != of:
            continue
        opened(page, path)
        for scheme in WHOLLY:
            faults += [f"{name}, {scheme}, {fault}" for fault in looked_at(page, scheme, name in WHOLE)]
    context.close()
    assert not faults, "\n".join(faults)
    outside = [url for url in asked if not url.startswith(("file:", "data:"))]
    assert asked and not outside, outside


def opened(page, path: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason='pip install -e ".[dev]"')
    page.goto(path.as_uri())
    page.add_script_tag(path=Path(axe.__file__).parent / "axe.min.js")
    page.evaluate(LOOKS)


passed: dict[tuple[str, str], set[str]] = defaultdict(set)  # (scheme, rule) -> looks, on pages audited before


def looked_at(page, scheme: str, with_all: bool) -> list[str]:
    """What is wrong with this page in this scheme, at each width."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": TABLET, "height": 900})
    wide = page.evaluate("document.documentElement.scrollWidth")
    faults = [f"at {TABLET} px: {wide} px wide"] if wide > TABLET else []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        wholly = width == WHOLLY[scheme] and with_all
        alike = None if page.evaluate(CHANGED, TOGGLE) or wholly else TOGGLE
        known = {} if wholly else {rule: sorted(passed[scheme, rule]) for rule in (*COLOURS, "toggle")}
        found, right = page.evaluate(AUDIT, [RULES, COLOURS, known, alike])
        for rule, looks in right.items():
            passed[scheme, rule].update(looks)
        faults += [f"at {width} px: {fault}" for fault in page.evaluate(FAULTS) + found]
    return faults


WORSE = {  # what is found, of a page that is worse than one that has passed: in which elements, and how
    "color-contrast": ("article p", "(p) => p.style.color = '#bbb'"),
    "color-contrast: behind": ("article p", "(p) => p.parentElement.style.background = '#777'"),
    "link-in-text-block": (
        "article p a",
        "(a) => a.replaceChildren(a.innerText) ?? (a.style = 'color: #333; text-decoration: none')",
    ),
    "button-name": (TOGGLE, "(button) => button.replaceChildren() ?? button.removeAttribute('aria-label')"),
}


def test_what_does_not_look_as_on_a_page_that_has_passed_is_found(browser, built):
    page = browser.new_page(reduced_motion="reduce")
    path = built / "docs" / "status.html"
    opened(page, path)
    assert [fault for scheme in WHOLLY for fault in looked_at(page, scheme, False)] == []
    for rule, worse in WORSE.items():
        opened(page, path)
        page.evaluate("([all, how]) => document.querySelectorAll(all).forEach(eval(how))", worse)
        faults = [fault for scheme in WHOLLY for fault in looked_at(page, scheme, False)]
        assert any(f"{rule.partition(':')[0]}: " in fault for fault in faults), (rule, faults)
    page.close()


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
        heavy |= {path.name: size} if size > MAX_BYTES else {}
    page.goto(f"{server}/search.html?q=preempted")
    page.wait_for_selector("ul.search li a")
    context.close()
    assert len(asked) > len(pages) and all(url.startswith((server, "data:")) for url in asked), asked
    assert not heavy, f"heavier than {MAX_BYTES} bytes as a browser loads them: {heavy}"


def test_every_widget_of_the_book_can_be_stepped_through_by_keys(browser, pages):
    """On the pages as they are; what a step shows is looked at in test_widgets.py."""
    page = browser.new_page(reduced_motion="reduce")
    page.set_default_timeout(120_000)
    num_widgets = 0
    for path in shown(pages):
        if 'class="widget' not in path.read_text():
            continue
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
    page.goto((built / "chapters" / "ch10_one_budget" / "index.html").as_uri())
    for wide in (page.locator("figure .scroll").first, page.locator(".snippet pre").first):
        wide.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.activeElement.scrollLeft > 0")
        assert page.url.endswith("/chapters/ch10_one_budget/index.html")
    page.close()


def test_the_letters_come_with_the_site(browser, built):
    page = browser.new_page()
    page.goto((built / "chapters" / "ch02_kv_cache" / "index.html").as_uri())
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
    page.goto((built / "chapters" / "index.html").as_uri())
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
    page.goto((built / "chapters" / "index.html").as_uri())
    assert page.locator("mv-timeline .mv-count").first.is_visible()
    page.goto((built / "chapters" / "ch02_kv_cache" / "index.html").as_uri())
    assert page.locator(".chart svg.chart-svg").first.is_visible()
    assert page.get_by_text("The numbers").first.is_visible()
    context.close()
