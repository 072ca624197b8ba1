"""The built site: no warning, no dead link, nothing typed that is measured. In a browser: test_site_browser.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from book.html_pages import MAX_BYTES
from bookext import charts, codemap, quotes, records

from bench import __main__ as benchmarks
from minivllm.cli import COMMANDS
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
CHAPTERS = sorted((ROOT / "chapters").glob("ch*/index.md"))
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = list(quotes.pages().values())
TOLD = [ROOT / "chapters" / "index.md", *CHAPTERS]  # what tells, rather than lists
OUTSIDE = ("https://github.com/pradyunsg", "https://pradyunsg.me")  # furo's own credits: links, which load nothing


def test_every_internal_link_and_anchor_resolves(built, pages):
    assert built / "chapters" / "index.html" in pages and built / "index.html" in pages and len(pages) > 30
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
        assert path.stat().st_size + heavy + fonts < MAX_BYTES, path


def test_a_link_leads_to_the_same_page_in_the_repository_and_in_the_site():
    """Every page is read from its file too: in an editor, or where the repository is hosted."""
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).is_file(), f"{page.relative_to(ROOT)}: {link}"


def test_no_page_promises_a_measurement(pages):
    """What has no result is not listed: `{measured}` shows nothing without its file."""
    promised = r"(?:not (?:been )?(?:measured|timed) yet|not yet (?:been )?(?:measured|timed)|unmeasured)"
    for path in pages:
        text = " ".join(re.sub("<[^>]*>", " ", path.read_text()).split())
        found = re.findall(f".{{40}}{promised}", text, re.IGNORECASE)
        assert not found, f"{path.name}: {found}"


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


@pytest.mark.parametrize("page", [*CHAPTERS, *DOCS], ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_option_that_a_page_names_exists_and_may_be_set_so(page):
    for options in options_named(page):
        EngineConfig.build("v1", options)
    with pytest.raises(ConfigError):
        EngineConfig.build("v1", {"kv.prefix": "nothing"})


def is_there(command: str) -> bool:
    """A target of make, a command of the package, or a script or module of this repository."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    match shlex.split(command):
        case ["make", *words]:
            wanted = {word for word in words if "=" not in word}  # else a variable's value: ARGS="llama.cpp"
            return bool(wanted) and wanted <= targets
        case ["python", "-m", "minivllm", name, *_] | ["minivllm", name, *_]:
            return name in COMMANDS
        case ["python", "-m", "bench", name, *_]:
            return name in benchmarks.names()
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
        for command in re.findall(r"^\$ (.*)$", page.read_text(), re.MULTILINE):
            assert is_there(command), command
    assert (
        not is_there("make nothing")
        and not is_there('make ARGS="clients"')
        and not is_there("python -m minivllm nothing")
        and not is_there("python no.py")
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
