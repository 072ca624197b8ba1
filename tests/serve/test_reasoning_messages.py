"""Thinking blocks of /v1/messages, with the `anthropic` package. A fake engine writes what the test says."""

from __future__ import annotations

from types import SimpleNamespace

import anthropic
import pytest
from anthropic.types import Message

from minivllm.serve.reasoning import REASONING_PARSERS
from tests.serve.conftest import FakeEngine, serving

HELLO = [{"role": "user", "content": "Hi"}]
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
TEXT = "<think>Let me see.</think>Yes."
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def thinker():
    engine = FakeEngine()
    with serving(engine, reasoning_parser=REASONING_PARSERS.get("qwen3")) as url:
        client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0, timeout=20)
        yield SimpleNamespace(engine=engine, client=client)


@pytest.fixture
def asked(thinker):
    def asked(script=TEXT, variables=(), **fields):
        thinker.engine.reset()
        thinker.engine.script = list(script)
        thinker.engine.tokenizer.template_variables = frozenset(variables)
        return {"model": "fake", "messages": HELLO, "max_tokens": 50, **fields}

    return asked


@pytest.fixture
def ask(thinker, asked):
    return lambda *args, **fields: thinker.client.messages.create(**asked(*args, **fields))


@pytest.fixture
def ignored(thinker, asked):
    def ignored(**fields):
        reply = thinker.client.messages.with_raw_response.create(**asked(**fields))
        return reply.headers.get("x-minivllm-ignored")

    return ignored


def test_thinking_is_a_block_before_the_text(ask):
    reply = ask()
    thought, text = reply.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "Let me see.", "Yes.")
    assert thought.signature and reply.stop_reason == "end_turn"
    assert 0 < reply.usage.output_tokens_details.thinking_tokens < reply.usage.output_tokens
    Message.model_validate(reply.model_dump(), strict=True)


def test_a_stream_of_blocks_adds_up_to_the_message(thinker, asked, ask):
    text = f"<think>Let me see.</think>Yes.{CALL}"
    events = list(ask(text, tools=[NOW], stream=True))
    starts = [event.content_block.type for event in events if event.type == "content_block_start"]
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert starts == ["thinking", "text", "tool_use"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert deltas.count("signature_delta") == 1
    with thinker.client.messages.stream(**asked(text, tools=[NOW])) as stream:
        streamed = stream.get_final_message()
    whole = ask(text, tools=[NOW])
    assert streamed.content[0] == whole.content[0] and streamed.content[1].text == whole.content[1].text == "Yes."
    assert streamed.content[2].name == whole.content[2].name == "now"
    assert streamed.stop_reason == whole.stop_reason == "tool_use"


def test_an_answer_that_ends_inside_the_thinking_is_one_block(ask):
    assert [block.type for block in ask("<think>Let me").content] == ["thinking"]


def test_a_budget_ends_the_thinking_and_the_template_is_told(thinker, ask):
    ask(thinking={"type": "enabled", "budget_tokens": 1024})
    assert thinker.engine.calls[0].params.structured.prelude.max_tokens == 1024
    assert thinker.engine.tokenizer.rendered["enable_thinking"] is True
    ask(thinking={"type": "adaptive"})
    assert thinker.engine.calls[0].params.structured is None
    assert thinker.engine.tokenizer.rendered["thinking"] is True


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_thinking_that_is_not_wanted_is_no_block(thinker, ask, thinking):
    assert [block.type for block in ask(thinking=thinking).content] == ["text"]
    assert thinker.engine.tokenizer.rendered["enable_thinking"] is (thinking["type"] != "disabled")


def test_what_the_model_does_not_follow_is_named(ignored):
    assert ignored(thinking={"type": "enabled", "budget_tokens": 1024}) is None
    assert ignored(thinking={"type": "disabled"}, variables=["enable_thinking"]) is None
    assert ignored(thinking={"type": "disabled"}) == "thinking"
    assert ignored(thinking={"type": "between_tools"}) == "thinking"
    assert ignored(output_config={"effort": "low"}) == "output_config.effort"
    assert ignored(output_config={"effort": "low"}, variables=["reasoning_effort"]) is None


def test_thinking_that_is_sent_back_goes_to_the_template(thinker, ask):
    first = ask(f"<think>Let me see.</think>{CALL}", tools=[NOW])
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "noon"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [redacted, *first.content]},
        {"role": "user", "content": [result]},
    ]
    ask(messages=turns, tools=[NOW])
    _, assistant, tool = thinker.engine.tokenizer.rendered["messages"]
    assert assistant["reasoning_content"] == "Let me see." and assistant["tool_calls"][0]["function"]["name"] == "now"
    assert tool["content"] == "noon"


def test_a_model_that_does_not_think_ignores_a_budget(fake):
    client = anthropic.Anthropic(base_url=fake.url, api_key="x", max_retries=0, timeout=20)
    reply = client.messages.create(
        model="fake", messages=HELLO, max_tokens=9, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert [block.text for block in reply.content] == ["abc"] and reply.usage.output_tokens_details is None
    assert fake.engine.calls[0].params.structured is None
