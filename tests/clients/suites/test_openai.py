"""openai, OpenAI's own package: chats, completions and responses."""

from __future__ import annotations

import json

import pytest
from clients.suites.common import CHOICES, ENDLESS, GREEDY, HOT, LONG_ENOUGH, QUESTION, WEATHER, WEATHER_TOOL, Report

openai = pytest.importorskip("openai")
ASKED = [{"role": "user", "content": QUESTION}]
RESPONSE = {"temperature": 1.0, "max_output_tokens": 400}
FUNCTION = {"type": "function", "strict": True, **WEATHER}


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def chat(client, served):
    return lambda **fields: client.chat.completions.create(**{"model": served.model, "messages": ASKED, **fields})


@pytest.mark.shows("call")
def test_each_endpoint_answers(client, served, chat):
    assert chat(**GREEDY).choices[0].message.content
    assert client.completions.create(model=served.model, prompt="The sea", **GREEDY).choices[0].text
    answer = client.responses.create(model=served.model, input=QUESTION, temperature=0, max_output_tokens=24)
    assert answer.output_text == chat(**GREEDY).choices[0].message.content


@pytest.mark.shows("stream")
def test_the_pieces_of_a_stream_are_the_whole_answer(client, served, chat):
    chunks = list(chat(**GREEDY, stream=True, stream_options={"include_usage": True}))
    whole = chat(**GREEDY)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content and len(pieces) > 3
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    fields = {"temperature": 0, "max_output_tokens": LONG_ENOUGH}
    with client.responses.stream(model=served.model, input=QUESTION, **fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text
    assert "".join(deltas).startswith("".join(pieces))


@pytest.mark.shows("tool loop")
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_two_calls_and_their_results_make_a_conversation(client, served, streamed):
    messages = list(ASKED)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        fields = {"model": served.model, "messages": messages, "tools": [WEATHER_TOOL], "tool_choice": choice, **HOT}
        if streamed:
            with client.chat.completions.stream(**fields) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**fields).choices[0].message
        assert message.tool_calls
        messages.append(message)
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Rain in {city}."})
    last = client.chat.completions.create(model=served.model, messages=messages, tools=[WEATHER_TOOL], **GREEDY)
    assert last.choices[0].message.content


@pytest.mark.shows("tool loop")
def test_responses_make_one_from_their_own_items(client, served):
    items = list(ASKED)
    for _ in range(2):
        answer = client.responses.create(
            model=served.model, input=items, tools=[FUNCTION], tool_choice="required", **RESPONSE
        )
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        assert calls
        for call in calls:
            city = json.loads(call.arguments)["city"]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": f"Rain in {city}."})
    assert client.responses.create(
        model=served.model, input=items, tools=[FUNCTION], temperature=0, max_output_tokens=24
    ).output_text


@pytest.mark.shows("structured")
def test_what_is_parsed_is_an_instance(client, served):
    chosen = client.chat.completions.parse(model=served.model, messages=ASKED, response_format=Report, **HOT)
    assert isinstance(chosen.choices[0].message.parsed, Report)
    with client.chat.completions.stream(model=served.model, messages=ASKED, response_format=Report, **HOT) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == chosen.choices[0].message.parsed
    answer = client.responses.parse(model=served.model, input=QUESTION, text_format=Report, **RESPONSE)
    assert isinstance(answer.output_parsed, Report)


@pytest.mark.shows("both")
@pytest.mark.parametrize("choice", CHOICES)
def test_beside_tools_an_answer_is_a_call_or_an_instance(client, served, choice):
    tools = [openai.pydantic_function_tool(Report, name="report")]
    chosen = client.chat.completions.parse(
        model=served.model,
        messages=ASKED,
        response_format=Report,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        **HOT,
    )
    message = chosen.choices[0].message
    assert bool(message.tool_calls) or isinstance(message.parsed, Report)
    assert choice == "auto" or bool(message.tool_calls) == (choice == "required")
    answer = client.responses.parse(
        model=served.model, input=QUESTION, text_format=Report, tools=[FUNCTION], tool_choice=choice, **RESPONSE
    )
    assert {item.type for item in answer.output} == {"function_call"} or isinstance(answer.output_parsed, Report)


@pytest.mark.shows("abort")
def test_a_stream_that_is_left_ends_at_the_server(served, chat):
    with served.one_aborted(), chat(**ENDLESS, stream=True) as stream:
        assert next(iter(stream)).id
