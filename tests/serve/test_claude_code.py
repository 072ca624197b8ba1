"""Requests as Claude Code sends them, with the `anthropic` package: the beta endpoint, blocks with cache_control, a
system text that differs in every request, thinking, tools, streams, counting, and three turns of a tool loop."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import anthropic
import pytest

from minivllm.serve.reasoning.parsers import Qwen3Reader

KEPT = {"type": "ephemeral"}
NUM_CACHED = 7


def tool(name: str, **properties) -> dict:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": properties}
    schema |= {"required": list(properties), "additionalProperties": False}
    return {"name": name, "description": f"{name} something", "input_schema": schema}


TOOLS = [
    tool("Bash", command={"type": "string"}),
    tool("Read", path={"type": "string"}) | {"cache_control": KEPT},
]
ANSWERS = (
    '<think>I should look.</think>I look.<tool_call>{"name": "Bash", "arguments": {"command": "ls -l"}}</tool_call>',
    '<think>A file!</think><tool_call>{"name": "Read", "arguments": {"path": "a.txt"}}</tool_call>',
    "<think>It is not there.</think>There is no such file.",
)


@pytest.fixture(scope="module")
def code():
    from serve.conftest import FakeEngine, serving

    engine = FakeEngine()
    engine.max_model_len = 200_000
    output = engine._output

    def cached(*args):
        made = output(*args)
        made.num_cached_tokens = NUM_CACHED
        return made

    engine._output = cached
    with serving(engine, reasoning_parser=Qwen3Reader) as url:
        client = anthropic.Anthropic(base_url=url, api_key="x", max_retries=0, timeout=20)
        yield SimpleNamespace(engine=engine, client=client)


def asked(messages: list[dict], number: int) -> dict:
    """What a request has beside max_tokens and stream. Of the messages the last alone is marked, as in Claude Code."""
    marked = [*messages[:-1], {**messages[-1], "content": [*messages[-1]["content"]]}]
    marked[-1]["content"][-1] = marked[-1]["content"][-1] | {"cache_control": KEPT}
    return {
        "model": "fake",
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": KEPT},
            {"type": "text", "text": "Be concise.", "cache_control": KEPT},
        ],
        "tools": TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "messages": marked,
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
    }


def turn(code, messages: list[dict], number: int, streamed: bool):
    code.engine.script = list(ANSWERS[number])
    fields = asked(messages, number) | {"max_tokens": 32_000, "metadata": {"user_id": "user_1_account__session_2"}}
    if streamed:
        with code.client.beta.messages.stream(**fields) as stream:
            return stream.get_final_message()
    return code.client.beta.messages.create(**fields)


def result(call, text: str, **fields) -> dict:
    content = [{"type": "text", "text": text}]
    return {"type": "tool_result", "tool_use_id": call.id, "content": content, **fields}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_loop_of_three_turns(code, streamed):
    code.engine.reset()
    reminder = {"type": "text", "text": "<system-reminder>Mind the tests.</system-reminder>"}
    messages = [{"role": "user", "content": [reminder, {"type": "text", "text": "What is in a.txt?"}]}]
    first = turn(code, messages, 0, streamed)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[2].input == {"command": "ls -l"} and first.stop_reason == "tool_use"

    messages += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": [result(first.content[2], "b.txt"), reminder]},
    ]
    second = turn(code, messages, 1, streamed)
    assert [block.type for block in second.content] == ["thinking", "tool_use"]

    messages += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in second.content]},
        {"role": "user", "content": [result(second.content[1], "no such file", is_error=True)]},
    ]
    third = turn(code, messages, 2, streamed)
    assert (third.content[1].text, third.stop_reason) == ("There is no such file.", "end_turn")

    shown = code.engine.tokenizer.rendered["messages"]
    assert [message["role"] for message in shown] == [
        "system", "user", "assistant", "tool", "user", "assistant", "tool"
    ]  # fmt: skip
    assert shown[0]["content"] == "You are Claude Code.\nBe concise."
    assert (shown[2]["reasoning_content"], shown[2]["content"]) == ("I should look.", "I look.")
    assert shown[5]["tool_calls"][0]["function"]["name"] == "Read" and shown[6]["content"] == "Error: no such file"
    prompts = [call.prompt["prompt_token_ids"] for call in code.engine.calls]
    assert all(later[: len(one)] == one for one, later in itertools.pairwise(prompts)), "each is in the cache"

    counted = code.client.beta.messages.count_tokens(**asked(messages, 9)).input_tokens
    assert counted == len(prompts[-1]) == third.usage.input_tokens + third.usage.cache_read_input_tokens
    assert third.usage.cache_read_input_tokens == NUM_CACHED


def test_a_stream_counts_the_prompt_once_from_its_start_on(code):
    """What the first event says of the prompt, the last repeats: cached tokens are in no other number."""
    code.engine.reset()
    code.engine.script = list(ANSWERS[2])
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    fields = asked(messages, 0)
    counted = code.client.beta.messages.count_tokens(**fields).input_tokens
    events = list(code.client.beta.messages.create(**fields, max_tokens=99_999, stream=True))
    (start,) = (event.message.usage for event in events if event.type == "message_start")
    (end,) = (event.usage for event in events if event.type == "message_delta")
    for usage in (start, end):
        sums = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        assert (sums, usage.cache_read_input_tokens) == (counted, NUM_CACHED)
    assert (start.output_tokens, end.output_tokens) == (0, len(ANSWERS[2]))
