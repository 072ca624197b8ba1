"""README.md and docs/ show what really happens: their examples are run against a server, their commands are parsed."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

from minivllm import features
from minivllm.serve import command as serve_command

ROOT = Path(__file__).parent.parent
README, SERVER, OFFLINE = ROOT / "README.md", ROOT / "docs" / "server.md", ROOT / "docs" / "offline.md"
PAGES = [README, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOP = {"minivllm", "kernels", "bench", "tests", "deploy", "site", "docs", "chapters"}
ENV = os.environ | {"PYTHONPATH": str(ROOT)}
HERE, MAX_LINES, MAX_PICTURE_BYTES = "http://127.0.0.1:8000", 120, 200_000

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem if p.parent == ROOT else f"docs-{p.stem}")
# The whole table beside peers is this: a machine's runs, the newest first, and of each engine in the table's order the
# settings that may stand in its row.
PEERS = {
    ("peers-amx-one", "peers-amx"): [
        ("minivllm", "minivllm-prefault"),
        ("minivllm-bf16-prefault",),
        ("vllm-bound",),
        ("llama.cpp",),
    ],
    ("peers-zen4",): [("minivllm-prefault",), ("minivllm-bf16-prefault",), ("vllm-bound",)],
    ("peers-zen3",): [("minivllm-prefault",), ("vllm-unbound",), ("llama.cpp",)],
}
WORKLOADS = ("one", "eight", "mixed32")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def block(page: Path, language: str, containing: str) -> str:
    (found,) = [text for text in blocks(page, language) if containing in text]
    return found


def commands(page: Path) -> list[list[str]]:
    """The words of each command of ours in the page's bash blocks, and in the first column of its tables."""
    lines = [line for text in blocks(page, "bash") for line in text.splitlines() if "curl" not in text]
    listed = re.findall(r"^\| `((?:python|make|minivllm|--[a-z]+) [^`]+)` \|", page.read_text(), re.MULTILINE)
    lines += [f"make serve ARGS='{line}'" if line.startswith("--") else line for line in listed]
    split = [shlex.split(line, comments=True) for line in lines if "<" not in line]  # <that address>
    return [words for words in split if words]


@pytest.fixture(scope="module")
def serving() -> Iterator[Callable[..., str]]:
    """serving(*options): where a server of a model runs."""
    started: dict[tuple[str, ...], tuple[subprocess.Popen[str], str]] = {}

    def url(*options: str) -> str:
        if options not in started:
            command = [sys.executable, "-u", "-m", "minivllm.serve", "--port", "0", *options]
            quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            process = subprocess.Popen(command, cwd=ROOT, env=ENV, **quiet)
            ready = next((line for line in process.stdout if line.startswith("Ready")), "")
            started[options] = process, re.search(r"http://[\d.:]+", ready)[0]
        return started[options][1]

    yield url
    for process, _ in started.values():
        process.terminate()
        process.stdout.read()
        process.wait()


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shape(value: object) -> object:
    """The keys of a JSON document and the types of its values."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else type(value)


# ---------------------------------------------------------------------------------------- what is run


@pytest.mark.model
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_example_prints_what_the_pages_show(serving):
    printed = json.loads(run(["bash", "-c", block(README, "bash", "curl").replace(HERE, serving())]))
    shown = json.loads(block(SERVER, "json", "chat.completion"))
    assert shape(printed) == shape(shown)
    assert printed["choices"] == shown["choices"] and printed["usage"] == shown["usage"]
    assert f"`{printed['choices'][0]['message']['content']}`" in README.read_text()


@pytest.mark.model
def test_the_openai_example_streams_what_the_page_shows_and_a_forced_tool_is_called(serving):
    """Both examples ask what the model is sure of, so that bfloat16 and float32 give the same words."""
    code = block(SERVER, "python", "OpenAI") + block(SERVER, "python", "tool_choice")
    printed = run([sys.executable, "-c", code.replace(HERE, serving())])
    shown = block(SERVER, "text", "primary colors")
    assert printed.startswith(shown) and "name='weather'" in printed.removeprefix(shown)


@pytest.mark.model
def test_the_embeddings_example_works_against_a_model_that_embeds(serving):
    opened = "\n".join(block(SERVER, "python", "OpenAI").splitlines()[:3])
    asked = block(SERVER, "python", "embeddings.create").strip()
    code = f"{opened}\nprint(*[len(item.embedding) for item in {asked}.data])"
    assert run([sys.executable, "-c", code.replace(HERE, serving("--model", "minilm"))]) == "384 384\n"


@pytest.mark.model
def test_the_readmes_python_completes_its_prompts():
    code = block(README, "python", "llm.generate")
    printed = run([sys.executable, "-c", code]).splitlines()
    (prompts,) = re.findall(r"generate\((\[.*?\])", code)
    assert [line.partition(" -> ")[0] for line in printed] == [repr(prompt) for prompt in ast.literal_eval(prompts)]
    assert all(line.partition(" -> ")[2] for line in printed)


@pytest.mark.model
def test_the_offline_page_runs_from_its_top_to_its_end():
    code = "\n".join(blocks(OFFLINE, "python")) + "\nprint(len(vectors[0]), len(scores))"
    answer, *structured, last = run([sys.executable, "-c", code]).splitlines()
    assert "Tokyo" in answer and "{" in "".join(structured) and last == "384 2"


# ---------------------------------------------------------------------------------------- what is parsed


@each_page
def test_every_command_of_a_page_exists_and_takes_its_options(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(page):
        match words:
            case ["make", "serve", *rest]:
                parsed(shlex.split(" ".join(rest).removeprefix("ARGS=")))
            case ["make", target, *_]:
                assert target in targets, words
            case ["python", "-m", "minivllm.serve", *rest]:
                parsed(rest)
            case ["python", "-m", "minivllm", *_] | ["minivllm", *_]:
                pass  # below, with those in the text
            case ["python", "-m", module, *_]:
                path = ROOT / module.replace(".", "/").replace("minivllm/kernels", "kernels")
                assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), words
            case ["python", script, *_]:
                assert (ROOT / script).is_file(), words
            case _:
                raise AssertionError(f"no test knows this command: {words}")


def parsed(options: list[str]) -> None:
    """As the server takes them, the engine's options included. Exits or raises if it would."""
    serve_command.engine_options(serve_command.parser("serve").parse_args(options))


def test_every_command_that_the_pages_name_exists():
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"python -m minivllm (\w+)", text))
    assert len(named) > 3
    for name in named:
        run([sys.executable, "-m", "minivllm", name, "--help"])


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.skipif("scripts" not in PROJECT, reason="this checkout has no console command")
def test_every_console_command_that_the_pages_name_exists():
    named = {words[1] for page in PAGES for words in commands(page) if words[0] == "minivllm"}
    named |= {name for page in PAGES for name in re.findall(r"`minivllm (\w+)", page.read_text())}
    assert named >= {"serve", "chat", "batch", "bench", "chapter", "features"}
    for name in named:
        run([sys.executable, "-m", "minivllm", name, "--help"])


@each_page
def test_every_path_that_a_page_names_exists(page):
    names = re.findall(rf"`((?:{'|'.join(TOP)})/[\w./-]*)`", page.read_text())
    gone = [name for name in names if not (ROOT / name.replace("minivllm/kernels", "kernels")).exists()]
    assert not gone and (names or page.parent != ROOT)


def test_every_link_of_the_readme_leads_to_a_file():
    found = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text())
    assert len(found) > 10 and all((ROOT / name).is_file() for name in found)


@each_page
def test_python_that_is_not_run_is_at_least_python(page):
    for code in blocks(page, "python"):
        ast.parse(code)


# ---------------------------------------------------------------------------------------- what is said


def test_the_readme_is_short_and_its_picture_light():
    text = README.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    (picture,) = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG") and (ROOT / picture).stat().st_size < MAX_PICTURE_BYTES


def test_the_picture_is_of_the_runs_as_they_are_recorded(monkeypatch):
    """Its figures stand beside it in words: `make traces` asks for site/picture.py, and for these."""
    monkeypatch.syspath_prepend(str(ROOT / "site"))
    from bookext import replay

    said = re.search(r"!\[([^\]]*)\]", README.read_text())[1]
    lanes = [replay.lane(replay.load(name)) for name in ("stall-v0", "stall-v1")]
    assert re.findall(r"(\d+) ms", said) == [f"{lane.longest_gap(lane.ends[-1]):.0f}" for lane in lanes]


def median_rates(results: dict, settings: tuple[str, ...], workload: str) -> list[float]:
    """Of those that ran it."""
    runs = results["workloads"].get(workload, {"runs": {}})["runs"]
    return [median(runs[name]["rates"]) for name in settings if name in runs and runs[name]["rates"]]


def newest_rate(records: list[dict], settings: tuple[str, ...], workload: str) -> str:
    """Of the first record that has one."""
    found = next(filter(None, (median_rates(results, settings, workload) for results in records)), [])
    return f"{max(found):.0f}" if found else ""


def test_each_figure_beside_peers_is_a_committed_one():
    """The better one, where one run had an engine in two settings."""
    rows = re.findall(r"^\| [^|]*\| [^|]+ \|((?: *\d* \|){3})$", README.read_text(), re.MULTILINE)
    shown = [[cell.strip() for cell in row.split("|")[:3]] for row in rows]
    wanted = []
    for names, engines in PEERS.items():
        records = [json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["results"] for name in names]
        wanted += [[newest_rate(records, engine, workload) for workload in WORKLOADS] for engine in engines]
    assert shown == wanted


def test_the_table_of_interfaces_is_what_the_protocols_are():
    rows = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \| (.+) \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    for name, path, methods in rows:
        (found,) = [n for n in ast.parse((ROOT / path).read_text()).body if getattr(n, "name", "") == name]
        assert [ast.unparse(base) for base in found.bases] == ["Protocol"], name
        defined = [n.name for n in found.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        assert re.findall(r"`(\w+)`", methods) == defined, name


def test_the_row_that_is_quoted_is_in_the_feature_table():
    quoted = eval(block(ROOT / "ARCHITECTURE.md", "python", "Feature("), {"Feature": features.Feature})
    (row,) = [feature for feature in features.FEATURES if feature.name == quoted.name]
    for name in ("field", "options", "default", "chapter"):
        assert getattr(quoted, name) == getattr(row, name)
    assert row.what.startswith(quoted.what.partition(" ...")[0].partition(" starts")[0])


def test_the_layers_are_listed_in_their_order():
    from test_layers_of_the_house import STOREY

    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## The layers")[2].partition("Beside the package")[0]
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE)]
    heights = [[STOREY[name] for name in row] for row in rows]
    assert len(rows) > 15 and heights == sorted(heights, key=lambda row: max(row), reverse=True)
    assert all(min(above) >= max(below) for above, below in zip(heights, heights[1:], strict=False))
