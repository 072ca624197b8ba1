"""Tool calling over a real socket, with the `openai` package. The engine is a fake that writes what the test says."""

from __future__ import annotations

import json

import httpx
import jsonschema
import openai
import pytest

from minivllm.serve.tools import TOOL_PARSERS

HELLO = [{"role": "user", "content": "Weather?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
def ask(fake):
    client = openai.OpenAI(base_url=f"{fake.url}/v1", api_key="x", max_retries=0)

    def ask(script, **fields):
        fake.engine.script = [script] if isinstance(script, str) else script
        return client.chat.completions.create(**{"model": "fake", "messages": HELLO, "tools": TOOLS, **fields})

    return ask


def add_up(chunks):
    """(content, calls, finish reason) of a stream; what a client does."""
    content, calls, reason = "", {}, None
    for chunk in chunks:
        choice = chunk.choices[0]
        content, reason = content + (choice.delta.content or ""), choice.finish_reason or reason
        for part in choice.delta.tool_calls or ():
            if part.index not in calls:
                assert part.id.startswith("call_") and part.type == "function" and part.function.name
                calls[part.index] = [part.function.name, ""]
            else:
                assert part.id is part.type is part.function.name is None
            calls[part.index][1] += part.function.arguments
    return content, [tuple(calls[i]) for i in sorted(calls)], reason


def test_a_call_becomes_tool_calls(ask):
    choice = ask(CALL).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Paris"},
    )
    assert call.id.startswith("call_")
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")


def test_an_answer_in_words_is_an_answer_in_words(ask):
    choice = ask("It is  warm.\n").choices[0]
    assert (choice.message.content, choice.message.tool_calls) == ("It is  warm.\n", None)
    assert choice.finish_reason == "stop"


def test_a_stream_tells_name_and_id_first_and_then_the_arguments(ask):
    chunks = list(ask(list(CALL), stream=True))
    parts = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
    assert (parts[0].index, parts[0].type, parts[0].function.name) == (0, "function", "weather")
    assert parts[0].function.arguments == "" and len(parts) > 10
    assert all(part.id is None and part.function.name is None for part in parts[1:])
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert add_up(chunks) == ("", [("weather", '{"city": "Paris"}')], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_calls_after_some_words(ask, stream):
    text = f"I will look.\n{CALL}\n{CALL_NOW}"
    expected = [("weather", '{"city": "Paris"}'), ("now", "{}")]
    if stream:
        assert add_up(ask(list(text), stream=True)) == ("I will look.", expected, "tool_calls")
        return
    choice = ask(text).choices[0]
    assert choice.message.content == "I will look."
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == expected
    assert len({c.id for c in choice.message.tool_calls}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_false_gives_one(ask, stream):
    reply = ask(list(CALL + CALL_NOW), stream=stream, parallel_tool_calls=False)
    calls = add_up(reply)[1] if stream else reply.choices[0].message.tool_calls
    assert len(calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_call_is_content(ask, stream):
    text = "<tool_call>{'name': 'weather'}</tool_call>"
    if stream:
        assert add_up(ask(list(text), stream=True)) == (text, [], "stop")
    else:
        choice = ask(text).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_no_chunk_shows_half_a_tag(ask):
    chunks = list(ask(list(f"a < b {CALL}"), stream=True))
    contents = [c.choices[0].delta.content for c in chunks if c.choices[0].delta.content]
    assert "".join(contents) == "a < b" and not any("<t" in content for content in contents)


def test_every_chunk_of_a_stream_has_something_to_say(ask):
    for chunk in list(ask(list(CALL), stream=True))[1:-1]:
        assert chunk.choices[0].delta.tool_calls


def test_the_sdks_own_stream_helper_understands_the_stream(fake):
    fake.engine.script = list(CALL + CALL_NOW)
    client = openai.OpenAI(base_url=f"{fake.url}/v1", api_key="x", max_retries=0)
    with client.chat.completions.stream(model="fake", messages=HELLO, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [c.function.name for c in message.tool_calls] == ["weather", "now"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}


def test_a_result_goes_back_to_the_model(ask, fake):
    message = ask(CALL).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    reply = ask("It is sunny.", messages=[*HELLO, message.model_dump(exclude_none=True), result])
    assert reply.choices[0].message.content == "It is sunny."
    _, called, answered = fake.engine.tokenizer.rendered["messages"]
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert answered == {"role": "tool", "content": "sunny", "tool_call_id": message.tool_calls[0].id}


def test_a_message_as_the_sdk_dumps_it_whole_is_accepted(ask):
    message = ask(CALL).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "ok"}]}
    assert ask("fine", messages=[*HELLO, message.model_dump(), result]).choices[0].message.content == "fine"


def test_the_template_gets_the_tools_as_they_were_sent(ask, fake):
    ask("x")
    assert fake.engine.tokenizer.rendered["tools"] == TOOLS


def test_with_tool_choice_none_the_model_is_told_of_no_tools_and_its_text_is_left_alone(ask, fake):
    choice = ask(CALL, tool_choice="none").choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    assert fake.engine.tokenizer.rendered["tools"] is None


def test_only_allowed_tools_are_offered(ask, fake):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    reply = ask(CALL_NOW, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert reply.choices[0].message.tool_calls[0].function.name == "now"
    assert fake.engine.tokenizer.rendered["tools"] == [NOW]


def test_token_ids_are_told_beside_calls(ask):
    chunks = list(ask(list(CALL), stream=True, extra_body={"return_token_ids": True}))
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or ()]
    assert "".join(map(chr, ids)) == CALL


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]'),
    ],
)
def test_the_server_reads_the_format_it_is_told(fake_engine, serving, parser, text):
    fake_engine.script = [text]
    with serving(fake_engine, tool_parser=TOOL_PARSERS.get(parser)) as url:
        body = {"messages": HELLO, "tools": TOOLS}
        (call,) = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
        assert len(call["id"]) == (9 if parser == "mistral" else 29)


def test_markers_that_are_special_tokens_are_kept_in_the_text(ask, fake):
    fake.engine.tokenizer.special_ids = frozenset({ord("x")})
    fake.engine.tokenizer.encode = lambda text, add_special_tokens=True: [ord("x")] if "call" in text else [1, 2]
    try:
        ask("x")
    finally:
        del fake.engine.tokenizer.encode, fake.engine.tokenizer.special_ids
    assert fake.engine.calls[-1].params.skip_special_tokens is False
    ask("x")
    assert fake.engine.calls[-1].params.skip_special_tokens is True


def test_a_model_whose_calls_cannot_be_read_refuses_tools_and_says_what_to_do(fake_engine, serving):
    with serving(fake_engine, tool_parser=None) as url:
        reply = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO, "tools": TOOLS})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "tools" and "--tool-call-parser" in reply.json()["error"]["message"]


def named(name):
    return {"type": "function", "function": {"name": name}}


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "now", "arguments": "{}"}}]}
CHOICE = {"extra_body": {"guided_choice": ["a"]}}
BAD = [
    ({"tool_choice": named("wether")}, "tool_choice.function.name", 'Did you mean "weather"?'),
    ({"tool_choice": "auto", "tools": None}, "tool_choice", "needs tools"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
    ({"tool_choice": named("now"), "tools": None}, "tool_choice", "needs tools"),
    ({"tool_choice": "always"}, "tool_choice", "always"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type", "custom"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools.tools", "empty"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"tools": {"type": "function"}}, "tools", "array"),
    ({"tools": function(name="a b")}, "tools[0].function.name", "matching"),
    ({"tools": function(parameters=[])}, "tools[0].function.parameters", "object"),
    ({"tools": function(parameters={"type": "string"})}, "tools[0].function.parameters", "object"),
    ({"tools": function() + function()}, "tools[1].function.name", "two tools"),
    ({"functions": [{"name": "f"}]}, "functions", "replaced it by tools"),
    ({"function_call": "auto"}, "function_call", "tool_choice"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", "missing"),
    ({"messages": [*HELLO, CALLED, {"role": "tool", "content": "x", "tool_call_id": "2"}]},
     "messages[2].tool_call_id", "no earlier call"),
    ({"messages": [*HELLO, CALLED, {"role": "tool", "tool_call_id": "1"}]}, "messages[2].content", "missing"),
    ({"messages": [{**CALLED, "role": "user", "content": "x"}]}, "messages[0].tool_calls", "only the assistant"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id", '"tool"'),
    ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0].role", "older form"),
]  # fmt: skip


def test_a_form_for_the_answer_goes_with_tools(ask, fake):
    """An answer follows it, a call need not, unless the form is of the raw text: a call that is forced follows its own
    schema alone."""
    for form, kind, beside in (
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (CHOICE, "choice", False),
    ):
        asked = {}
        for choice in ("none", "auto", "required"):
            ask("{}", tool_choice=choice, **form)
            asked[choice] = fake.engine.calls[-1].params.structured
        assert asked["none"].kind == asked["auto"].kind == kind and asked["required"].kind == "json"
        assert [bool(asked[choice].calls) for choice in asked] == [False, beside, False]
        assert ask("{}", tool_choice="auto", **form).choices[0].message.content == "{}"
        called = ask('<tool_call>{"name": "now", "arguments": {}}</tool_call>', tool_choice="auto", **form).choices[0]
        assert called.message.tool_calls[0].function.name == "now"


@pytest.mark.parametrize("members", [
    {}, {"reasoning": "Hm"}, {"reasoning_content": "Hm", "reasoning": "Hm"}, {"refusal": "No."}, {"refusal": None},
    {"tool_calls": None}, {"tool_calls": []}, {"function_call": None, "audio": None, "annotations": []},
    {"tool_calls": CALLED["tool_calls"], "refusal": None},
])  # fmt: skip
def test_a_message_of_an_answer_is_taken_back_whatever_ended_it(fake, members):
    message = {"role": "assistant", "content": None, **members}
    results = [{"role": "tool", "content": "x", "tool_call_id": call["id"]} for call in members.get("tool_calls") or ()]
    body = {"messages": [*HELLO, message, *results, *HELLO], "tools": TOOLS}
    reply = httpx.post(f"{fake.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert fake.engine.tokenizer.rendered["messages"][1]["content"] == members.get("refusal")


@pytest.mark.parametrize(("fields", "param", "text"), BAD)
def test_a_bad_field_is_a_400_that_names_it(fake, fields, param, text):
    body = {"messages": HELLO, "tools": TOOLS, **fields}
    reply = httpx.post(f"{fake.url}/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert text in error["message"]
    assert not fake.engine.calls


# ---- forced calls


def test_a_named_function_is_called_with_the_whole_text_as_its_arguments(ask, fake):
    choice = ask('{"city": "Rome"}', tool_choice=named("weather")).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    params = fake.engine.calls[-1].params
    assert json.loads(params.structured.json) == CITY
    assert params.structured.field == "tools[0].function.parameters"


def test_a_named_functions_arguments_stream_as_they_come(ask):
    chunks = list(ask(list('{"city": "Rome"}'), tool_choice=named("weather"), stream=True))
    assert add_up(chunks) == ("", [("weather", '{"city": "Rome"}')], "tool_calls")
    assert len(chunks) == 1 + 1 + 16  # role, name, each letter


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_are_an_array_that_the_grammar_enforces(ask, fake, stream):
    calls = [{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "now", "parameters": {}}]
    reply = ask(list(json.dumps(calls)), tool_choice="required", stream=stream)
    expected = [("weather", '{"city": "Rome"}'), ("now", "{}")]
    if stream:
        assert add_up(reply) == ("", expected, "tool_calls")
    else:
        choice = reply.choices[0]
        assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == expected
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    schema = json.loads(fake.engine.calls[-1].params.structured.json)
    jsonschema.validate(calls, schema)


def test_a_forced_call_needs_no_parser_of_the_models_own(fake_engine, serving):
    fake_engine.script = ["{}"]
    with serving(fake_engine, tool_parser=None) as url:
        body = {"messages": HELLO, "tools": TOOLS, "tool_choice": named("now")}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        assert reply["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


def test_nothing_is_enforced_where_the_model_is_free(ask, fake):
    for choice in ("auto", "none"):
        ask("x", tool_choice=choice)
        assert fake.engine.calls[-1].params.structured is None
