"""langchain-openai, unchanged: chats, streams, tools, structured output."""

from __future__ import annotations

import asyncio

import openai
import pytest
from pydantic import BaseModel, Field

pytest.importorskip("langchain_openai")
MODEL = "dummy:tiny"
PROMPTS = ["Hello", "Grüße, 世界! 🙂🙃", "def f(x):\n    return"]


class Person(BaseModel):
    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=99)


@pytest.fixture
def make(server):
    from langchain_openai import ChatOpenAI

    def make(**changes):
        fields = {"temperature": 0, "max_tokens": 60, "max_retries": 0, "model": MODEL}
        return ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", **(fields | changes))

    return make


@pytest.fixture
def hot(make):
    """Random weights end what they write sooner or later, if they are not greedy."""
    return make(temperature=1.0, seed=1, max_tokens=400)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_pieces_of_a_stream_are_the_whole_answer(server, make, prompt):
    whole = make().invoke([("system", "Be brief."), ("human", prompt)])
    chunks = list(make().stream([("system", "Be brief."), ("human", prompt)]))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert len(chunks) > 5, "it is no stream"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    raw = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=60)
    assert whole.content == raw["choices"][0]["message"]["content"]
    assert whole.usage_metadata["output_tokens"] == raw["usage"]["completion_tokens"]
    assert whole.response_metadata["finish_reason"] == raw["choices"][0]["finish_reason"]


def test_many_at_once_and_asynchronously(make):
    async def pieces(prompt):
        return "".join([chunk.content async for chunk in make().astream(prompt)])

    async def all_of_them():
        return await asyncio.gather(*map(pieces, PROMPTS))

    assert asyncio.run(all_of_them()) == [answer.content for answer in make().batch(PROMPTS)]


def test_stop_strings_seeds_and_log_probabilities(make, hot):
    text = make().invoke("Hello").content
    stop = text[10:12]
    assert make().invoke("Hello", stop=[stop]).content == text[: text.index(stop)]
    told = hot.bind(logprobs=True, top_logprobs=2)
    first, second = told.invoke("Hello"), told.invoke("Hello")
    assert first.content == second.content
    assert len(first.response_metadata["logprobs"]["content"]) == first.usage_metadata["output_tokens"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_instance(hot, method):
    assert isinstance(hot.with_structured_output(Person, method=method).invoke("Who?"), Person)


def test_a_forced_tool_is_called_and_its_result_goes_on_in_the_conversation(make, hot):
    from langchain_core.messages import HumanMessage, ToolMessage

    tools = [{"type": "function", "function": {"name": "look", "parameters": Person.model_json_schema()}}]
    forced, question = hot.bind_tools(tools, tool_choice="look"), HumanMessage("Who?")
    answer = forced.invoke([question])
    (call,) = answer.tool_calls
    assert call["name"] == "look" and Person(**call["args"])
    streamed = None
    for chunk in forced.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])]
    assert make().invoke([question, answer, ToolMessage("rain", tool_call_id=call["id"])]).content


def test_errors_reach_the_caller_as_openais(make):
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        make(model="gpt-4").invoke("Hello")
    with pytest.raises(openai.BadRequestError, match="context"):
        make().invoke("word " * 5000)
