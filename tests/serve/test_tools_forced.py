"""Forced calls: the schema says what a call is, and a real engine with random weights, which would never write one by
itself, cannot but write one."""

from __future__ import annotations

import json
import re

import httpx
import jsonschema
import openai
import pytest

from minivllm.serve.bodies import parse
from minivllm.serve.protocol import ChatRequest
from minivllm.serve.tools.ask import asked, call_schema, enforced
from minivllm.serve.tools.values import types_of
from minivllm.structured.normal import normal

WEATHER = {
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/place"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "hourly": {"type": "boolean"},
    },
    "required": ["place", "unit", "hourly"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["Rome", "Paris", "Grüße"]}},
}
TREE = {
    "type": "object",
    "properties": {"leaf": {"type": "boolean"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
    "required": ["leaf", "next"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "tree": TREE, "now": None}


def tools(*names):
    return [{"type": "function", "function": {"name": n, "parameters": SCHEMAS[n]}} for n in names or SCHEMAS]


def schema_of(**fields):
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools(), **fields}
    return enforced(asked(parse(json.dumps(body).encode(), ChatRequest)))


def is_valid(value, schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def named(name):
    return {"type": "function", "function": {"name": name}}


GOOD = {"place": "Rome", "unit": "C", "hourly": True}


def test_a_named_functions_schema_is_its_own():
    assert schema_of(tool_choice=named("weather")) == WEATHER
    assert is_valid({}, schema_of(tool_choice=named("now")))
    assert not is_valid({"x": 1}, schema_of(tool_choice=named("now")))


@pytest.mark.parametrize(
    ("calls", "valid"),
    [
        ([{"name": "weather", "parameters": GOOD}], True),
        ([{"name": "now", "parameters": {}}] * 3, True),
        ([{"name": "tree", "parameters": {"leaf": True, "next": {"leaf": False, "next": None}}}], True),
        ([{"name": "tree", "parameters": {"leaf": True, "next": {"leaf": False}}}], False),
        ([], False),
        ([{"name": "weather", "parameters": {**GOOD, "place": "Oslo"}}], False),
        ([{"name": "weather", "parameters": {}}], False),
        ([{"name": "now", "parameters": GOOD}], False),
        ([{"name": "other", "parameters": {}}], False),
        ([{"name": "now"}], False),
        ({"name": "now", "parameters": {}}, False),
    ],
)
def test_required_admits_calls_of_the_tools_and_nothing_else(calls, valid):
    assert is_valid(calls, schema_of(tool_choice="required")) == valid


def test_without_parallel_calls_required_admits_one():
    schema = schema_of(tool_choice="required", parallel_tool_calls=False)
    call = {"name": "now", "parameters": {}}
    assert is_valid([call], schema) and not is_valid([call, call], schema)


def test_allowed_tools_may_be_required():
    allowed = {"mode": "required", "tools": [named("now")]}
    schema = schema_of(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert is_valid([{"name": "now", "parameters": {}}], schema)
    assert not is_valid([{"name": "weather", "parameters": GOOD}], schema)


def test_only_references_move_and_not_what_looks_like_one():
    plain = {"type": "object", "properties": {"$ref": {"const": {"$ref": "#/x"}}, "enum": {"$ref": "#/properties/a"}}}
    SCHEMAS["odd"] = plain
    try:
        moved = schema_of(tools=tools("odd"), tool_choice="required")["$defs"]["odd"]
    finally:
        del SCHEMAS["odd"]
    assert moved["properties"]["$ref"] == {"const": {"$ref": "#/x"}}
    assert moved["properties"]["enum"] == {"$ref": "#/$defs/odd/properties/a"}


# ---- with a real engine


@pytest.fixture(scope="module", params=["xgrammar", "llguidance", "dfa"])
def client(request, serving):
    if request.param != "dfa":
        pytest.importorskip(request.param)
    from minivllm.engine.async_llm import AsyncLLM

    overrides = {"kv.num_blocks": 256, "model.dtype": "float32", "structured.backend": request.param}
    engine = AsyncLLM("dummy:tiny", overrides={**overrides, "executor.num_threads": 1}, max_model_len=2048)
    with serving(engine) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60)


@pytest.fixture
def ask(client):
    def ask(**fields):
        common = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "seed": 5}
        return client.chat.completions.create(**{**common, **fields})

    return ask


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call_follows_its_schema(ask, seed, stream):
    reply = ask(tools=tools("now", "weather"), tool_choice=named("weather"), seed=seed, stream=stream)
    if stream:
        chunks = list(reply)
        parts = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
        assert parts[0].function.name == "weather" and len(parts) > 3
        arguments, reason = "".join(p.function.arguments for p in parts), chunks[-1].choices[0].finish_reason
    else:
        arguments = reply.choices[0].message.tool_calls[0].function.arguments
        reason = reply.choices[0].finish_reason
    assert reason == "tool_calls"
    assert is_valid(json.loads(arguments), WEATHER)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_required_calls_follow_their_schemas(ask, seed):
    choice = ask(tools=tools("weather", "now"), tool_choice="required", parallel_tool_calls=False, seed=seed).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    wanted = {"weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}[call.function.name]
    assert is_valid(json.loads(call.function.arguments), wanted)


def test_a_schema_that_refers_to_itself_is_followed_among_others(ask, client):
    """The in-house automaton has no recursion, and says so."""
    fields = {"tools": tools("tree", "now"), "tool_choice": "required", "parallel_tool_calls": False}
    try:
        choices = [ask(**fields, seed=seed).choices[0] for seed in range(4)]
    except openai.BadRequestError as error:
        assert "recurs" in error.message and error.param == "tools"
        return
    calls = [call.function for choice in choices for call in choice.message.tool_calls or ()]
    assert calls and all(is_valid(json.loads(c.arguments), TREE) for c in calls if c.name == "tree")


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_beside_tools_follows_its_schema_or_is_a_call(ask, client, seed):
    city = {"type": "object", "properties": {"name": {"enum": ["Rome", "Paris"]}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": city}}
    asked = {"tools": tools("now"), "tool_choice": "auto", "response_format": form, "seed": seed}
    message = ask(**asked).choices[0].message
    assert message.tool_calls or is_valid(json.loads(message.content), city)
    url = str(client.base_url).removesuffix("/v1/")
    call = httpx.post(f"{url}/tokenize", json={"prompt": "<tool_call>", "add_special_tokens": False}).json()["tokens"]
    wanting = {"logit_bias": dict.fromkeys(call, 100), "parallel_tool_calls": False}  # a model that wants to call
    choice = ask(**asked, **wanting).choices[0]
    (called,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert (called.function.name, called.function.arguments) == ("now", "{}")


def test_a_schema_that_is_none_is_a_400_that_names_its_place(ask):
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "strin"}}}}}]
    for choice, param in ((named("f"), "tools[0].function.parameters"), ("required", "tools")):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(tools=bad, tool_choice=choice)
        assert caught.value.param == param and "strin" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_n_choices_has_its_own_calls(ask, stream):
    fields = {"tools": tools("now", "weather"), "tool_choice": "required", "parallel_tool_calls": False, "n": 3}
    reply = ask(**fields, stream=stream)
    if not stream:
        assert all(len(choice.message.tool_calls) == 1 for choice in reply.choices)
        return
    arguments = {0: "", 1: "", 2: ""}
    for choice in (choice for chunk in reply for choice in chunk.choices):
        for part in choice.delta.tool_calls or ():
            arguments[choice.index] += part.function.arguments
    assert all(isinstance(json.loads(text), dict) for text in arguments.values())


@pytest.mark.parametrize(
    ("definition", "fits"), [("^[a-c]{3}|[0-9]{2}$", r"[a-c]{3}|[0-9]{2}"), ("(é|z){2}", "[éz]{2}")]
)
def test_a_forced_custom_tool_writes_what_its_grammar_has(client, definition, fits):
    asks = {"model": "fake", "input": "Hi", "max_output_tokens": 200, "extra_body": {"seed": 5}}
    held = {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "regex", "definition": definition}}
    (call,) = client.responses.create(**asks, tools=[held], tool_choice="required").output
    assert call.type == "custom_tool_call" and re.fullmatch(fits, call.input), call
    held["format"]["definition"] = "(a"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asks, tools=[held], tool_choice={"type": "custom", "name": "f"})
    assert refused.value.param == "tools[0].format.definition"


def test_a_functions_schema_may_have_an_id_and_references_with_escapes():
    parameters = {
        "$id": "https://example.org/f",
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/p%25q"}, "b": {"$ref": "#/$defs/c%20d/anyOf/0"}},
        "$defs": {"p%q": {"type": "integer"}, "c d": {"anyOf": [{"type": "null"}]}},
    }
    call, definitions = call_schema({"f": parameters}, {})
    written = json.dumps(normal(json.dumps({**call, "$defs": definitions})).schema)
    assert '"a": {"type": "integer"}, "b": {"type": "null"}' in written
    assert types_of(parameters, "a") == {"integer"} and types_of(parameters, "b") == {"null"}
