"""LlamaIndex's OpenAILike, unchanged: chats, streams, tools, structured output."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field

pytest.importorskip("llama_index.llms.openai_like")
MODEL = "dummy:tiny"
PROMPTS = ["Hello", "Grüße, 世界! 🙂🙃", "def f(x):\n    return"]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=99)


@pytest.fixture
def make(server):
    from llama_index.llms.openai_like import OpenAILike

    def make(**changes):
        fields = {"temperature": 0, "max_tokens": 60, "max_retries": 0, "context_window": 2048}
        fields |= {"is_chat_model": True, "is_function_calling_model": True}
        return OpenAILike(api_base=f"{server.url}/v1", api_key="none", model=MODEL, **(fields | changes))

    return make


@pytest.fixture
def hot(make):
    """Random weights end what they write sooner or later, if they are not greedy."""
    return make(temperature=1.0, max_tokens=400, additional_kwargs={"seed": 1})


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completions"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_pieces_of_a_stream_are_the_whole_answer(make, prompt, is_chat):
    llm = make(is_chat_model=is_chat)
    whole = llm.complete(prompt).text
    parts = list(llm.stream_complete(prompt))
    assert "".join(part.delta or "" for part in parts) == whole == parts[-1].text
    assert whole and len(parts) > 1, "it is no stream"


def test_chats(make, server):
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")]
    whole = make().chat(messages).message.content
    assert "".join(part.delta or "" for part in make().stream_chat(messages)) == whole
    plain = [{"role": message.role.value, "content": message.content} for message in messages]
    raw = server.post("/v1/chat/completions", messages=plain, temperature=0, max_tokens=60)
    assert whole == raw["choices"][0]["message"]["content"]


def test_a_forced_tool_is_called(hot):
    from llama_index.core.tools import FunctionTool

    def look(name: str) -> str:
        """Look at a person."""
        return name

    answer = hot.chat_with_tools([FunctionTool.from_defaults(look)], "Who?", tool_required=True)
    (call,) = hot.get_tool_calls_from_response(answer)
    assert call.tool_name == "look" and isinstance(call.tool_kwargs["name"], str)


def test_structured_output_is_an_instance(hot):
    from llama_index.core.prompts import PromptTemplate

    assert isinstance(hot.structured_predict(Person, PromptTemplate("Who?")), Person)
