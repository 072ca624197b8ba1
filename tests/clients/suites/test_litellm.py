"""LiteLLM, in a program: its messages carry fields of its own, which it sends back."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest
from clients.suites.common import CHOICES, ENDLESS, GREEDY, HOT, QUESTION, WEATHER_TOOL, Report

litellm = pytest.importorskip("litellm")
ASKED = [{"role": "user", "content": QUESTION}]


@pytest.fixture(autouse=True)
def streams_are_gone():
    """LiteLLM 1.106 leaves the end of hosted_vllm's streams unread. Collected while httpcore holds the lock of its
    pool, such a stream waits for that lock for ever; so it is collected here."""
    yield
    gc.collect()


@pytest.fixture(params=["openai", "hosted_vllm"])
def fields(served, request):
    model = f"{request.param}/{served.model}"
    return {"model": model, "api_base": f"{served.url}/v1", "api_key": "none", "num_retries": 0, "messages": ASKED}


@pytest.fixture
def ask(fields):
    return lambda **more: litellm.completion(**fields | more)


@pytest.mark.shows("call")
def test_an_answer_has_a_text(ask):
    assert ask(**GREEDY).choices[0].message.content


@pytest.mark.shows("stream")
def test_the_pieces_of_a_stream_are_the_whole_answer(ask):
    chunks = list(ask(**GREEDY, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == ask(**GREEDY).choices[0].message.content and len(pieces) > 3


@pytest.mark.shows("tool loop")
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_two_calls_and_their_results_make_a_conversation(ask, streamed):
    messages = list(ASKED)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = ask(messages=messages, tools=[WEATHER_TOOL], tool_choice=choice, stream=streamed, **HOT)
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        assert message.tool_calls
        messages.append(message.model_dump())  # with provider_specific_fields and all that is null
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "weather", "content": f"Rain in {city}."})
    assert ask(messages=messages, tools=[WEATHER_TOOL], **GREEDY).choices[0].message.content


@pytest.mark.shows("structured")
def test_an_answer_follows_its_schema(ask):
    Report.model_validate_json(ask(response_format=Report, **HOT).choices[0].message.content)


@pytest.mark.shows("both")
@pytest.mark.parametrize("choice", CHOICES)
def test_beside_tools_an_answer_is_a_call_or_an_instance(ask, choice):
    message = ask(response_format=Report, tools=[WEATHER_TOOL], tool_choice=choice, **HOT).choices[0].message
    assert message.tool_calls or Report.model_validate_json(message.content)
    assert choice == "auto" or bool(message.tool_calls) == (choice == "required")


@pytest.mark.shows("abort")
def test_a_stream_that_is_left_ends_at_the_server(served, fields):
    async def leave():
        stream = await litellm.acompletion(**fields, **ENDLESS, stream=True)
        assert (await anext(stream)).id
        await stream.aclose()

    with served.one_aborted():
        asyncio.run(leave())
