"""/v1/responses with the `openai` package, over a real socket."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "The weather", "parameters": CITY}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
PATCH = {"type": "custom", "name": "apply_patch", "description": "Change files", "format": {"type": "text"}}
TEXT = 'print("Hello")\n\u00e9'
CALL_PATCH = f'<tool_call>{{"name": "apply_patch", "arguments": {json.dumps({"input": TEXT})}}}</tool_call>'
CALLED = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'}


@pytest.fixture
def client(fake):
    return openai.OpenAI(base_url=f"{fake.url}/v1", api_key="x", max_retries=0, timeout=20)


@pytest.fixture
def ask(client):
    return lambda **fields: client.responses.create(**{"model": "fake", "input": "Hi", **fields})


def raw(fake, **fields):
    return httpx.post(f"{fake.url}/v1/responses", json={"input": "Hi", **fields}, timeout=20)


def prompt(fake):
    return bytes(fake.engine.calls[-1].prompt["prompt_token_ids"]).decode()


def test_an_answer_is_a_response(fake, ask):
    reply = ask(instructions="Be brief", metadata={"a": "b"}, max_output_tokens=9, temperature=0.5, top_p=0.9)
    assert (reply.object, reply.status, reply.model, reply.output_text) == ("response", "completed", "fake", "abc")
    assert reply.id.startswith("resp_") and reply.output[0].id.startswith("msg_")
    assert (reply.instructions, reply.metadata, reply.store) == ("Be brief", {"a": "b"}, False)
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(prompt(fake)), 3)
    assert prompt(fake) == "<s>Be brief<u>Hi<a>"
    params = fake.engine.calls[0].params
    assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.5, 0.9)


def test_a_stream_has_openais_events_and_ends_with_what_it_streamed(ask):
    stream = list(ask(stream=True))
    assert [event.type for event in stream] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 3, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    assert stream[0].response.status == "in_progress" and stream[0].response.output == []
    assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == "abc"
    assert stream[-1].response.output_text == stream[-4].text == "abc"
    assert stream[-1].response.usage.total_tokens == ask().usage.total_tokens
    assert stream[2].item.status == "in_progress" and stream[-2].item == stream[-1].response.output[0]


@pytest.mark.parametrize("letters", [False, True])
def test_calls_become_items(fake, client, ask, letters):
    text = f"Let me look. {CALL}{CALL_NOW}"
    fake.engine.script = list(text) if letters else [text]
    whole = ask(tools=[WEATHER, NOW])
    with client.responses.stream(model="fake", input="Hi", tools=[WEATHER, NOW]) as stream:
        streamed = stream.get_final_response()
    for reply in (whole, streamed):
        said, *calls = reply.output
        assert said.content[0].text.strip() == "Let me look."
        assert [(c.type, c.name, json.loads(c.arguments), c.status) for c in calls] == [
            ("function_call", "weather", {"city": "Paris"}, "completed"),
            ("function_call", "now", {}, "completed"),
        ]
        assert all(call.id.startswith("fc_") and call.call_id.startswith("call_") for call in calls)
    assert fake.engine.tokenizer.rendered["tools"][0]["function"]["parameters"] == CITY


def test_the_events_of_a_call(fake, ask):
    fake.engine.script = list(CALL)
    stream = list(ask(tools=[WEATHER], stream=True))
    arguments = "".join(e.delta for e in stream if e.type == "response.function_call_arguments.delta")
    done = next(e for e in stream if e.type == "response.function_call_arguments.done")
    assert json.loads(arguments) == {"city": "Paris"} and done.arguments == arguments
    assert {e.item_id for e in stream if "arguments" in e.type} == {stream[-1].response.output[0].id}


@pytest.mark.parametrize(
    ("choice", "script"),
    [
        ({"type": "function", "name": "weather"}, '{"city": "Oslo"}'),
        ("required", '[{"name": "weather", "parameters": {"city": "Oslo"}}]'),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            '[{"name": "weather", "parameters": {"city": "Oslo"}}]',
        ),
    ],
)
def test_a_forced_call_is_held_to_its_schema(fake, ask, choice, script):
    fake.engine.script = list(script)
    (call,) = ask(tools=[WEATHER, NOW], tool_choice=choice).output
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    assert fake.engine.calls[0].params.structured.json


def test_one_call_at_most_without_parallel_calls(fake, ask):
    fake.engine.script = [CALL + CALL_NOW]
    assert [item.name for item in ask(tools=[WEATHER, NOW], parallel_tool_calls=False).output] == ["weather"]


def test_items_become_a_conversation(fake, ask):
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Hm", "annotations": []}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]}
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    thought = {"type": "reasoning", "id": "r1", "summary": []}
    ask(input=[{"role": "developer", "content": "Rules"}, user, thought, said, CALLED, result], tools=[WEATHER])
    system, user, called, tool = fake.engine.tokenizer.rendered["messages"]
    assert (system["role"], system["content"], user["content"]) == ("developer", "Rules", "Hi")
    assert called["content"] == "Hm" and called["tool_calls"][0]["function"]["name"] == "weather"
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "c1", "rain")


def test_an_output_can_be_sent_back_as_input(fake, ask):
    fake.engine.script = [f"Let me look. {CALL}"]
    reply = ask(tools=[WEATHER])
    result = {"type": "function_call_output", "call_id": reply.output[1].call_id, "output": "rain"}
    back = [item.to_dict() for item in reply.output]
    assert ask(input=[{"role": "user", "content": "Hi"}, *back, result], tools=[WEATHER]).status == "completed"
    assert [m["role"] for m in fake.engine.tokenizer.rendered["messages"]] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("letters", [False, True])
def test_a_custom_tools_input_is_text(fake, ask, client, letters):
    fake.engine.script = list(CALL_PATCH) if letters else [CALL_PATCH]
    whole = ask(tools=[PATCH, WEATHER])
    (call,) = whole.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", TEXT)
    assert fake.engine.tokenizer.rendered["tools"][0]["function"]["parameters"]["required"] == ["input"]
    with client.responses.stream(model="fake", input="Hi", tools=[PATCH, WEATHER]) as stream:
        events = list(stream)
    (delta,) = (event.delta for event in events if event.type == "response.custom_tool_call_input.delta")
    (done,) = (event.input for event in events if event.type == "response.custom_tool_call_input.done")
    assert delta == done == events[-1].response.output[0].input == TEXT
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    ask(input=[{"role": "user", "content": "Hi"}, *whole.output, result], tools=[PATCH])
    _, called, tool = fake.engine.tokenizer.rendered["messages"]
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"input": TEXT}
    assert (tool["role"], tool["content"], tool["tool_call_id"]) == ("tool", "done", call.call_id)


@pytest.mark.parametrize(("written", "read"), [('{"input": "a b"}', "a b"), ('{"input": "a', '{"input": "a')])
def test_a_custom_tool_may_be_forced(fake, ask, written, read):
    """What is no input is shown as it is, such as a call that max_tokens has cut off."""
    fake.engine.script = [written]
    (call,) = ask(tools=[WEATHER, PATCH], tool_choice={"type": "custom", "name": "apply_patch"}).output
    assert (call.type, call.input) == ("custom_tool_call", read)
    assert fake.engine.calls[0].params.structured.field == "tools[1].parameters"
    allowed = [{"type": "custom", "name": "apply_patch"}]
    fake.engine.script = ['[{"name": "apply_patch", "parameters": {"input": "x"}}]']
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    assert ask(tools=[WEATHER, PATCH], tool_choice=choice).output[0].input == "x"


@pytest.mark.parametrize(
    ("definition", "inside"),
    [("a|b", "a|b"), ("^a|b$", "a|b"), (r"^\d+\$", r"\d+\$"), (r"a\\$", r"a\\"), ("(?P<x>a)+", "(?P<x>a)+")],
)
def test_a_custom_tools_grammar_is_the_pattern_of_its_input(fake, ask, definition, inside):
    fake.engine.script = ['{"input": "a"}']
    held = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": definition}}
    (call,) = ask(tools=[WEATHER, held], tool_choice={"type": "custom", "name": "apply_patch"}).output
    structured = fake.engine.calls[-1].params.structured
    assert (call.input, structured.field) == ("a", "tools[1].format.definition")
    assert json.loads(structured.json)["properties"] == {"input": {"type": "string", "pattern": f"^(?:{inside})$"}}


@pytest.mark.parametrize(
    ("form", "kind"),
    [({"type": "json_schema", "name": "x", "schema": CITY}, "json"), ({"type": "json_object"}, "json_object")],
)
def test_a_format_holds_the_answer(fake, ask, form, kind):
    ask(text={"format": form})
    assert getattr(fake.engine.calls[0].params.structured, kind)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "x" * 200}, "input"),
        ({"max_output_tokens": 1000}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.thoughts"]}, "include[0]"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"tools": [PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}}]},
         "tools[0].format.syntax"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c9", "name": "x"}]}, "input[0].input"),
        ({"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c9", "name": "x"}]}, "input[0].arguments"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(fake, fields, param):
    reply = raw(fake, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert not fake.engine.calls


def test_what_asks_for_nothing_is_taken(fake):
    nothing = {"store": False, "background": False, "truncation": "disabled", "include": [], "reasoning": {}}
    assert raw(fake, **nothing, user="u", previous_response_id=None).status_code == 200


def test_an_error_inside_a_stream_is_an_event(fake, ask):
    fake.engine.script = ["a", RuntimeError("boom"), "b"]
    last = list(ask(stream=True))[-1]
    assert last.type == "error" and "internal error" in last.message and last.sequence_number == 5


def test_an_answer_that_is_cut_off_is_incomplete(tiny_url):
    client = openai.OpenAI(base_url=f"{tiny_url}/v1", api_key="x", max_retries=0, timeout=60)
    asked = {"model": "tiny", "input": "Grüße 🙂", "max_output_tokens": 30, "temperature": 0}
    whole = client.responses.create(**asked)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output[0].status == "incomplete" and whole.usage.output_tokens == 30
    *_, last = client.responses.create(stream=True, **asked)
    assert last.type == "response.incomplete" and last.response.output_text == whole.output_text
