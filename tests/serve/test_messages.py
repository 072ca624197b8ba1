"""/v1/messages with the `anthropic` package, over a real socket."""

from __future__ import annotations

import json

import anthropic
import httpx
import pytest

HELLO = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather", "input_schema": CITY}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}


@pytest.fixture
def client(fake):
    return anthropic.Anthropic(base_url=fake.url, api_key="x", max_retries=0, timeout=20)


@pytest.fixture
def ask(client):
    return lambda **fields: client.messages.create(**{"model": "fake", "messages": HELLO, "max_tokens": 20, **fields})


def raw(fake, **fields):
    body = {"messages": HELLO, "max_tokens": 20, **fields}
    reply = httpx.post(f"{fake.url}/v1/messages", json=body, timeout=20)
    return reply


def rendered(fake):
    return fake.engine.tokenizer.rendered["messages"]


def test_an_answer_is_a_message(fake, ask):
    reply = ask(system="Be brief")
    assert (reply.type, reply.role, reply.model, reply.stop_reason) == ("message", "assistant", "fake", "end_turn")
    assert reply.id.startswith("msg_") and [block.text for block in reply.content] == ["abc"]
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len("<s>Be brief<u>Hi<a>"), 3)


@pytest.mark.parametrize("length", [1, 65, 128])
def test_a_tools_name_may_be_as_long_as_anthropic_admits(fake, length):
    tool = {**WEATHER, "name": "m" * length}
    use = {"role": "assistant", "content": [{**USE, "name": tool["name"]}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": USE["id"], "content": "rain"}]}
    choices = ({"type": "auto"}, {"type": "tool", "name": tool["name"]})
    for choice in choices:
        reply = raw(fake, tools=[tool], tool_choice=choice, messages=[*HELLO, use, result])
        assert reply.status_code == 200, reply.text
    assert raw(fake, tools=[{**WEATHER, "name": "m" * 129}]).status_code == 400


def test_parameters_reach_the_engine(fake):
    fields = {"stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 7, "metadata": {"user_id": "u"}}
    assert raw(fake, **fields).status_code == 200
    params = fake.engine.calls[0].params
    assert (params.max_tokens, params.stop, params.temperature, params.top_p, params.top_k) == (20, ("x",), 0.5, 0.9, 7)


def test_a_stream_has_anthropics_events_and_adds_up(fake, client, ask):
    stream = list(ask(stream=True))
    assert [event.type for event in stream] == [
        "message_start", "content_block_start", *["content_block_delta"] * 3,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert stream[0].message.usage.input_tokens == len("<u>Hi<a>") and stream[0].message.content == []
    assert (stream[-2].delta.stop_reason, stream[-2].usage.output_tokens) == ("end_turn", 3)
    with client.messages.stream(model="fake", messages=HELLO, max_tokens=20) as helper:
        final = helper.get_final_message()
    assert final.content[0].text == ask().content[0].text == "abc"
    assert "event: ping\n" in raw(fake, stream=True).text


@pytest.mark.parametrize("letters", [False, True])
def test_calls_become_tool_use_blocks(fake, client, letters):
    text = f"Let me look. {CALL}{CALL_NOW}"
    fake.engine.script = list(text) if letters else [text]
    asked = {"model": "fake", "messages": HELLO, "max_tokens": 20, "tools": [WEATHER, NOW]}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        said, *calls = message.content
        assert said.text.strip() == "Let me look." and message.stop_reason == "tool_use"
        assert [(call.type, call.name, call.input) for call in calls] == [
            ("tool_use", "weather", {"city": "Paris"}),
            ("tool_use", "now", {}),
        ]
    assert fake.engine.tokenizer.rendered["tools"][0]["function"]["parameters"] == CITY


def test_one_call_at_most_if_parallel_use_is_off(fake, ask):
    fake.engine.script = [CALL + CALL_NOW]
    reply = ask(tools=[WEATHER, NOW], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.name for block in reply.content] == ["weather"]


@pytest.mark.parametrize(
    ("choice", "script"),
    [
        ({"type": "tool", "name": "weather"}, '{"city": "Oslo"}'),
        ({"type": "any"}, '[{"name": "weather", "parameters": {"city": "Oslo"}}]'),
    ],
)
def test_a_forced_call_is_held_to_its_schema(fake, ask, choice, script):
    fake.engine.script = list(script)
    reply = ask(tools=[WEATHER], tool_choice=choice)
    assert [(block.name, block.input) for block in reply.content] == [("weather", {"city": "Oslo"})]
    assert fake.engine.calls[0].params.structured.json
    assert reply.stop_reason == "tool_use"


def test_a_grammars_errors_name_the_field_of_this_endpoint(fake, ask):
    """It is compiled once the request runs."""
    ask(output_config={"format": {"type": "json_schema", "schema": CITY}})
    ask(tools=[NOW, WEATHER], tool_choice={"type": "tool", "name": "weather"})
    fields = [call.params.structured.field for call in fake.engine.calls]
    assert fields == ["output_config.format.schema", "tools[1].input_schema"]


def test_a_system_message_may_stand_among_the_others(fake, ask):
    note = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    ask(messages=[*HELLO, note, *HELLO], system=[{"type": "text", "text": "You help."}])
    assert [(m["role"], m["content"]) for m in rendered(fake)] == [
        ("system", "You help."), ("user", "Hi"), ("system", "Be brief."), ("user", "Hi")
    ]  # fmt: skip
    passing = note | {"clear_at": "next_user_message"}
    ask(messages=[*HELLO, passing])
    assert [m["role"] for m in rendered(fake)] == ["user", "system"]
    ask(messages=[*HELLO, passing, *HELLO])
    assert [m["role"] for m in rendered(fake)] == ["user"]
    with pytest.raises(anthropic.BadRequestError, match="texts alone"):
        ask(messages=[*HELLO, {"role": "system", "content": [USE]}])


def test_what_claude_code_tells_anthropics_accounts_is_not_shown_to_the_model(fake, ask):
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f2e3;"}
    ask(system=[billing, {"type": "text", "text": "You help."}])
    assert rendered(fake)[0]["content"] == "You help."


def test_a_forced_call_that_is_cut_off_is_text(fake, ask):
    fake.engine.script = ['{"city": "Os']
    reply = ask(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    assert [block.text for block in reply.content] == ['{"city": "Os']


def test_with_tool_choice_none_the_model_is_not_told(fake, ask):
    fake.engine.script = [CALL]
    assert ask(tools=[WEATHER], tool_choice={"type": "none"}).content[0].text == CALL
    assert fake.engine.tokenizer.rendered["tools"] is None


def test_tool_results_are_messages_of_their_own(fake, ask):
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]}
    also = {"type": "text", "text": "And now?"}
    turns = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Hm"}, USE]}]
    ask(messages=[*turns, {"role": "user", "content": [result, also]}], tools=[WEATHER])
    _, called, tool, user = rendered(fake)
    assert called["tool_calls"][0]["id"] == "t1" and called["content"] == "Hm"
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "t1", "rain")
    assert (user["role"], user["content"]) == ("user", "And now?")
    failed = {"role": "user", "content": [{**result, "is_error": True}]}
    ask(messages=[*turns, failed], tools=[WEATHER])
    assert rendered(fake)[-1]["content"] == "Error: rain"


def test_turns_of_one_role_in_a_row_are_one(fake, ask):
    ask(messages=[*HELLO, {"role": "user", "content": [{"type": "text", "text": "you"}]}])
    assert [message["content"] for message in rendered(fake)] == ["Hi\nyou"]


def test_the_answer_goes_on_where_a_last_assistant_message_ends(fake, ask):
    ask(messages=[*HELLO, {"role": "assistant", "content": "Well,"}])
    assert bytes(fake.engine.calls[0].prompt["prompt_token_ids"]).decode() == "<u>Hi<a>Well,"


def test_a_schema_holds_the_answer(fake):
    raw(fake, output_config={"format": {"type": "json_schema", "schema": CITY}})
    assert fake.engine.calls[0].params.structured.json == json.dumps(CITY, separators=(",", ":"))


def test_count_tokens_counts_what_an_answer_is_charged(fake, client, ask):
    asked = {"messages": HELLO, "system": [{"type": "text", "text": "Be brief"}], "tools": [WEATHER]}
    count = client.messages.count_tokens(model="fake", **asked).input_tokens
    assert count == ask(**asked).usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": []}, "messages is empty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1000}, "context"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
         "messages[0].content[0].source is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": None}]}]},
         "source: Expected object, got null"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "document", "source": None}]}]}]},
         "source: Expected object, got null"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "no tool_result"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "only the assistant"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "wether"}}, 'Did you mean "weather"?'),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_shape(fake, fields, text):
    reply = raw(fake, **fields)
    assert reply.status_code == 400 and not fake.engine.calls
    assert (reply.json()["type"], reply.json()["error"]["type"]) == ("error", "invalid_request_error")
    assert text in reply.json()["error"]["message"]


def test_an_unknown_model_is_the_clients_not_found_error(ask):
    with pytest.raises(anthropic.NotFoundError) as info:
        ask(model="claude")
    assert info.value.body["error"]["type"] == "not_found_error"


def test_an_error_inside_a_stream_is_an_event(fake, ask):
    fake.engine.script = ["a", RuntimeError("boom"), "b"]
    with pytest.raises(anthropic.APIStatusError, match="internal error"):
        list(ask(stream=True))
    last = raw(fake, stream=True).text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    told = json.loads(last.partition("data: ")[2])
    assert (told["type"], told["error"]["type"]) == ("error", "api_error")


def test_a_real_engine_says_why_it_stopped(tiny_url):
    client = anthropic.Anthropic(base_url=tiny_url, api_key="x", max_retries=0, timeout=60)
    asked = {"model": "tiny", "messages": HELLO, "extra_body": {"temperature": 0}}
    whole = client.messages.create(max_tokens=20, **asked)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 20)
    text = whole.content[0].text
    piece = next(text[i : i + 3] for i in range(1, len(text)) if text.index(text[i : i + 3]) > 0)
    cut = client.messages.create(max_tokens=20, stop_sequences=[piece], **asked)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", piece)
    assert cut.content[0].text == text[: text.index(piece)]
    with client.messages.stream(max_tokens=20, stop_sequences=[piece], **asked) as stream:
        assert stream.get_final_message().content[0].text == cut.content[0].text
        assert stream.get_final_message().stop_sequence == piece


def test_a_client_that_leaves_ends_its_request(fake, client, eventually):
    import threading

    fake.engine.script = ["a", threading.Event(), "b"]
    with client.messages.stream(model="fake", messages=HELLO, max_tokens=20) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                break
    eventually(lambda: fake.engine.num_closed_early == 1 and fake.engine.num_open == 0)


def test_the_key_may_be_anthropics_header(serving, fake_engine):
    with serving(fake_engine, api_keys=["secret"]) as url:
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(
                model="fake", messages=HELLO, max_tokens=5
            )
        good = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)
        assert good.messages.create(model="fake", messages=HELLO, max_tokens=5).content
