"""The built site: no warning, no dead link, nothing typed that should be measured, and it looks right in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from bookext import charts, codemap, records

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "chapters" / "index.md", *(ROOT / "chapters").glob("ch*/index.md")])
MAX_PAGE_BYTES = 350_000
OUTSIDE = ("https://github.com/pradyunsg", "https://pradyunsg.me")  # furo's own credits: links, which load nothing
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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


def test_a_page_loads_nothing_from_outside_and_is_light(pages):
    for path, page in pages.items():
        for load in page.loads:
            assert "//" not in load and (path.parent / load.partition("?")[0]).is_file(), f"{path.name} loads {load}"
        heavy = sum((path.parent / load.partition("?")[0]).stat().st_size for load in page.loads)
        assert path.stat().st_size + heavy < MAX_PAGE_BYTES, path


def prose(page: Path) -> str:
    """What is said in words: without blocks, figures and code."""
    text = re.sub(
        r"^```\{?(?:snippet|console|run-output).*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)
    return re.sub(r"\{num\}`[^`]*`|`[^`]*`", "", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.parent.name)
def test_no_measurement_is_typed(page):
    """A number with a unit of measurement is a figure that {num} should show."""
    typed = re.findall(r"\b\d[\d.,]*\s?(?:ms|s|us|µs|seconds|MiB|GiB|MB|GB|%|percent|times|x|×)(?!\w)", prose(page))
    assert not typed, typed


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.parent.name)
def test_the_prose_promises_nothing(page):
    assert not re.findall(r"\b(?:simply|just|blazing\w*|obviously|easily)\b", prose(page), re.IGNORECASE)


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "chapters"], ids=lambda p: p.parent.name)
def test_a_chapter_has_all_its_parts(page):
    text = page.read_text()
    for part in (
        "Feel it",
        "The code",
        "Run it",
        "What we saw",
        "Where it loses",
        "Exercise",
        "Check yourself",
        "In vLLM",
    ):
        assert f"## {part}" in text, part
    for directive in ("chart", "predict", "snippet", "run-output", "exercise", "sources"):
        assert f"{{{directive}}}" in text, directive
    assert 1000 <= len(prose(page).split()) <= 2500


def test_every_command_of_a_page_exists():
    """`make` targets and `python -m minivllm` commands; the chapters' own are run by test_chapters.py."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for command in re.findall(r"^\$ (.*)$", page.read_text(), re.MULTILINE):
            program, *rest = command.split()
            assert (program == "make" and set(rest) <= targets) or command.startswith("python -m minivllm chapter "), (
                command
            )


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


# Pages in frames of a phone's and a desk's width. It reports what sticks out: of the page, or of a picture.
FRAMES = """<body><script>
const faults = [], loaded = [];
function look(frame, width, name) {
  const d = frame.contentDocument, root = d.documentElement, at = `${name} at ${width} px: `;
  if (root.scrollWidth > width) faults.push(at + `${root.scrollWidth} px wide`);
  for (const svg of d.querySelectorAll("svg.chart-svg, svg.codemap")) {
    const box = svg.viewBox.baseVal;
    for (const text of svg.querySelectorAll("text")) {
      const b = text.getBBox();
      if (b.x < -1 || b.y < -1 || b.x + b.width > box.width + 1 || b.y + b.height > box.height + 1)
        faults.push(at + `"${text.textContent}" is cut off`);
    }
  }
  if (width > 1000) for (const line of d.querySelectorAll(".compare pre, .run-output pre"))
    if (line.scrollWidth > line.clientWidth + 1) faults.push(at + "cut off: " + line.innerText.slice(0, 40));
  for (const box of d.querySelectorAll(".predict, .exercise"))
    if (parseFloat(frame.contentWindow.getComputedStyle(box).paddingLeft) < 8) faults.push(at + "no room in a box");
  for (const folded of d.querySelectorAll("details")) if (folded.open) faults.push(at + "an answer is given away");
  loaded.push(name);
}
for (const name of PAGES) for (const width of [390, 1280]) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.onload = () => look(frame, width, name);
  frame.src = name;
  document.body.append(frame);
}
onload = () => { document.body.innerHTML = ""; document.title = JSON.stringify({loaded, faults}); };
</script></body>"""


def browse(page: Path, profile: Path, *flags: str) -> str:
    """The page's DOM once its scripts have run, with no name that resolves."""
    offline = ("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *offline, f"--user-data-dir={profile}", *flags]
    command += ["--virtual-time-budget=10000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_on_a_phone_or_a_desk(built, pages, tmp_path, scheme):
    names = [str(p.relative_to(built)) for p in pages if p.name not in ("search.html", "genindex.html")]
    frames = built / f"frames-{scheme}.html"
    frames.write_text(FRAMES.replace("PAGES", json.dumps(names)))
    flags = ["--allow-file-access-from-files", *(["--blink-settings=preferredColorScheme=0"] * (scheme == "dark"))]
    try:
        dom = browse(frames, tmp_path / "profile", *flags)
    finally:
        frames.unlink()
    report = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom)[1]))
    assert sorted(set(report["loaded"])) == sorted(names) and len(report["loaded"]) == 2 * len(names)
    assert not report["faults"], "\n".join(report["faults"])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")
def test_search_works_from_a_file(built, tmp_path):
    dom = browse(Path(f"{built}/search.html"), tmp_path / "profile")
    assert "search" in dom
