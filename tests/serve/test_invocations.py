"""SageMaker's one path: the body says which endpoint answers."""

from __future__ import annotations

import httpx
import msgspec
import pytest

HELLO = [{"role": "user", "content": "Hello"}]
UNTOLD = ("id", "created")


def post(url: str, path: str, **fields) -> dict:
    found = httpx.post(f"{url}/{path}", json=fields).json()
    return {name: value for name, value in found.items() if name not in UNTOLD}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("v1/chat/completions", {"messages": HELLO, "max_tokens": 9}),
        ("v1/completions", {"prompt": "Hello", "temperature": 0}),
        ("v1/completions", {"prompt": "Hello", "n": 0}),
        ("v1/embeddings", {"input": "Hello"}),
        ("rerank", {"query": "Hello", "documents": ["a"]}),
        ("score", {"text_1": "Hello", "text_2": "a"}),
    ],
)
def test_an_invocation_is_answered_as_the_endpoint_of_its_fields_would(fake, path, fields):
    """Errors too: this server does not embed."""
    assert post(fake.url, "invocations", **fields) == post(fake.url, path, **fields)


def test_an_invocation_may_stream(fake):
    reply = httpx.post(f"{fake.url}/invocations", json={"messages": HELLO, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream") and reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("body", "says"), [("{}", "give one of messages, prompt"), ("[1]", "JSON"), ("{", "JSON")])
def test_what_is_for_no_endpoint_is_refused(fake, body, says):
    reply = httpx.post(f"{fake.url}/invocations", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and says in reply.json()["error"]["message"]


def test_what_has_too_many_parts_is_refused_before_it_is_decoded(fake, monkeypatch):
    monkeypatch.setattr(msgspec.json, "decode", None)
    body = b'{"prompt": [' + b",".join([b"[]"] * 200_000) + b"]}"
    reply = httpx.post(f"{fake.url}/invocations", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and "too many parts" in reply.text
