"""Rule: limits of names and counts are each API's own: what one of them refuses, another that admits it takes.

OpenAI: its specification (openapi.yaml: FunctionObject, FunctionToolParam, CustomToolParam, StopConfiguration ...).
Anthropic: its documentation of tools. Ollama and the own endpoints of vLLM and llama.cpp have none.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.conftest import FakeEngine, serving

USER = [{"role": "user", "content": "Hi"}]
OBJECT = {"type": "object"}


def chat_tools(names: list[str]) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name, "parameters": OBJECT}} for name in names]
    return {"messages": USER, "tools": tools}


def responses_tools(names: list[str], kind: str = "function") -> dict[str, Any]:
    return {"input": "Hi", "tools": [{"type": kind, "name": name} for name in names]}


def custom_tools(names: list[str]) -> dict[str, Any]:
    return responses_tools(names, "custom")


def messages_tools(names: list[str]) -> dict[str, Any]:
    tools = [{"name": name, "input_schema": OBJECT} for name in names]
    return {"model": "fake", "max_tokens": 3, "messages": USER, "tools": tools}


LONGEST, ANY = 1024, "harbour/tide.now é"
NAMES = {  # how an API is asked with tools of these names, the longest that it takes, and whether any letters do
    "/v1/chat/completions": (chat_tools, 64, False),
    "/v1/responses": (responses_tools, 128, False),
    "/v1/responses custom": (custom_tools, LONGEST, True),
    "/v1/responses/input_tokens": (responses_tools, 128, False),
    "/v1/messages": (messages_tools, 128, False),
    "/v1/messages/count_tokens": (messages_tools, 128, False),
    "/api/chat": (chat_tools, LONGEST, True),
    "/tokenize": (chat_tools, LONGEST, True),
    "/apply-template": (chat_tools, LONGEST, True),
}
STOPS = {  # how an API is asked with so many stops, and how many it takes at least
    "/v1/chat/completions": (lambda stops: {"messages": USER, "stop": stops}, 4, True),
    "/v1/completions": (lambda stops: {"prompt": "Hi", "stop": stops}, 4, True),
    "/v1/messages": (lambda stops: messages_tools([]) | {"stop_sequences": stops}, 64, False),
    "/api/chat": (lambda stops: {"messages": USER, "options": {"stop": stops}}, 64, False),
    "/api/generate": (lambda stops: {"prompt": "Hi", "options": {"stop": stops}}, 64, False),
    "/completion": (lambda stops: {"prompt": "Hi", "stop": stops}, 64, False),
}


@pytest.fixture(scope="module")
def ask():
    engine = FakeEngine()
    engine.max_model_len = 1_000_000
    with serving(engine) as url:
        yield lambda path, body: httpx.post(url + path.split()[0], json=body, timeout=30).status_code


@pytest.mark.parametrize("path", NAMES)
def test_names_of_tools(ask, path):
    body, longest, any_letters = NAMES[path]
    assert ask(path, body(["a" * longest])) == 200
    assert ask(path, body(["a" * (longest + 1)])) == 400
    assert ask(path, body([ANY])) == (200 if any_letters else 400)
    assert ask(path, body(["mcp__a-b__C_9"])) == 200 and ask(path, body([""])) == 400


@pytest.mark.parametrize("path", NAMES)
def test_as_many_tools_as_the_largest_of_them_takes(ask, path):
    """OpenAI's chats have 128, which vLLM and clients of many servers go beyond."""
    body = NAMES[path][0]
    assert ask(path, body([f"tool_{i}" for i in range(1024)])) == 200
    assert ask(path, body([f"tool_{i}" for i in range(1025)])) == 400


@pytest.mark.parametrize("path", STOPS)
def test_numbers_of_stops(ask, path):
    body, most, is_openais = STOPS[path]
    assert ask(path, body([f"stop {i}" for i in range(most)])) == 200
    assert ask(path, body([f"stop {i}" for i in range(most + 1)])) == 400
    assert is_openais or most > 4, "four are OpenAI's alone"


OTHERS = [
    ("/v1/chat/completions", {"messages": USER}, {"temperature": 2}, {"temperature": 2.1}),
    ("/v1/chat/completions", {"messages": USER}, {"n": 2}, {"n": 129}),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True}, {"top_logprobs": 20}, {"top_logprobs": 21}),
    ("/v1/chat/completions", {"messages": USER}, {"user": "u" * 999, "safety_identifier": "s" * 999}, None),
    ("/v1/chat/completions", {"messages": USER}, {"metadata": {f"k{i}": "v" * 999 for i in range(99)}}, None),
    ("/v1/responses", {"input": "Hi"}, {"metadata": {"k" * 64: "v" * 512}}, {"metadata": {"k": "v" * 513}}),
    ("/v1/responses", {"input": "Hi"}, {"top_logprobs": 20}, {"top_logprobs": 21}),
    ("/v1/messages", messages_tools([]), {"metadata": {"user_id": "u" * 999}}, None),
    ("/api/chat", {"messages": USER}, {"options": {"temperature": 5}}, None),
    ("/api/chat", {"messages": USER, "logprobs": True}, {"top_logprobs": 20}, {"top_logprobs": 21}),
    ("/completion", {"prompt": "Hi"}, {"temperature": 5}, None),
]


@pytest.mark.parametrize(("path", "body", "most", "more"), OTHERS)
def test_other_limits(ask, path, body, most, more):
    assert ask(path, body | most) == 200
    assert more is None or ask(path, body | more) == 400
