"""The policy: hints, echoes and unknown fields are taken and named; what would change the answer is refused."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from minivllm.errors import BadRequest
from minivllm.serve import bodies
from minivllm.serve.messages_protocol import MessagesRequest
from minivllm.serve.protocol import ChatRequest
from minivllm.serve.responses_protocol import ResponsesRequest

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, MESSAGES, RESPONSES = "chat/completions", "messages", "responses"
EPHEMERAL = {"type": "ephemeral"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def post(url: str, path: str, fields: dict) -> httpx.Response:
    asks = {CHAT: {"messages": HELLO}, MESSAGES: {"messages": HELLO, "max_tokens": 9}, RESPONSES: {"input": "Hello"}}
    return httpx.post(f"{url}/v1/{path}", json={**asks[path], **fields})


def ignored(reply: httpx.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    return list(filter(None, reply.headers.get("x-minivllm-ignored", "").split(", ")))


HINTS = [
    *((CHAT, {name: value}, [name]) for name, value in (
        ("user", "u"), ("metadata", {"a": "b"}), ("store", True), ("service_tier", "flex"), ("safety_identifier", "s"),
        ("prompt_cache_key", "k"), ("reasoning_effort", "high"), ("verbosity", "low"),
        ("thinking", {"type": "enabled"}), ("prediction", {"type": "content", "content": "x"}), ("made_up", 5),
        ("temprature", 1),
    )),
    (CHAT, {"messages": [{**HELLO[0], "annotations": [{}], "provider_specific_fields": {"x": 1}}]},
     ["messages[].annotations", "messages[].provider_specific_fields"]),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": EPHEMERAL}]}]},
     ["messages[].content[].cache_control"]),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "made": 1}, "cache_control": EPHEMERAL}],
            "tool_choice": "none"}, ["tools[].function.made", "tools[].cache_control"]),
    (CHAT, {"stream_options": {"made_up": True}, "stream": True}, ["stream_options.made_up"]),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}, "output_config": {"effort": "high"}},
     ["thinking", "output_config.effort"]),
    (MESSAGES, {"system": [{"type": "text", "text": "x", "cache_control": EPHEMERAL}], "metadata": {"user_id": "u"},
                "context_management": {"edits": []}}, ["system[].cache_control", "metadata", "context_management"]),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "made_up": 1}]}]},
     ["messages[].content[].made_up"]),
    (RESPONSES, {"store": True, "reasoning": {"effort": "high"}, "text": {"verbosity": "low"}, "truncation": "auto"},
     ["store", "reasoning.effort", "text.verbosity", "truncation"]),
    (RESPONSES,
     {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "made_up": 1}], "more": 2}]},
     ["input[].content[].made_up", "input[].more"]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "names"), HINTS, ids=str)
def test_hints_and_echoes_are_taken_and_named(fake, path, fields, names):
    assert sorted(ignored(post(fake.url, path, fields))) == sorted(names)
    assert fake.engine.calls


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((CHAT, {name: value}) for name, value in (
            ("store", False), ("service_tier", "auto"), ("reasoning_effort", "none"), ("verbosity", "medium"),
            ("user", None), ("metadata", {}), ("modalities", ["text"]), ("audio", None), ("parallel_tool_calls", True),
        )),
        (CHAT, {"messages": [{**HELLO[0], "annotations": [], "audio": None, "refusal": None, "function_call": None}]}),
        (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "x", "reasoning_content": "y"}, *HELLO]}),
        (MESSAGES, {"thinking": {"type": "disabled"}, "service_tier": "auto"}),
        (RESPONSES, {"store": False, "reasoning": {}, "truncation": "disabled", "background": False}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_honoured_or_asks_for_nothing_is_not_named(fake, path, fields):
    assert ignored(post(fake.url, path, fields)) == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, {"audio": {"voice": "x"}}), (CHAT, {"modalities": ["audio"]}), (CHAT, {"web_search_options": {}}),
     (MESSAGES, {"mcp_servers": [{"url": "x"}]}), (RESPONSES, {"background": True}),
     (RESPONSES, {"previous_response_id": "resp_1"})],
    ids=str,
)  # fmt: skip
def test_what_would_change_the_answer_is_refused(fake, path, fields):
    reply = post(fake.url, path, fields)
    assert reply.status_code == 400 and next(iter(fields)) in reply.json()["error"]["message"]
    assert not fake.engine.calls


def test_a_typing_error_is_named_with_what_was_meant_once_in_the_log(fake_engine, serving, caplog):
    with serving(fake_engine) as url:
        for _ in range(3):
            assert ignored(post(url, CHAT, {"temprature": 1, "store": True})) == ["temprature", "store"]
    told = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
    assert len(told) == 2
    assert told[0].startswith('/v1/chat/completions: "temprature" is ignored: no field of this endpoint.')
    assert 'Did you mean "temperature"?' in told[0] and "stored" in told[1]


def test_a_server_can_refuse_what_it_does_not_know(fake_engine, serving):
    with serving(fake_engine, refuse_unknown=True) as url:
        for path, fields in ((CHAT, {"temprature": 1}), (MESSAGES, {"temprature": 1}), (RESPONSES, {"imput": "x"})):
            reply = post(url, path, fields)
            assert reply.status_code == 400 and "Did you mean" in reply.json()["error"]["message"]
        assert post(url, CHAT, {"store": True}).status_code == 200  # known


def test_names_that_clients_choose_are_cut_and_harmless():
    found: bodies.Ignored = {}
    odd = {"a\r\nx-evil: 1": 1, "\u2028": 2, "n" * 1000: 3, **{f"x{i}": i for i in range(2000)}}
    bodies.parse(msgspec.json.encode({"messages": HELLO, **odd}), ChatRequest, found)
    assert len(found) <= bodies.MOST_TOLD and max(map(len, found)) <= bodies.LONGEST_NAME + 3
    assert {"a??x-evil??1", "?"} <= found.keys()
    header = bodies.header(list(found))
    assert header.count(b",") <= bodies.MOST_IN_HEADER and header.isascii() and b"\n" not in header


def test_a_long_conversation_with_echoes_is_read_once():
    """An unknown field in each of many messages: one walk, and not a new attempt for each."""
    said = {"role": "assistant", "content": "x", "made_up": {"deep": [1]}}
    turns = [{**said, "tool_calls": [{**CALL, "id": str(i), "k": 1}]} for i in range(5000)]
    found: bodies.Ignored = {}
    body = bodies.parse(msgspec.json.encode({"messages": turns}), ChatRequest, found)
    assert len(body.messages) == 5000 and list(found) == ["messages[].made_up", "messages[].tool_calls[].k"]


@pytest.mark.parametrize("kind", [ChatRequest, MessagesRequest, ResponsesRequest])
def test_bad_values_beside_unknown_fields_are_still_named(kind):
    asks = {"made_up": 1, "temperature": "hot", "max_tokens": 5, "messages": HELLO, "input": "x"}
    with pytest.raises(BadRequest) as info:
        bodies.parse(msgspec.json.encode(asks), kind, {})
    assert info.value.param == "temperature"


@pytest.mark.parametrize("role", ["king", "ipython", "observation"])
def test_a_role_of_its_own_goes_to_the_template(fake, role):
    post(fake.url, CHAT, {"messages": [{"role": role, "content": "x"}]})
    (call,) = fake.engine.calls
    assert f"<{role[0]}>x" in bytes(call.prompt["prompt_token_ids"]).decode()


@pytest.mark.parametrize(
    "query", ["=1&=2", "a b=1", "%0d%0aset-cookie:x=1", "&".join(f"{'x' * 100}{i}=" for i in range(300))]
)
def test_a_parameter_of_any_name_is_answered_and_named_harmlessly(fake, query):
    reply = httpx.get(f"{fake.url}/v1/responses/resp_0?{query}")
    assert reply.status_code == 404 and "set-cookie" not in reply.headers
    assert reply.headers["x-minivllm-ignored"] and len(reply.headers["x-minivllm-ignored"]) < 10_000


def test_a_field_without_a_name_is_answered_and_named(fake):
    reply = httpx.post(f"{fake.url}/v1/completions", json={"prompt": "x", "": 1})
    assert reply.status_code == 200 and reply.headers["x-minivllm-ignored"] == "?"
