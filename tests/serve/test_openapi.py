"""Rule: what is answered is what /openapi.json says: whole, as events of a stream, as an error of each API's form."""

from __future__ import annotations

import json

import httpx
import jsonschema
import pytest
from pooling.tiny import write_bert

from minivllm.engine.async_llm import AsyncLLM

USER = {"role": "user", "content": "hi"}
CHAT = {"messages": [USER], "max_tokens": 3}
ANSWERS = [
    ("/tokenize", {"prompt": "hi"}),
    ("/tokenize", {"content": "hi"}),
    ("/tokenize", {"content": "hi", "with_pieces": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", CHAT),
    ("/api/chat", CHAT | {"model": "fake", "stream": False}),
]
ERRORS = [
    ("/v1/chat/completions", {"messages": "hi"}),
    ("/v1/messages", {"messages": "hi"}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": []}] * 2}),
    ("/api/chat", {"messages": "hi"}),
    ("/api/show", {"template": "x"}),
]
STREAMS = ["/v1/chat/completions", "/v1/messages", "/v1/completions"]
READS = [
    ("/embed", {"inputs": ["a", "the sea"]}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a", "the sea"]}}),
    ("/rerank", {"query": "a", "documents": ["the sea"]}),
    ("/rerank", {"query": "a", "texts": ["the sea"]}),
]
CLASSES = [
    ("/classify", {"input": "the sea"}),
    ("/predict", {"inputs": "the sea"}),
    ("/predict", {"inputs": [["the sea", "a"], ["a"]]}),
]


def check(document, schema, value):
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def said(url, path, method="post"):
    """The document, and what it says of a path."""
    document = httpx.get(f"{url}/openapi.json").json()
    return document, document["paths"][path][method]["responses"]


def fits(url, path, body):
    document, responses = said(url, path)
    reply = httpx.post(url + path, json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    check(document, responses["200"]["content"]["application/json"]["schema"], reply.json())


@pytest.mark.parametrize(("path", "body"), ANSWERS)
def test_an_answer_fits(fake, path, body):
    fits(fake.url, path, body)


@pytest.mark.parametrize(("path", "body"), ERRORS)
def test_an_error_fits(fake, path, body):
    document, responses = said(fake.url, path)
    reply = httpx.post(fake.url + path, json=body, timeout=30)
    assert reply.status_code == 400, reply.text
    check(document, responses["default"]["content"]["application/json"]["schema"], reply.json())


@pytest.mark.parametrize("path", STREAMS)
def test_each_event_of_a_stream_fits(fake, path):
    document, responses = said(fake.url, path)
    event = responses["200"]["content"]["text/event-stream"]["schema"]
    inside = event["properties"]["data"]["anyOf"][1]["contentSchema"]
    body = {"prompt": "hi", "max_tokens": 3} if path == "/v1/completions" else CHAT
    reply = httpx.post(fake.url + path, json=body | {"stream": True}, timeout=30)
    told = [line.partition(": ")[2] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert len(told) > 2
    for data in told:
        check(document, event, {"data": data})
        if data != "[DONE]":
            check(document, inside, json.loads(data))


@pytest.mark.parametrize(("num_labels", "rows"), [(0, READS), (3, CLASSES)], ids=["embeds", "classifies"])
def test_an_answer_of_a_model_that_pools_fits(tmp_path, serving, num_labels, rows):
    write_bert(tmp_path, num_labels=num_labels)
    with serving(AsyncLLM(str(tmp_path), overrides={"executor.num_threads": 1}), names=("tiny",)) as url:
        for path, body in rows:
            fits(url, path, body)
