"""LlamaIndex's OpenAILike."""

from __future__ import annotations

import asyncio

import pytest
from clients.suites.common import ENDLESS, GREEDY, HOT, QUESTION, Report, weather

openai_like = pytest.importorskip("llama_index.llms.openai_like")


@pytest.fixture
def make(served):
    def make(**fields):
        fields = dict(fields)
        more = {"additional_kwargs": {"seed": fields.pop("seed")}} if "seed" in fields else {}
        return openai_like.OpenAILike(
            api_base=f"{served.url}/v1", api_key="none", model=served.model, max_retries=0, context_window=2048,
            is_chat_model=True, is_function_calling_model=True, **more, **fields,
        )  # fmt: skip

    return make


@pytest.fixture
def asked():
    from llama_index.core.llms import ChatMessage

    return [ChatMessage(role="user", content=QUESTION)]


@pytest.mark.shows("call")
def test_an_answer_has_a_text(make, asked):
    assert make(**GREEDY).chat(asked).message.content


@pytest.mark.shows("stream")
def test_the_pieces_of_a_stream_are_the_whole_answer(make, asked):
    pieces = [part.delta or "" for part in make(**GREEDY).stream_chat(asked)]
    assert "".join(pieces) == make(**GREEDY).chat(asked).message.content and len(pieces) > 3


@pytest.mark.shows("tool loop")
def test_two_calls_and_their_results_make_a_conversation(make, asked):
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    llm, tool = make(**HOT), FunctionTool.from_defaults(weather)
    for _ in range(2):
        answer = llm.chat_with_tools([tool], chat_history=asked, tool_required=True, allow_parallel_tool_calls=False)
        (call,) = llm.get_tool_calls_from_response(answer)
        result = tool(**call.tool_kwargs).content
        asked += [
            answer.message,
            ChatMessage(role="tool", content=result, additional_kwargs={"tool_call_id": call.tool_id}),
        ]
    assert make(**GREEDY).chat_with_tools([tool], chat_history=asked).message.content


@pytest.mark.shows("structured")
def test_structured_output_is_an_instance(make):
    from llama_index.core.prompts import PromptTemplate

    assert isinstance(make(**HOT).structured_predict(Report, PromptTemplate(QUESTION)), Report)
    assert isinstance(make(**HOT).as_structured_llm(Report).complete(QUESTION).raw, Report)


@pytest.mark.shows("both")
def test_beside_a_tool_that_is_forced_a_schema_waits(make, asked):
    from llama_index.core.tools import FunctionTool

    form = {"type": "json_schema", "json_schema": {"name": "report", "schema": Report.model_json_schema()}}
    llm, tools = make(**HOT), [FunctionTool.from_defaults(weather)]
    answer = llm.chat_with_tools(tools, chat_history=asked, tool_required=True, response_format=form)
    assert llm.get_tool_calls_from_response(answer)


@pytest.mark.shows("abort")
def test_a_stream_that_is_left_ends_at_the_server(served, make, asked):
    async def leave():  # the loop's end closes what was left; without one, the package holds on to its connection
        parts = await make(**ENDLESS).astream_chat(asked)
        await anext(parts)

    with served.one_aborted():
        asyncio.run(leave())
