"""openai-agents: agents with tools and an output type, over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from clients.suites.common import ENDLESS, GREEDY, LONG_ENOUGH, QUESTION, Report, weather

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")
WHOLE = GREEDY | {"max_tokens": LONG_ENOUGH}


@pytest.fixture(params=["chat", "responses"])
def make(served, request):
    """An agent."""
    agents.set_tracing_disabled(True)
    kind = agents.OpenAIChatCompletionsModel if request.param == "chat" else agents.OpenAIResponsesModel

    def make(settings, **fields):
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        model = kind(model=served.model, openai_client=client)
        given = agents.ModelSettings(**{"temperature": 1.0, "max_tokens": 400, **settings})
        return agents.Agent(name="a", model=model, model_settings=given, **fields)

    return make


def calls_twice(make, **fields):
    """What its tool was called with, and an agent that has to call it twice and cannot any more then."""
    called, settings = [], {"tool_choice": "required", "parallel_tool_calls": False}

    def look(city: Literal["Oslo", "Rome"]) -> str:
        called.append(city)
        agent.model_settings.tool_choice = "none" if called[1:] else "required"
        return weather(city)

    agent = make(settings, tools=[agents.function_tool(look)], reset_tool_choice=False, **fields)
    return called, agent


def run(agent):
    return agents.Runner.run_sync(agent, QUESTION, max_turns=5)


@pytest.mark.shows("call")
def test_an_agent_answers(make):
    assert run(make(WHOLE)).final_output


@pytest.mark.shows("stream")
def test_the_pieces_of_a_stream_are_the_whole_answer(make):
    async def pieces():
        streamed = agents.Runner.run_streamed(make(WHOLE), QUESTION)
        events = [event.data async for event in streamed.stream_events() if event.type == "raw_response_event"]
        return [event.delta for event in events if event.type == "response.output_text.delta"]

    found = asyncio.run(pieces())
    assert "".join(found) == run(make(WHOLE)).final_output and len(found) > 3


@pytest.mark.shows("tool loop")
def test_two_calls_and_their_results_make_a_conversation(make):
    called, agent = calls_twice(make)
    try:
        result = run(agent)
        assert len(result.raw_responses) == 3 and isinstance(result.final_output, str)
    except agents.ModelBehaviorError as error:  # random weights may go on beyond max_tokens, after the two calls
        assert "max_output_tokens" in str(error)
    assert len(called) == 2


@pytest.mark.shows("structured")
def test_an_output_type_makes_an_instance(make):
    assert isinstance(run(make({}, output_type=Report)).final_output, Report)


@pytest.mark.shows("both")
def test_after_two_calls_the_output_is_an_instance(make):
    called, agent = calls_twice(make, output_type=Report)
    assert isinstance(run(agent).final_output, Report) and len(called) == 2


@pytest.mark.shows("both")
def test_a_model_that_may_choose_calls_or_makes_an_instance(make):
    called = []

    def look(city: Literal["Oslo", "Rome"]) -> str:
        """The weather in a city."""
        called.append(city)
        return weather(city)

    try:
        found = run(make({}, tools=[agents.function_tool(look)], output_type=Report)).final_output
        assert isinstance(found, Report)
    except agents.exceptions.MaxTurnsExceeded:  # such a model may like to call, and each call is one that can be run
        assert len(called) >= 5


@pytest.mark.shows("abort")
def test_a_stream_that_is_left_ends_at_the_server(served, make):
    async def leave():
        streamed = agents.Runner.run_streamed(make(ENDLESS), QUESTION)
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                streamed.cancel()

    with served.one_aborted():
        asyncio.run(leave())
