"""The programs of examples/: short, and each shows what its docstring says that one sees.

They run as they are, with a tiny model of random weights, or a server of it, as their argument.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MODEL = "dummy:tiny"
Run = Callable[[str, str], str]


@pytest.fixture
def run(monkeypatch, capsys) -> Run:
    def run(name: str, argument: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, argument])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-u", "-m", "minivllm", "serve", MODEL, "--port", "0", "--set", "executor.num_threads=1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            ready = next((line for line in process.stdout if line.startswith("Ready")), "")
            yield re.search(r"http://[\d.:]+", ready)[0]
        finally:
            process.terminate()
            process.stdout.read()


def test_there_are_six_of_at_most_thirty_lines_and_each_says_what_one_sees():
    assert len(EXAMPLES) == 6
    for path in EXAMPLES:
        text = path.read_text()
        doc = ast.get_docstring(ast.parse(text))
        assert len(text.splitlines()) <= 30, path.name
        assert f"python examples/{path.name} [" in doc and re.search(r"\bsees\b", doc), path.name


def test_every_example_is_run_here():
    text = Path(__file__).read_text()
    assert all(f'run("{path.name}", ' in text for path in EXAMPLES)


def test_prompts_that_come_together_share_steps(run):
    *lines, last = run("offline_generate.py", MODEL).rstrip().split("\n")
    assert len(lines) == 3 and all(" -> " in line for line in lines)
    num_tokens, num_steps = map(int, re.fullmatch(r"(\d+) tokens in (\d+) steps of the engine", last).groups())
    assert num_tokens <= 3 * 20 and num_steps <= 20 and num_steps < num_tokens / 2  # a text may end early


def test_random_weights_follow_the_schema_too(run):
    lines = run("structured_output.py", MODEL).splitlines()
    assert len(lines) == 3
    for line in lines:
        judged = ast.literal_eval(line[line.index("{") :])
        assert json.dumps(judged) and judged["mood"] in ("happy", "angry", "neutral") and judged["stars"] in range(1, 6)
        assert judged.keys() == {"mood", "stars"}


def test_v0_and_v1_say_the_same(run):
    said = run("v0_and_v1.py", MODEL)
    assert re.findall(r"^(v\d): [\d.]+ s, \d+ steps$", said, re.MULTILINE) == ["v0", "v1"]
    assert said.endswith("the same texts by both: yes\n") and len(re.findall(r"^  ['\"]", said, re.MULTILINE)) == 6


def test_guesses_save_steps_and_change_nothing(run):
    said = run("speculative_decoding.py", MODEL)
    found = re.findall(r"^(\S+) +[\d.]+ s, (\d+) steps, (\d+) of (\d+) guesses right$", said, re.MULTILINE)
    (none, without, *drafts), (ngram, steps, right, guessed) = found
    assert (none, ngram, drafts) == ("none", "n-gram", ["0", "0"])
    assert int(steps) < int(without) and 0 < int(right) <= int(guessed)
    assert said.endswith("the same text by both: yes\n")


def test_the_openai_client_streams(run, url):
    said = run("streaming_chat.py", url)
    answer, _, last = said.rstrip().rpartition("\n\n")
    assert answer
    assert re.fullmatch(rf"{MODEL}: first token after \d+ ms, then one every \d+ ms", last)


def test_the_second_question_finds_the_text_in_the_cache(run, url):
    said = run("prefix_caching.py", url)
    rows = re.findall(r"(\d+) of (\d+) tokens were in the cache; first token after \d+ ms", said)
    first, second, third = [(int(found), int(asked)) for found, asked in rows]
    assert first[0] == 0 and all(0.9 * asked < found < asked for found, asked in (second, third))
