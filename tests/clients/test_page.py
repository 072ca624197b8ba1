"""The snippets of docs/clients.md, as they stand, with the models that they name."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from clients.snippets import run, snippets

pytestmark = [pytest.mark.model, pytest.mark.slow]
TEXT, VECTORS = "http://127.0.0.1:8000", "http://127.0.0.1:8001"  # the page's servers


@pytest.fixture(scope="module")
def url():
    """Where a server of a model runs."""
    started = {}

    def url(*args):
        if args not in started:
            command = [sys.executable, "-u", "-m", "minivllm.serve", "--port", "0", *args]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            ready = next(line for line in process.stdout if line.startswith("Ready"))
            started[args] = process, re.search(r"http://[\d.:]+", ready)[0]
        return started[args][1]

    yield url
    for process, _ in started.values():
        process.terminate()
        process.stdout.read()
        process.wait()


@pytest.mark.parametrize(
    ("package", "heading"), [("langchain_openai", "LangChain"), ("llama_index.llms.openai_like", "LlamaIndex")]
)
def test_chats_streams_tools_and_structured_output(url, package, heading):
    pytest.importorskip(package)
    *parts, _ = snippets(heading)
    printed = run("\n".join(parts), {TEXT: url()})
    assert "name=" in printed and "people=" in printed and "weather {'city':" in printed
    assert len(printed.splitlines()[0]) > 10


@pytest.mark.parametrize(
    ("package", "heading"), [("langchain_openai", "LangChain"), ("llama_index.embeddings.openai_like", "LlamaIndex")]
)
def test_embeddings_have_the_size_of_the_models_vectors(url, package, heading):
    pytest.importorskip(package)
    assert run(snippets(heading)[-1], {VECTORS: url("--model", "minilm")}) == "384 384\n"
