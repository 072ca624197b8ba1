"""langchain-openai, and an agent of langchain."""

from __future__ import annotations

import pytest
from clients.suites.common import ENDLESS, GREEDY, HOT, QUESTION, Report, weather

langchain_openai = pytest.importorskip("langchain_openai")


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def make(served, request):
    def make(**fields):
        if request.param:
            fields.pop("seed", None)
        return langchain_openai.ChatOpenAI(
            base_url=f"{served.url}/v1", api_key="none", model=served.model, max_retries=0,
            use_responses_api=request.param, **fields,
        )  # fmt: skip

    return make


@pytest.mark.shows("call")
def test_an_answer_has_a_text(make):
    assert make(**GREEDY).invoke(QUESTION).text


@pytest.mark.shows("stream")
def test_the_pieces_of_a_stream_are_the_whole_answer(make):
    pieces = [chunk.text for chunk in make(**GREEDY).stream(QUESTION)]
    assert "".join(pieces) == make(**GREEDY).invoke(QUESTION).text and len(pieces) > 3


@pytest.mark.shows("tool loop")
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_two_calls_and_their_results_make_a_conversation(make, streamed):
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    look = tool(weather)
    messages = [HumanMessage(QUESTION)]
    forced = make(**HOT).bind_tools([look], tool_choice="required", parallel_tool_calls=False)
    for _ in range(2):
        if streamed:
            first, *more = forced.stream(messages)
            answer = sum(more, start=first)
        else:
            answer = forced.invoke(messages)
        (call,) = answer.tool_calls
        messages += [answer, look.invoke(call)]
    assert make(**GREEDY).bind_tools([look]).invoke(messages).text


@pytest.mark.shows("structured")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_instance(make, method):
    assert isinstance(make(**HOT).with_structured_output(Report, method=method).invoke(QUESTION), Report)


@pytest.mark.shows("both")
@pytest.mark.parametrize("strategy", ["ToolStrategy", "ProviderStrategy"])
def test_an_agent_ends_with_an_instance(make, strategy):
    agents = pytest.importorskip("langchain.agents")
    form = getattr(agents.structured_output, strategy)(Report)

    @agents.middleware.wrap_model_call
    def one_look(request, handler):
        """What these models are not able to decide: that they have called a tool often enough."""
        has_looked = any(message.type == "tool" for message in request.messages)
        return handler(request.override(tools=[]) if has_looked else request)

    model = make(**HOT, model_kwargs={"parallel_tool_calls": False})
    agent = agents.create_agent(model, tools=[weather], response_format=form, middleware=[one_look])
    assert isinstance(agent.invoke({"messages": [("human", QUESTION)]})["structured_response"], Report)


@pytest.mark.shows("both")
def test_beside_a_tool_that_is_forced_a_schema_waits(make):
    asked = make(**HOT).bind_tools([weather], tool_choice="required", response_format=Report)
    assert asked.invoke(QUESTION).tool_calls


@pytest.mark.shows("abort")
def test_a_stream_that_is_left_ends_at_the_server(served, make):
    with served.one_aborted():
        chunks = make(**ENDLESS).stream(QUESTION)
        next(chunks)
        chunks.close()
