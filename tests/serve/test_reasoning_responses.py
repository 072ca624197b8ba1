"""Reasoning items of /v1/responses, with the `openai` package. A fake engine writes what the test says."""

from __future__ import annotations

from types import SimpleNamespace

import openai
import pytest
from openai.types.responses import ResponseReasoningItem

from minivllm.serve.reasoning import REASONING_PARSERS
from tests.serve.conftest import FakeEngine, serving

NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
TEXT = "<think>Hm.</think>Yes."


@pytest.fixture(scope="module")
def thinker():
    engine = FakeEngine()
    with serving(engine, reasoning_parser=REASONING_PARSERS.get("qwen3")) as url:
        yield SimpleNamespace(engine=engine, client=openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0))


@pytest.fixture
def ask(thinker):
    def ask(script=TEXT, create=thinker.client.responses.create, variables=(), **fields):
        thinker.engine.reset()
        thinker.engine.script = list(script)
        thinker.engine.tokenizer.template_variables = frozenset(variables)
        return create(**{"model": "fake", "input": "Hi", **fields})

    return ask


def test_reasoning_is_an_item_before_the_message(ask):
    reply = ask(reasoning={"effort": "low"})
    thought, message = reply.output
    assert (thought.type, thought.content[0].text, thought.summary, thought.status) == (
        "reasoning", "Hm.", [], "completed",
    )  # fmt: skip
    assert thought.id.startswith("rs_") and (message.type, reply.output_text) == ("message", "Yes.")
    assert reply.usage.output_tokens_details.reasoning_tokens == len(">Hm.</think>")
    assert reply.reasoning.effort == "low"
    ResponseReasoningItem.model_validate(thought.model_dump())


def test_the_events_of_reasoning_are_openais_and_add_up(ask):
    stream = list(ask(stream=True))
    kinds = list(dict.fromkeys(event.type for event in stream))
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.reasoning_text.delta", "response.reasoning_text.done", "response.content_part.done",
        "response.output_item.done", "response.output_text.delta", "response.output_text.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    thought, message = stream[-1].response.output
    deltas = [event for event in stream if event.type == "response.reasoning_text.delta"]
    assert "".join(event.delta for event in deltas) == thought.content[0].text == "Hm."
    assert {event.item_id for event in deltas} == {thought.id} and message.content[0].text == "Yes."
    added, done = (next(e for e in stream if e.type == f"response.output_item.{kind}") for kind in ("added", "done"))
    assert (added.item.status, added.item.id) == ("in_progress", thought.id) and done.item == thought
    parts = [event.part.type for event in stream if event.type == "response.content_part.added"]
    assert parts == ["reasoning_text", "output_text"]


def test_the_sdks_own_stream_helper_understands_the_stream(thinker, ask):
    with ask(f"<think>Hm.</think>{CALL}", thinker.client.responses.stream, tools=[NOW]) as stream:
        thought, call = stream.get_final_response().output
    assert (thought.content[0].text, call.name) == ("Hm.", "now")


def test_an_answer_that_ends_inside_the_reasoning_is_one_item(ask):
    assert [item.type for item in ask("<think>Hm").output] == ["reasoning"]


def test_reasoning_that_is_sent_back_goes_to_the_template(thinker, ask):
    for script in (f"<think>Hm.</think>{CALL}", f"<think>Hm.</think>Let me look.{CALL}"):
        reply = ask(script, tools=[NOW])
        back = [item.to_dict() for item in reply.output]
        result = {"type": "function_call_output", "call_id": reply.output[-1].call_id, "output": "noon"}
        ask(input=[{"role": "user", "content": "Hi"}, *back, result, *back[:1]], tools=[NOW])
        _, assistant, tool, thought = thinker.engine.tokenizer.rendered["messages"]
        assert assistant["reasoning_content"] == "Hm." and assistant["tool_calls"]
        assert assistant["content"].strip() == ("Let me look." if "Let" in script else "")
        assert tool["content"] == "noon" and thought["reasoning_content"] == "Hm."


def test_effort_reaches_a_template_that_reads_it_and_is_named_otherwise(thinker, ask):
    create = thinker.client.responses.with_raw_response.create
    reply = ask(create=create, reasoning={"effort": "low"}, variables=["reasoning_effort"])
    assert thinker.engine.tokenizer.rendered["reasoning_effort"] == "low"
    assert "x-minivllm-ignored" not in reply.headers
    reply = ask(create=create, reasoning={"effort": "low", "summary": "auto"})
    assert reply.headers["x-minivllm-ignored"] == "reasoning.summary, reasoning.effort"


def test_a_model_without_reasoning_has_no_such_item(fake):
    client = openai.OpenAI(base_url=f"{fake.url}/v1", api_key="x", max_retries=0)
    reply = client.responses.create(model="fake", input="Hi")
    assert [item.type for item in reply.output] == ["message"]
    assert reply.usage.output_tokens_details.reasoning_tokens == 0
