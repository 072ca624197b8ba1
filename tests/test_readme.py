"""The README shows what really happens: its examples are run against a server, and its outputs compared."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
ENV = os.environ | {"PYTHONPATH": str(ROOT)}

pytestmark = pytest.mark.model


def block(language: str, containing: str) -> str:
    (found,) = [text for name, text in BLOCKS if name == language and containing in text]
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-u", "-m", "minivllm.serve", "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as p:
        try:
            ready = next((line for line in p.stdout if line.startswith("Ready")), "")
            yield re.search(r"http://[\d.:]+", ready)[0]
        finally:
            p.terminate()
            p.stdout.read()


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shape(value: object) -> object:
    """The keys of a JSON document and the types of its values."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else type(value)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_example_prints_what_the_readme_shows(url):
    printed = json.loads(run(["bash", "-c", block("bash", "curl").replace("http://127.0.0.1:8000", url)]))
    shown = json.loads(block("json", "chat.completion"))
    assert shape(printed) == shape(shown)
    assert printed["choices"] == shown["choices"] and printed["usage"] == shown["usage"]


def test_the_openai_example_streams_what_the_readme_shows(url):
    """Both examples ask what the model is sure of, so that bfloat16 and float32 give the same words."""
    code = block("python", "OpenAI").replace("http://127.0.0.1:8000", url)
    assert run([sys.executable, "-c", code]) == block("text", "primary colors")


def test_the_offline_example_completes_its_prompts():
    printed = run([sys.executable, "-c", block("python", "llm.generate")]).splitlines()
    shown = block("text", "2 + 2 =").splitlines()
    assert [line.partition(" -> ")[0] for line in printed] == [line.partition(" -> ")[0] for line in shown]
    assert all(line.partition(" -> ")[2] for line in printed)


def test_every_command_that_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    for name in set(re.findall(r"python -m minivllm (\w+)", text)):
        run([sys.executable, "-m", "minivllm", name, "--help"])
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) <= set(targets)


def test_every_path_that_the_readme_names_exists():
    names = re.findall(r"`((?:minivllm|kernels|bench|tests)/[\w./]*)`", (ROOT / "README.md").read_text())
    assert len(names) > 10 and all((ROOT / name).exists() for name in names)
