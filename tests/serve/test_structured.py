"""Structured output over a real socket: OpenAI's response_format, vLLM's fields, and what is refused."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import jsonschema
import openai
import pytest

MODEL = "dummy:tiny"
HELLO = [{"role": "user", "content": "Hello"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
WAYS = {
    "response_format": {"response_format": SCHEMA_FORMAT},
    "llama.cpp's schema without a name": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}
    },
    "structured_outputs": {"extra_body": {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}}},
    "schema as text": {"extra_body": {"structured_outputs": {"json": json.dumps(PERSON)}}},
    "guided_json": {"extra_body": {"guided_json": PERSON}},
    "llama.cpp's json_schema": {"extra_body": {"json_schema": PERSON}},
    "llama.cpp's response_format": {"extra_body": {"response_format": {"type": "json_object", "schema": PERSON}}},
}


@pytest.fixture(scope="module")
def real(serving):
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.metrics import Metrics

    metrics = Metrics(MODEL)
    overrides = {"kv.num_blocks": 512, "model.dtype": "float32", "debug.check": True}
    engine = AsyncLLM(MODEL, overrides=overrides, max_model_len=1024, max_num_seqs=32)
    with serving(engine, metrics, (MODEL,)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        yield SimpleNamespace(engine=engine, client=client)


@pytest.fixture
def chat(real):
    fields = {"model": MODEL, "messages": HELLO, "max_tokens": 200, "seed": 3}
    return lambda **more: real.client.chat.completions.create(**fields, **more)


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_stopped_is_an_instance(chat, way):
    choices = chat(**WAYS[way], n=4).choices
    finished = [choice for choice in choices if choice.finish_reason == "stop"]
    assert len(finished) >= 2
    for choice in finished:
        jsonschema.validate(json.loads(choice.message.content), PERSON)


def test_the_streamed_answer_is_the_unstreamed_one(chat):
    chunks = list(chat(response_format=SCHEMA_FORMAT, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == chat(response_format=SCHEMA_FORMAT).choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop" and json.loads(streamed)


def test_any_object_and_plain_text(chat):
    whole = [c for seed in range(6) for c in chat(response_format={"type": "json_object"}, n=2).choices]
    assert all(c.message.content.lstrip().startswith("{") for c in whole)
    assert all(isinstance(json.loads(c.message.content), dict) for c in whole if c.finish_reason == "stop")
    text = chat(response_format={"type": "text"}).choices[0].message.content
    assert text == chat().choices[0].message.content


def test_vllms_fields_in_completions(real):
    def complete(**fields):
        made = real.client.completions.create(model=MODEL, prompt="x", max_tokens=64, n=3, seed=1, extra_body=fields)
        return [choice.text for choice in made.choices if choice.finish_reason == "stop"]

    for fields in ({"structured_outputs": {"regex": r"[ab]{2}\d"}}, {"guided_regex": r"[ab]{2}\d"}):
        assert [bool(re.fullmatch(r"[ab]{2}\d", text)) for text in complete(**fields)] == [True] * 3
    for fields in ({"structured_outputs": {"choice": ["red", "green"]}}, {"guided_choice": ["red", "green"]}):
        assert set(complete(**fields)) <= {"red", "green"}
    grammar = 'root ::= ("x" | "y") "z"'
    for fields in ({"structured_outputs": {"grammar": grammar}}, {"guided_grammar": grammar}, {"grammar": grammar}):
        assert set(complete(**fields)) <= {"xz", "yz"}


@pytest.mark.parametrize(
    "fields, param, why",
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}}},
            "response_format.json_schema.schema",
            'no type "strng"',
        ),
        ({"extra_body": {"guided_regex": "(a"}}, "guided_regex", "without its"),
        ({"extra_body": {"guided_grammar": "root ::= nothing"}}, "guided_grammar", "grammar: "),
        ({"extra_body": {"grammar": "root ::= nothing"}}, "grammar", "grammar: "),
        ({"response_format": {"type": "text", "schema": PERSON}}, "response_format.schema", "json_object"),
        ({"response_format": SCHEMA_FORMAT | {"schema": PERSON}}, "response_format.schema", "json_object"),
        ({"extra_body": {"structured_outputs": {"json": {"not": {}}}}}, "structured_outputs", "no value fits"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_compiled_is_a_400_with_the_reason(chat, fields, param, why, stream):
    with pytest.raises(openai.BadRequestError, match=why) as e:
        chat(**fields, stream=stream)
    assert e.value.body["param"] == param
    assert chat().choices, "the server goes on"


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_is_too_slow_ends_its_request_with_the_reason(chat, stream, monkeypatch):
    monkeypatch.setattr("minivllm.sampling.grammar_mask.TOKEN_SECONDS", -1)  # whatever a mask takes is too much
    with pytest.raises(openai.APIError, match="response_format.*the grammar is too slow: a token took") as e:
        list(chat(response_format=SCHEMA_FORMAT, stream=True)) if stream else chat(response_format=SCHEMA_FORMAT)
    assert stream or e.value.status_code == 400
    monkeypatch.undo()
    assert chat(response_format=SCHEMA_FORMAT).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_leads_nowhere_ends_its_request_with_the_reason(chat, stream, monkeypatch):
    for place in ("xgrammar_backend.XGrammar", "llguidance_backend.LLGuidance", "dfa.DFAGrammar"):
        monkeypatch.setattr(f"minivllm.structured.{place}.fill_mask", lambda grammar, out: out.fill(0))
    with pytest.raises(openai.APIError, match="response_format.*the grammar leads nowhere: no token may follow") as e:
        list(chat(response_format=SCHEMA_FORMAT, stream=True)) if stream else chat(response_format=SCHEMA_FORMAT)
    assert stream or e.value.status_code == 400
    assert chat().choices, "the server goes on"
    monkeypatch.undo()
    assert chat(response_format=SCHEMA_FORMAT).choices
