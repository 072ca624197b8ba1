"""Rule: what vLLM's own fields say of an answer holds for the text as the model writes it, so also for a call in it."""

from __future__ import annotations

import json

import httpx
import pytest

from minivllm.serve.reasoning import REASONING_PARSERS
from minivllm.serve.tools import TOOL_PARSERS
from tests.serve.conftest import serving

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now"}}]
RAW = [
    {"structured_outputs": {"choice": [CALL]}},
    {"guided_choice": [CALL]},
    {"structured_outputs": {"regex": r"<tool_call>\n\{\"name\": \"now\", \"arguments\": \{\}\}\n</tool_call>"}},
    {"guided_grammar": "root ::= " + json.dumps(CALL)},
]


@pytest.fixture(scope="module")
def server():
    """A random model whose template opens the thinking."""
    from minivllm.engine.async_llm import AsyncLLM

    overrides = {"kv.num_blocks": 256, "model.dtype": "float32", "executor.num_threads": 1}
    engine = AsyncLLM("dummy:tiny", overrides=overrides, max_model_len=1024)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{% if not thinking %}</think>{% endif %}"
    engine.tokenizer.use_chat_template(template)
    parsers = {"tool_parser": TOOL_PARSERS.get("hermes"), "reasoning_parser": REASONING_PARSERS.get("qwen3")}
    with serving(engine, **parsers) as url:
        yield url


def asked(server, **fields):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "tools": TOOLS, "n": 4, **fields}
    return httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def names(choice):
    return [call["function"]["name"] for call in choice["message"].get("tool_calls") or ()]


@pytest.mark.parametrize("fields", RAW)
def test_a_choice_with_a_call_in_it_is_one_call(server, fields):
    for seed in range(3):
        for choice in asked(server, seed=seed, **fields).json()["choices"]:
            assert (names(choice), choice["message"]["content"], choice["finish_reason"]) == (
                ["now"],
                None,
                "tool_calls",
            )


def test_a_choice_with_a_call_in_it_is_one_call_in_a_stream_and_behind_thinking(server):
    fields = {"thinking_token_budget": 5, "chat_template_kwargs": {"thinking": True}, **RAW[0]}
    for choice in asked(server, seed=1, **fields).json()["choices"]:
        assert names(choice) == ["now"] and choice["message"]["reasoning"]
    lines = asked(server, seed=1, stream=True, **fields).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    begun = [
        (c["index"], p["function"]["name"]) for c in parts for p in c["delta"].get("tool_calls", ()) if p.get("id")
    ]
    assert sorted(begun) == [(i, "now") for i in range(4)]


def test_no_call_comes_in_the_place_of_raw_text(server):
    for seed in range(3):
        for choice in asked(server, seed=seed, guided_choice=["yes", "no"]).json()["choices"]:
            assert choice["message"]["content"] in ("yes", "no") and not names(choice)


def test_beside_a_response_format_the_model_may_still_call(server):
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}}
    choices = [c for seed in range(8) for c in asked(server, seed=seed, response_format=schema).json()["choices"]]
    assert any(names(choice) for choice in choices)
