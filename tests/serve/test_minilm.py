"""A real embedding model, all-MiniLM-L6-v2: from its wheel to vectors, by one command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from pooling.tiny import hidden_of
from tolerances import EMBEDDING

pytestmark = pytest.mark.model
ROOT = Path(__file__).parent.parent.parent
QUERY = "How many people live in Berlin?"
DOCUMENTS = [
    "A cheetah runs faster than any other animal on land.",
    "Berlin had a population of 3,520,031 registered inhabitants in an area of 891.82 square kilometers.",
    "Berlin is well known for its museums.",
    "The recipe needs two eggs and a cup of flour.",
]
TEXTS = [*DOCUMENTS, QUERY, "naïve 日本語 🎉", "word " * 240, "x"]


@pytest.fixture(scope="module")
def llm():
    from minivllm import LLM

    return LLM("minilm")


@pytest.fixture(scope="module")
def server():
    """(base URL, what was printed before it was ready)."""
    command = [sys.executable, "-u", "-m", "minivllm.serve", "--model", "minilm", "--port", "0"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as p:
        try:
            lines = []
            for line in p.stdout:
                lines.append(line)
                if line.startswith("Ready"):
                    break
            yield re.search(r"http://[\d.:]+", lines[-1])[0], "".join(lines)
        finally:
            p.terminate()
            p.stdout.read()


def test_vectors_equal_transformers_and_the_recipe_of_sentence_transformers(llm):
    from transformers import AutoModel

    from minivllm.loading import resolve

    oracle = AutoModel.from_pretrained(resolve("minilm").tokenizer_dir, dtype=torch.float32).eval()
    wanted = [hidden_of(oracle, llm.tokenizer.encode(text)).mean(0).numpy() for text in TEXTS]
    wanted = np.array([vector / np.linalg.norm(vector) for vector in wanted])
    found = np.array([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
    assert found.shape == (len(TEXTS), 384)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=EMBEDDING)
    alone = np.array([llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in TEXTS])
    np.testing.assert_allclose(found, alone, rtol=0, atol=EMBEDDING)


def test_the_tokenizer_gives_transformers_tokens(llm):
    from transformers import AutoTokenizer

    from minivllm.loading import resolve

    theirs = AutoTokenizer.from_pretrained(resolve("minilm").tokenizer_dir)
    for text in TEXTS:
        assert llm.tokenizer.encode(text) == theirs(text)["input_ids"]


def test_it_takes_the_length_and_the_precision_that_it_was_made_with(llm):
    assert llm.max_model_len == 256 and llm.info["dtype"] == "float32"
    reasons = {decision.field: decision.reason for decision in llm.decisions}
    assert reasons["model.pooling"] == "as modules.json says"


def test_the_document_that_answers_comes_first(llm):
    scores = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    assert sorted(range(4), key=lambda i: -scores[i])[:2] == [1, 2]
    assert scores[1] > 0.5 > 0.2 > max(scores[0], scores[3])


def test_one_command_serves_it(server):
    url, printed = server
    assert "mean, unit length" in printed and "/v1/embeddings" in printed
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    reply = client.embeddings.create(model="minilm", input=[QUERY, *DOCUMENTS])
    query, *documents = (np.array(item.embedding) for item in reply.data)
    assert int(np.argmax([query @ document for document in documents])) == 1
    asked = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    ranked = httpx.post(f"{url}/v1/rerank", json=asked, timeout=60).json()
    assert [item["index"] for item in ranked["results"]] == [1, 2]


def test_it_embeds_what_it_chats_with_under_another_task():
    """The default model pools its last token, or the mean."""
    from minivllm import LLM
    from minivllm.loading import resolve
    from minivllm.runner.naive_worker import load_transformers

    oracle = load_transformers(resolve("smollm2-135m"), torch.float32, torch.device("cpu"), 0).model
    texts = ["The sea is a place of wonder.", "2 + 2 = 4"]
    for pooling in ("last", "mean"):
        llm = LLM(task="embed", dtype="float32", pooling=pooling)
        found = np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])
        for text, vector in zip(texts, found, strict=True):
            hidden = hidden_of(oracle, llm.tokenizer.encode(text))
            wanted = (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()
            np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), rtol=0, atol=EMBEDDING)
