"""Embeddings, scores and reranking over a real socket, as the clients that exist ask for them."""

from __future__ import annotations

import base64
import json
import socket
import threading
from contextlib import contextmanager

import httpx
import numpy as np
import openai
import pytest
import torch
from eventually import PATIENCE
from pooling.tiny import TEXTS, write_bert
from steps import before_each_step

from minivllm.engine.async_llm import AsyncLLM


@pytest.fixture(scope="module")
def pooler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    write_bert(folder)
    return AsyncLLM(str(folder), overrides={"executor.num_threads": 1})


@pytest.fixture(scope="module")
def url(pooler, serving):
    with serving(pooler, names=("tiny",)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def cross(tmp_path_factory, serving):
    folder = tmp_path_factory.mktemp("cross")
    write_bert(folder, num_labels=1)
    with serving(AsyncLLM(str(folder), overrides={"executor.num_threads": 1})) as url:
        yield url


def post(url, path, data):
    content = data if isinstance(data, bytes) else json.dumps(data).encode()
    return httpx.post(f"{url}{path}", content=content, headers={"content-type": "application/json"}, timeout=30)


def vectors(client, texts, **fields):
    reply = client.embeddings.create(model="tiny", input=texts, **fields)
    return np.array([item.embedding for item in reply.data], np.float32)


def test_the_openai_client_gets_each_texts_vector(client, pooler):
    reply = client.embeddings.create(model="tiny", input=TEXTS)
    assert [item.index for item in reply.data] == list(range(len(TEXTS)))
    assert {item.object for item in reply.data} == {"embedding"} and reply.object == "list" and reply.model == "tiny"
    num_tokens = sum(len(pooler.tokenizer.encode(text)) for text in TEXTS)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (num_tokens, num_tokens)


def test_float_and_base64_are_the_same_numbers(client):
    """Asked for no format, the client asks for base64 and decodes it; asked for base64, it leaves the text as it is."""
    as_float = vectors(client, TEXTS, encoding_format="float")
    assert as_float.shape == (len(TEXTS), 48) and np.array_equal(vectors(client, TEXTS), as_float)
    reply = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(item.embedding), "<f4") for item in reply.data]
    assert np.array_equal(decoded, as_float)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_vectors_as_bytes_with_where_each_lies(url, client, path):
    numbers = vectors(client, TEXTS)
    for dtype, endianness, kind, atol in (
        (None, None, "<f4", 0),
        ("float16", "big", ">f2", 1e-3),
        ("float32", "native", "=f4", 0),
    ):
        asked = {"input": TEXTS, "embed_dtype": dtype, "endianness": endianness}
        reply = post(url, path, asked | {"encoding_format": "bytes"})
        told = json.loads(reply.headers["metadata"])
        assert reply.headers["content-type"] == "application/octet-stream" and told["model"] == "tiny"
        assert [place["index"] for place in told["data"]] == list(range(len(TEXTS)))
        assert {place["embed_dtype"] for place in told["data"]} == {dtype or "float32"}
        parts = [reply.content[place["start"] : place["end"]] for place in told["data"]]
        assert b"".join(parts) == reply.content and told["data"][0]["shape"] == [numbers.shape[1]]
        np.testing.assert_allclose([np.frombuffer(part, kind) for part in parts], numbers, atol=atol, rtol=0)
        bare = post(url, path, asked | {"encoding_format": "bytes_only"})
        assert bare.content == reply.content and "metadata" not in bare.headers
        encoded = post(url, path, asked | {"encoding_format": "base64"}).json()["data"]
        assert [base64.b64decode(item.get("embedding") or item["data"]) for item in encoded] == parts


def test_more_places_than_a_header_holds_are_a_400(url):
    asked = {"input": [[5]] * 400, "encoding_format": "bytes"}
    reply = post(url, "/v1/embeddings", asked)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "encoding_format"
    assert len(post(url, "/v1/embeddings", asked | {"encoding_format": "bytes_only"}).content) % 400 == 0


def test_vectors_before_their_last_step(url, client):
    (unit,) = vectors(client, TEXTS[:1])
    (raw,) = vectors(client, TEXTS[:1], extra_body={"use_activation": False})
    assert np.linalg.norm(raw) > 2
    np.testing.assert_allclose(raw / np.linalg.norm(raw), unit, atol=1e-6)


def test_all_four_forms_of_input_mean_the_same(client, pooler):
    ids = [pooler.tokenizer.encode(text) for text in TEXTS]
    wanted = vectors(client, TEXTS)
    np.testing.assert_allclose(vectors(client, ids), wanted, atol=1e-6)
    np.testing.assert_allclose(vectors(client, TEXTS[0]), wanted[:1], atol=1e-6)
    np.testing.assert_allclose(vectors(client, ids[0]), wanted[:1], atol=1e-6)


def test_dimensions_cut_the_vectors(client):
    whole, short = vectors(client, TEXTS), vectors(client, TEXTS, dimensions=10)
    np.testing.assert_allclose(short, whole[:, :10] / np.linalg.norm(whole[:, :10], axis=1)[:, None], atol=1e-6)


BAD = [
    ({"input": []}, "input", "empty"),
    ({"input": ""}, "input", "empty"),
    ({"input": ["a", ""]}, "input", "empty"),
    ({"input": [[]]}, "input", "no tokens"),
    ({"input": [5, 10**6]}, "input", "not in the vocabulary"),
    ({"input": ["a", 5]}, "input", "mixes types"),
    ({"input": [5, 1.5]}, "input[1]", "got"),
    ({"input": {"text": "a"}}, "input", "got"),
    ({}, "input", "missing"),
    ({"input": ["a"] * 2049}, "input", "2048 at most"),
    ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
    ({"input": "a", "dimensions": 49}, "dimensions", "between 1 and 48"),
    ({"input": "a", "dimensions": "many"}, "dimensions", "got"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
    ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "65; this model takes 64 tokens"),
    (b'{"input": [NaN]}', None, "not valid JSON"),
    (b"{", None, "not valid JSON"),
]


@pytest.mark.parametrize(("body", "param", "text"), BAD)
def test_bad_input_is_one_clear_error_that_names_the_field(url, body, param, text):
    reply = post(url, "/v1/embeddings", body)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param and text in error["message"]


def test_a_text_too_long_is_a_400_with_both_numbers_or_cut_on_request(client, url):
    with pytest.raises(openai.BadRequestError, match="202 tokens; this model takes 64") as caught:
        client.embeddings.create(model="tiny", input="the sea " * 100)
    assert caught.value.code == "context_length_exceeded"
    cut = client.embeddings.create(model="tiny", input="the sea " * 100, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 64


def test_a_model_that_is_not_served_is_a_404(client):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.embeddings.create(model="text-embedding-3-small", input="a")


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_rerank_orders_documents_by_their_score(url, prefix):
    query, *documents = TEXTS
    scored = post(url, f"{prefix}/score", {"text_1": query, "text_2": documents}).json()
    scores = [item["score"] for item in scored["data"]]
    assert [item["index"] for item in scored["data"]] == list(range(len(documents)))
    mixed = [documents[0], *({"text": document} for document in documents[1:])]
    ranked = post(url, f"{prefix}/rerank", {"query": query, "documents": mixed}).json()
    order = sorted(range(len(documents)), key=lambda i: -scores[i])
    assert [item["index"] for item in ranked["results"]] == order
    assert [item["document"]["text"] for item in ranked["results"]] == [documents[i] for i in order]
    np.testing.assert_allclose([item["relevance_score"] for item in ranked["results"]], sorted(scores)[::-1], atol=1e-6)
    assert ranked["usage"] == scored["usage"] and ranked["usage"]["total_tokens"] > 0


def test_top_n_and_return_documents(url):
    body = {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2, "return_documents": False}
    results = post(url, "/v1/rerank", body).json()["results"]
    assert len(results) == 2 and all(set(item) == {"index", "relevance_score"} for item in results)
    assert len(post(url, "/v1/rerank", {**body, "top_n": 99}).json()["results"]) == len(TEXTS) - 1
    assert len(post(url, "/v1/rerank", {**body, "top_n": 0}).json()["results"]) == len(TEXTS) - 1


def test_equal_documents_keep_their_order(url):
    results = post(url, "/rerank", {"query": "sea", "documents": ["the sea"] * 4}).json()["results"]
    assert [item["index"] for item in results] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/score", {"text_1": "a"}, "text_2", "missing"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "nothing to score"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "2 queries, but 3 text_2"),
        ("/score", {"text_1": "", "text_2": "a"}, "text_1", "empty"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "nothing to score"),
        ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents", "empty"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", ">= 0"),
        ("/rerank", {"query": "a", "documents": [{"texts": "a"}]}, "documents[0].text", "text"),
        ("/rerank", {"query": "a", "documents": ["the sea " * 100]}, "documents", "202 tokens"),
    ],
)
def test_bad_pairs_are_refused(url, path, body, param, text):
    reply = post(url, path, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param and text in reply.json()["error"]["message"]


def test_a_cross_encoder_scores_and_reranks_and_embeds_nothing(cross):
    query, *documents = TEXTS
    scores = [i["score"] for i in post(cross, "/score", {"text_1": query, "text_2": documents}).json()["data"]]
    assert all(0 < score < 1 for score in scores) and len(set(scores)) == len(scores)
    results = post(cross, "/rerank", {"query": query, "documents": documents}).json()["results"]
    assert results[0]["index"] == int(np.argmax(scores))
    reply = post(cross, "/v1/embeddings", {"input": "a"})
    assert reply.status_code == 400 and "task score" in reply.json()["error"]["message"]


GENERATING = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/load_lora_adapter"]


def test_a_cross_encoders_scores_before_its_sigmoid(cross):
    def scores(path, field, **asked):
        reply = post(cross, path, {"query": TEXTS[0], **asked}).json()
        return sorted(item[field] for item in (reply if isinstance(reply, list) else reply["results"]))

    usual = np.array(scores("/rerank", "relevance_score", documents=TEXTS))
    raw = np.array(scores("/rerank", "relevance_score", documents=TEXTS, use_activation=False))
    np.testing.assert_allclose(1 / (1 + np.exp(-raw)), usual, atol=1e-6)
    assert scores("/rerank", "score", texts=TEXTS, raw_scores=True) == raw.tolist()
    assert scores("/rerank", "score", texts=TEXTS) == usual.tolist()


@pytest.mark.parametrize("path", GENERATING)
def test_a_server_that_embeds_refuses_to_generate_and_says_what_would(url, path):
    reply = post(url, path, {"messages": [{"role": "user", "content": "Hello"}]})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "task_not_served", "model")
    assert "task embed" in error["message"] and "python -m minivllm.serve --model" in error["message"]


def test_anthropics_endpoint_refuses_in_its_own_shape(url):
    reply = post(url, "/v1/messages", {"messages": []})
    assert (reply.status_code, reply.json()["type"]) == (400, "error")
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank"])
def test_a_server_that_generates_says_how_to_serve_embeddings(fake, path):
    reply = post(fake.url, path, {"input": "a"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (400, "task_not_served", "invalid_request_error")
    assert "--model minilm" in error["message"] and "--task embed" in error["message"]


def test_the_other_endpoints_work_beside_it(client, url, pooler):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 64
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    ids = post(url, "/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    assert ids == pooler.tokenizer.encode(TEXTS[0])
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert {"/v1/embeddings", "/score", "/rerank"} <= set(paths)
    operations = [o["operationId"] for path in paths.values() for o in path.values()]
    assert len(operations) == len(set(operations))


def test_metrics_count_texts_tokens_and_responses(client, url):
    def value(name):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    names = ("minivllm:prompt_tokens_total", 'minivllm:request_success_total{finished_reason="stop"')
    before = [value(name) for name in names]
    reply = client.embeddings.create(model="tiny", input=TEXTS)
    after = [value(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [reply.usage.prompt_tokens, len(TEXTS)]
    assert value('minivllm:http_requests_total{method="POST",model_name="tiny",path="/v1/embeddings",status="200"}') > 0


def test_concurrent_requests_are_answered_alike_and_share_steps(url, pooler):
    gate, steps = threading.Event(), []

    def wait(plan):
        steps.append(len(plan.num_tokens))
        assert gate.wait(PATIENCE)

    replies = [None] * 20

    def ask(i):
        replies[i] = post(url, "/v1/embeddings", {"input": TEXTS[i % len(TEXTS)]}).json()["data"][0]["embedding"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
    with before_each_step(pooler, wait):
        for thread in threads:
            thread.start()
        while pooler.num_requests < 20:
            threading.Event().wait(0.01)
        gate.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert sum(steps) == 20 and len(steps) <= 3  # the first alone, and those that came meanwhile
    wanted = post(url, "/v1/embeddings", {"input": TEXTS}).json()["data"]
    for i, reply in enumerate(replies):
        np.testing.assert_allclose(reply, wanted[i % len(TEXTS)]["embedding"], atol=1e-6)


def test_numbers_that_are_not_finite_are_a_500_and_never_a_null(client, url, pooler, monkeypatch):
    head = pooler._core.executor.worker.runner.head
    with monkeypatch.context() as patched:
        patched.setattr(head, "_pool", lambda hidden, lengths: torch.full((len(lengths), 48), torch.nan))
        reply = post(url, "/v1/embeddings", {"input": "a"})
    assert reply.status_code == 500 and "not finite" in reply.json()["error"]["message"]
    assert vectors(client, "a").shape == (1, 48)


def test_a_full_queue_is_a_429(pooler, tmp_path, serving, eventually):
    write_bert(tmp_path)
    other = AsyncLLM(str(tmp_path), max_num_seqs=1, overrides={"executor.num_threads": 1})
    gate = threading.Event()
    with before_each_step(other, lambda plan: gate.wait(PATIENCE)), serving(other, max_waiting=1) as url:
        threads = [threading.Thread(target=post, args=(url, "/v1/embeddings", {"input": "a"})) for _ in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: other.num_requests == 2)
        reply = post(url, "/v1/embeddings", {"input": "a"})
        gate.set()
        for thread in threads:
            thread.join()
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")


@contextmanager
def leaving(url, body):
    """A client that has sent its request, and leaves at the end of the block."""
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall((head + body).encode())
        yield


def test_a_client_that_leaves_takes_its_texts_with_it(pooler, url, eventually):
    gate, seen = threading.Event(), []
    with before_each_step(pooler, lambda plan: seen.append(len(plan.num_tokens)) or gate.wait(PATIENCE)):
        with leaving(url, '{"input": "a"}'):
            eventually(lambda: seen)
        eventually(lambda: not pooler.num_requests)
        with leaving(url, '{"input": ["a", "b"]}'):
            eventually(lambda: pooler.num_requests)
        eventually(lambda: not pooler.num_requests)
        gate.set()
        eventually(lambda: not pooler._core.has_work)
    assert seen == [1]
