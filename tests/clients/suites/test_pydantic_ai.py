"""pydantic-ai: agents with tools, and its three kinds of output (a forced call, a schema, words)."""

from __future__ import annotations

import asyncio

import pytest
from clients.suites.common import ENDLESS, GREEDY, HOT, QUESTION, Report, weather

pydantic_ai = pytest.importorskip("pydantic_ai")
pytest.importorskip("openai")


@pytest.fixture(params=["chat", "responses"])
def model(served, request):
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind(served.model, provider=OpenAIProvider(base_url=f"{served.url}/v1", api_key="none"))


def agent(model, settings, **fields):
    return pydantic_ai.Agent(model, model_settings=settings, retries=0, **fields)


@pytest.mark.shows("call")
def test_an_agent_answers(model):
    assert agent(model, GREEDY).run_sync(QUESTION).output


@pytest.mark.shows("stream")
def test_the_pieces_of_a_stream_are_the_whole_answer(model):
    async def pieces():
        async with agent(model, GREEDY).run_stream(QUESTION) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    found = asyncio.run(pieces())
    assert "".join(found) == agent(model, GREEDY).run_sync(QUESTION).output and len(found) > 3


@pytest.mark.shows("structured")
@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
def test_an_output_is_an_instance(model, kind):
    output = getattr(pydantic_ai, kind)(Report)
    assert isinstance(agent(model, HOT, output_type=output).run_sync(QUESTION).output, Report)


@pytest.mark.shows("structured")
def test_a_prompted_output_is_answered(model):
    """It asks in words, so that what a tiny model answers is seldom an instance."""
    prompted = agent(model, {"max_tokens": 60}, output_type=pydantic_ai.PromptedOutput(Report))
    with pydantic_ai.capture_run_messages() as messages:
        try:
            prompted.run_sync(QUESTION)
        except (pydantic_ai.UnexpectedModelBehavior, pydantic_ai.IncompleteToolCall):
            assert messages[-1].kind == "response", "the server has refused"


class CallsFirst(pydantic_ai.capabilities.AbstractCapability):
    """Forces the tool until it has been called twice, and leaves the model free then."""

    def get_model_settings(self):
        return lambda context: {"tool_choice": ["weather"] if context.run_step <= 2 else "none"}


@pytest.mark.shows("tool loop")
def test_two_calls_and_their_results_make_a_conversation(model):
    result = agent(model, HOT, tools=[weather], capabilities=[CallsFirst()]).run_sync(QUESTION)
    kinds = [part.part_kind for message in result.all_messages() for part in message.parts]
    assert kinds.count("tool-call") >= 2 and kinds.count("tool-return") == kinds.count("tool-call")
    assert kinds[-1] == "text" and isinstance(result.output, str)


@pytest.mark.shows("both")
@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
def test_after_two_calls_the_output_is_an_instance(model, kind):
    output = getattr(pydantic_ai, kind)(Report)
    result = agent(model, HOT, tools=[weather], output_type=output, capabilities=[CallsFirst()]).run_sync(QUESTION)
    kinds = [part.part_kind for message in result.all_messages() for part in message.parts]
    assert kinds.count("tool-call") >= 2 and isinstance(result.output, Report)


@pytest.mark.shows("abort")
def test_a_stream_that_is_left_ends_at_the_server(served, model):
    async def leave():
        async with agent(model, ENDLESS).run_stream(QUESTION) as result:
            async for _ in result.stream_text(delta=True, debounce_by=None):
                await result.cancel()
                break

    with served.one_aborted():
        asyncio.run(leave())
