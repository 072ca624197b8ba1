"""An engine that embeds has what every engine has: replicas in processes, several servers, metrics, the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil
import pytest
from pooling.tiny import TEXTS, write_bert

from minivllm import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    write_bert(folder)
    return str(folder)


@pytest.fixture(scope="module")
def wanted(folder):
    with LLM(folder, overrides={"executor.num_threads": 1}) as llm:
        return np.array([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])


@pytest.fixture(scope="module")
def server(folder):
    command = [sys.executable, "-u", "-m", "minivllm.serve", "--model", folder, "--port", "0", "--replicas", "2"]
    command += ["--api-servers", "2", "--set", "executor.num_threads=1", "--served-model-name", "tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            ready = next(line for line in server.stdout if line.startswith("Ready"))
            server.url = re.search(r"http://[\d.:]+", ready)[0]
            yield server
        finally:
            server.terminate()
            server.stdout.read()


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def embed(client, texts) -> np.ndarray:
    reply = client.post("/v1/embeddings", json={"input": texts})
    assert reply.status_code == 200, reply.text
    return np.array([item["embedding"] for item in reply.json()["data"]])


def looks(client) -> dict[int, dict]:
    """What the live page is told of each replica."""
    found = {}
    with client.stream("GET", "/debug/live") as events:
        for line in events.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line[6:])
                found[event["replica"]] = event
            if len(found) == 2:
                return found


def test_replicas_behind_several_servers_give_the_vectors_of_one(client, wanted):
    with ThreadPoolExecutor(8) as pool:
        each = list(pool.map(lambda i: embed(client, TEXTS[i % len(TEXTS)]), range(48)))
    for i, found in enumerate(each):
        np.testing.assert_allclose(found[0], wanted[i % len(TEXTS)], rtol=0, atol=1e-6)
    np.testing.assert_allclose(embed(client, TEXTS), wanted, rtol=0, atol=1e-6)
    ranked = client.post("/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS}).json()["results"]
    scores = {item["index"]: item["relevance_score"] for item in ranked}
    np.testing.assert_allclose([scores[i] for i in range(len(TEXTS))], wanted @ wanted[0], atol=1e-6)


def test_metrics_and_the_page_know_each_replica(client, eventually):
    embed(client, TEXTS)
    eventually(lambda: re.search(r"minivllm:prompt_tokens_total\S* [1-9]", client.get("/metrics").text))
    replicas = looks(client)
    assert replicas.keys() == {0, 1}
    assert all(event["look"]["blocks"] == "" and event["look"]["waiting"] == 0 for event in replicas.values())


def test_a_replica_that_is_killed_takes_its_requests_along_and_no_others(server, wanted, eventually):
    cores = [child for child in psutil.Process(server.pid).children(recursive=True)
             if "minivllm.engine.process" in child.cmdline()]  # fmt: skip
    assert len(cores) == 2
    for core in cores:
        core.suspend()
    with ThreadPoolExecutor(8) as pool:  # so many that each router has given some to either
        asked = [
            pool.submit(httpx.post, f"{server.url}/v1/embeddings", json={"input": text}, timeout=60)
            for text in [TEXTS[0]] * 8
        ]
        eventually(lambda: httpx.get(f"{server.url}/load").json()["server_load"] > 0)
        cores[0].kill()
        cores[1].resume()
        replies = [reply.result() for reply in asked]
    codes = {reply.status_code for reply in replies}
    assert 200 in codes and codes <= {200, 503}
    eventually(lambda: httpx.get(f"{server.url}/health").json() == {"status": "ok"}, seconds=60)
    with httpx.Client(base_url=server.url, timeout=60) as anew:
        np.testing.assert_allclose(embed(anew, TEXTS), wanted, rtol=0, atol=1e-6)
