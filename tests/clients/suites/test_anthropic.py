"""anthropic, Anthropic's own package, at /v1/messages."""

from __future__ import annotations

import pytest
from clients.suites.common import QUESTION, WEATHER, Report

anthropic = pytest.importorskip("anthropic")
ASKED = [{"role": "user", "content": QUESTION}]
GREEDY = {"max_tokens": 24, "extra_body": {"temperature": 0}}  # newer models of Anthropic's have no temperature
ENDLESS = GREEDY | {"max_tokens": 1500}
HOT = {"max_tokens": 400}
TOOL = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}


@pytest.fixture
def client(served):
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def ask(client, served):
    return lambda **fields: client.messages.create(**{"model": served.model, "messages": ASKED, **fields})


@pytest.mark.shows("call")
def test_an_answer_is_a_text_and_its_tokens_are_counted(client, served, ask):
    answer = ask(**GREEDY)
    assert answer.content[0].text
    counted = client.messages.count_tokens(model=served.model, messages=ASKED).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


@pytest.mark.shows("stream")
def test_the_pieces_of_a_stream_are_the_whole_answer(client, served, ask):
    with client.messages.stream(model=served.model, messages=ASKED, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens == 24
    assert "".join(pieces) == ask(**GREEDY).content[0].text and len(pieces) > 3


@pytest.mark.shows("tool loop")
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_two_calls_and_their_results_make_a_conversation(client, served, streamed):
    messages = list(ASKED)
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        choice |= {"disable_parallel_tool_use": True}
        fields = {"model": served.model, "messages": messages, "tools": [TOOL], "tool_choice": choice, **HOT}
        if streamed:
            with client.messages.stream(**fields) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**fields)
        (call,) = answer.content
        assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"Rain in {call.input['city']}."}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=served.model, messages=messages, tools=[TOOL], **GREEDY).content


@pytest.mark.shows("structured")
def test_what_is_parsed_is_an_instance(client, served):
    answer = client.messages.parse(model=served.model, messages=ASKED, output_format=Report, **HOT)
    assert isinstance(answer.parsed_output, Report)


@pytest.mark.shows("both")
@pytest.mark.parametrize("choice", ["none", "auto", "any"])
def test_beside_tools_an_answer_is_a_call_or_an_instance(client, served, choice):
    answer = client.messages.parse(
        model=served.model, messages=ASKED, output_format=Report, tools=[TOOL], tool_choice={"type": choice}, **HOT
    )
    kinds = {block.type for block in answer.content}
    assert kinds == {"tool_use"} or isinstance(answer.parsed_output, Report)
    assert choice == "auto" or ("tool_use" in kinds) == (choice == "any")


@pytest.mark.shows("abort")
def test_a_stream_that_is_left_ends_at_the_server(served, ask):
    with served.one_aborted(), ask(**ENDLESS, stream=True) as stream:
        assert next(iter(stream)).type == "message_start"
