"""instructor: an instance, in each of the modes in which a server of OpenAI's or Anthropic's API can be asked for one.

Most are held by a grammar, as a schema or as a forced call. The others describe the schema in words, or offer a tool
and do not force it: what a tiny model answers there is no instance, and only that it is answered can be tested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from clients.suites.common import ENDLESS, GREEDY, HOT, QUESTION, Report
from pydantic import BaseModel

instructor = pytest.importorskip("instructor")
anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
ASKED = [{"role": "user", "content": QUESTION}]
ANSWERS = {"max_tokens": 400}


@pytest.fixture
def make(served):
    def make(mode):
        chosen, options = instructor.Mode[mode], {"api_key": "none", "max_retries": 0, "timeout": 120}
        if mode.startswith("ANTHROPIC"):
            return instructor.from_anthropic(anthropic.Anthropic(base_url=served.url, **options), mode=chosen)
        return instructor.from_openai(openai.OpenAI(base_url=f"{served.url}/v1", **options), mode=chosen)

    return make


@pytest.fixture
def fields(served):
    return {"model": served.model, "messages": ASKED, "max_retries": 0}


@pytest.mark.shows("call")
def test_without_a_model_of_the_answer_it_is_a_text(make, fields):
    assert make("TOOLS").create(response_model=None, **fields, **GREEDY).choices[0].message.content


@pytest.mark.shows("stream")
def test_a_stream_of_parts_ends_with_the_whole_instance(make, fields):
    parts = list(make("JSON_SCHEMA").create_partial(response_model=Report, **fields, **HOT))
    whole = make("JSON_SCHEMA").create(response_model=Report, **fields, **HOT)
    assert parts[-1].model_dump() == whole.model_dump() and len(parts) > 3


@pytest.mark.shows("structured")
@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS", "ANTHROPIC_TOOLS"])
def test_a_mode_with_a_grammar_gives_an_instance(make, fields, mode):
    given = HOT if "_" not in mode or mode in ("TOOLS_STRICT", "JSON_SCHEMA") else ANSWERS
    assert isinstance(make(mode).create(response_model=Report, **fields, **given), Report)


@pytest.mark.shows("structured")
@pytest.mark.parametrize("mode", ["JSON", "MD_JSON", "ANTHROPIC_JSON", "PARALLEL_TOOLS"])
def test_a_mode_without_a_grammar_is_answered(make, fields, mode):
    client, heard = make(mode), []
    client.on("completion:response", heard.append)
    try:
        client.create(response_model=Iterable[Report] if "PARALLEL" in mode else Report, **fields, max_tokens=60)
    except Exception:
        assert heard, "the server has refused"


@pytest.mark.shows("abort")
def test_a_stream_that_is_left_ends_at_the_server(served, fields):
    class Long(BaseModel):
        words: list[str]

    async def leave():
        plain = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
        parts = client.create_partial(response_model=Long, **fields, **ENDLESS)
        await anext(parts)
        await parts.aclose()

    with served.one_aborted():
        asyncio.run(leave())
