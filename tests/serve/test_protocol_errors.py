"""Bad input is one clear error in OpenAI's shape, which names the field; the server goes on."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import openai
import pytest

from minivllm.serve.keys import salted

HELLO = [{"role": "user", "content": "Hello"}]


def post(url, path, data):
    content = data if isinstance(data, bytes) else json.dumps(data).encode()
    reply = httpx.post(f"{url}/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    return reply.status_code, reply.json()["error"]


CHAT = [
    ({"messages": []}, "messages", "empty"),
    ({}, "messages", "missing"),
    ({"messages": HELLO, "temperature": -1}, "temperature", "at least 0"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature", "float"),
    ({"messages": HELLO, "temperature": True}, "temperature", "float"),
    ({"messages": HELLO, "n": 0}, "n", "at least 1"),
    ({"messages": HELLO, "n": 1.5}, "n", "int"),
    ({"messages": HELLO, "n": 10**30}, "n", "at most"),
    ({"messages": HELLO, "top_p": 0}, "top_p", "above 0"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens", ">= 1"),
    ({"messages": HELLO, "max_completion_tokens": -5}, "max_completion_tokens", ">= 1"),
    ({"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "one of them"),
    ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "logprobs=true"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20 at most here (--max"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "20 at most"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": -2}, "top_logprobs", ">= -1"),
    ({"messages": HELLO, "prompt_logprobs": -1}, "prompt_logprobs", "20 at most"),
    ({"messages": HELLO, "logprob_token_ids": [1]}, "logprob_token_ids", "needs logprobs"),
    ({"messages": HELLO, "logprobs": True, "logprob_token_ids": list(range(129))}, "logprob_token_ids", "at most 128"),
    ({"messages": HELLO, "logit_bias": {"x": 1, "5": 1, "y": 1}}, "logit_bias", "'x', 'y'"),
    ({"messages": HELLO, "temperature": 2.1}, "temperature", "<= 2"),
    ({"messages": HELLO, "stop": list("abcde")}, "stop", "length <= 4"),
    ({"messages": HELLO, "truncation_side": "middle"}, "truncation_side", "middle"),
    ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"messages": HELLO, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=true"),
    ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "length >= 1"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].image_url", "text only"),
    ({"messages": HELLO, "functions": [{"name": "f"}]}, "functions", "replaced it by tools"),
    ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", "missing"),
    ({"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "shema": {}}}},
     "response_format.json_schema.schema", "missing"),
    ({"messages": HELLO, "response_format": {"type": "text", "json_schema": {"name": "x"}}},
     "response_format", "does not"),
    ({"messages": HELLO, "structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"messages": HELLO, "structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"messages": HELLO, "structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "tags"),
    ({"messages": HELLO, "structured_outputs": {"regx": "a"}}, "structured_outputs", "exactly one"),
    ({"messages": HELLO, "guided_choice": []}, "guided_choice", "non-empty"),
    ({"messages": HELLO, "guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex", "give one"),
    ({"messages": HELLO, "guided_decoding_backend": "outlines"}, "guided_decoding_backend", "not supported"),
    ({"messages": HELLO, "audio": {"voice": "x"}}, "audio", "not supported"),
    ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not set messages"),
    ({"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
    ({"messages": HELLO, "continue_final_message": True}, "continue_final_message", "assistant"),
]  # fmt: skip
COMPLETIONS = [
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": ["a", 1]}, "prompt", "mixes"),
    ({"prompt": {"a": 1}}, "prompt", "got object"),
    ({"prompt": [-1]}, "prompt", "vocabulary"),
    ({"prompt": [2**40]}, "prompt", "vocabulary"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    ({"prompt": "a", "best_of": 2, "stream": True}, "best_of", "stream=true"),
    ({"prompt": "a", "best_of": 2, "n": 3}, "best_of", "at least 3"),
    ({"prompt": "a", "best_of": 0}, "best_of", ">= 1"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "20 at most"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "20 at most"),
    ({"prompt": "a", "logprob_token_ids": [1]}, "logprob_token_ids", "needs logprobs"),
    ({"prompt": "a", "logprob_token_ids": [1], "logprobs": 1, "max_tokens": 0, "echo": True}, "logprob_token_ids", "0"),
    ({"prompt": "a", "logprob_token_ids": [1], "logprobs": 1, "use_beam_search": True}, "logprob_token_ids", "beam"),
    ({"prompt": ["a" * 99] * 1020, "prompt_logprobs": 20}, "prompt_logprobs", "--max-answer-bytes"),
    ({"prompt": "a", "min_tokens": 20}, "min_tokens", "must not exceed"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [("chat/completions", *case) for case in CHAT] + [("completions", *case) for case in COMPLETIONS],
)
def test_a_bad_field_is_a_400_that_names_it(fake, path, body, param, text):
    status, error = post(fake.url, path, body)
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert text in error["message"]
    assert not fake.engine.calls


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"messages": NaN}', b'{"messages": [], "temperature": Infinity}',
     b'{"messages": [], "temperature": 1e999}', b'{"messages": []} trailing', b'{"tools": ' + b"[" * 100_000],
)  # fmt: skip
def test_a_body_that_is_not_a_json_object_is_a_400(fake, data):
    status, error = post(fake.url, "chat/completions", data)
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "field",
    [{"user": "u"}, {"metadata": {"a": "b"}}, {"store": True}, {"service_tier": "auto"}, {"prompt_cache_key": "k"},
     {"safety_identifier": "s"}, {"parallel_tool_calls": False}, {"tools": []}, {"tools": None},
     {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"modalities": ["text"]}, {"audio": None},
     {"stop": None}, {"n": None}],
    ids=str,
)  # fmt: skip
def test_fields_that_ask_for_nothing_are_accepted(fake, field):
    client = openai.OpenAI(base_url=f"{fake.url}/v1", api_key="x", max_retries=0)
    reply = client.chat.completions.create(model="fake", messages=HELLO, extra_body=field)
    assert reply.choices[0].message.content == "abc"


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "application/json", None])
def test_a_body_that_is_not_json_and_not_called_so_is_told_the_header(fake, kind):
    """JSON is read whatever curl calls it, so that its -d needs no -H; what curl's user needs is said once it fails."""
    headers = {"content-type": kind} if kind else {}
    reply = httpx.post(f"{fake.url}/v1/completions", content=b"prompt=Hello", headers=headers)
    assert reply.status_code == 400 and "not valid JSON" in reply.json()["error"]["message"]
    told = "-H 'content-type: application/json'" in reply.json()["error"]["message"]
    assert told == (kind == "application/x-www-form-urlencoded")


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("kind", [FORM, f"{FORM}; charset=utf-8", "application/json", "application/x+json", None])
def test_json_is_read_as_curl_sends_it(fake, kind):
    headers = {"content-type": kind} if kind else {}
    reply = httpx.post(f"{fake.url}/api/generate", content=b'{"model": "fake", "prompt": "Hi"}', headers=headers)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"content-type": "text/plain; charset=utf-8"},
        {"content-type": "TEXT/PLAIN"},
        {"content-type": "text/json"},
        {"content-type": "multipart/form-data"},
        {"content-type": FORM, "origin": "http://x.example"},
        {"origin": "http://x.example"},
        {"content-type": "", "origin": "http://x.example"},
    ],
)
def test_a_body_called_something_else_or_sent_by_a_page_is_a_415_that_names_the_header(fake, extra):
    headers = {"content-type": "text/plain"} | extra
    reply = httpx.post(f"{fake.url}/v1/completions", content=b'{"prompt": "Hello"}', headers=headers)
    assert reply.status_code == 415 and "-H 'content-type: application/json'" in reply.json()["error"]["message"]


@pytest.mark.parametrize("version", ["9.9", "0.9", "2.0"])
def test_an_http_version_that_is_not_spoken_is_a_505(fake, version):
    port = int(fake.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"GET /health HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        data = b"".join(iter(lambda: client.recv(65536), b""))
    assert data.startswith(b"HTTP/1.1 505 ") and b"http_version_not_supported" in data
    assert data.count(b"HTTP/1.1") == 2, "the status line and what is spoken: one answer, then the end"


def test_an_unknown_model_is_a_404_that_names_those_served(fake):
    client = openai.OpenAI(base_url=f"{fake.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="fakr", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert 'Did you mean "fake"?' in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_prompt_over_the_context_is_a_400_with_both_numbers(fake):
    status, error = post(fake.url, "completions", {"prompt": "x" * 150})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "150" in error["message"] and "100" in error["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_that_no_prompt_leaves_room_for_is_a_400(fake, name):
    path, asks = ("chat/completions", {"messages": HELLO}) if "completion" in name else ("completions", {"prompt": "x"})
    status, error = post(fake.url, path, {**asks, name: 101})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", name)
    assert "101" in error["message"] and "100" in error["message"]


@pytest.mark.parametrize("max_tokens", [60, 61, 100])
def test_a_limit_beyond_what_the_prompt_leaves_is_served(fake, max_tokens):
    reply = httpx.post(f"{fake.url}/v1/completions", json={"prompt": "x" * 40, "max_tokens": max_tokens})
    assert reply.status_code == 200


def test_a_wrong_path_names_the_right_one(fake):
    for method, path in (("POST", "/chat/completion"), ("POST", "/v1/chat/completion"), ("GET", "/nothing")):
        reply = httpx.request(method, fake.url + path)
        assert reply.status_code == 404
        assert reply.json()["error"]["type"] == "not_found_error"
        assert "/v1/chat/completions" in reply.json()["error"]["message"]


def test_a_wrong_method_is_a_405(fake):
    reply = httpx.get(f"{fake.url}/v1/chat/completions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert "POST" in reply.json()["error"]["message"]


def test_a_body_over_the_limit_is_a_413(fake_engine, serving):
    def chunks():
        yield from [b"x" * 600] * 3

    with serving(fake_engine, max_body_bytes=1000) as url:
        for content in (b"x" * 1001, chunks()):
            reply = httpx.post(f"{url}/v1/completions", content=content)
            assert reply.status_code == 413
            assert "1000 bytes" in reply.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200


def test_an_api_key_guards_v1_and_nothing_else(fake_engine, serving):
    with serving(fake_engine, api_keys=["secret"]) as url:
        for key in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            reply = httpx.get(f"{url}/v1/models", headers=key)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


def test_an_exception_in_the_engine_is_a_500_without_its_text_and_the_server_goes_on(fake):
    fake.engine.script = [RuntimeError("secret detail")]
    for stream in (False, True):
        status, error = post(fake.url, "completions", {"prompt": "x", "stream": stream})
        assert (status, error["type"], error["code"]) == (500, "server_error", "internal_error")
        assert "secret" not in json.dumps(error)
    fake.engine.script = ["a"]
    assert httpx.post(f"{fake.url}/v1/completions", json={"prompt": "x"}).status_code == 200


def test_an_exception_in_the_middle_of_a_stream_is_an_error_event(fake):
    fake.engine.script = ["a", RuntimeError("secret detail")]
    client = openai.OpenAI(base_url=f"{fake.url}/v1", api_key="x", max_retries=0)
    got = []
    with pytest.raises(openai.APIError) as caught:
        for chunk in client.chat.completions.create(model="fake", messages=HELLO, stream=True):
            got.append(chunk.choices[0].delta.content)
    assert got == ["", "a"]
    assert "internal error" in caught.value.message and "secret" not in caught.value.message


def test_a_client_that_leaves_ends_its_request(fake, eventually):
    gate = threading.Event()
    fake.engine.script = ["a", gate, "b"]
    try:
        with httpx.stream("POST", f"{fake.url}/v1/completions", json={"prompt": "x", "stream": True}) as reply:
            assert next(reply.iter_lines()).startswith("data: ")
        eventually(lambda: fake.engine.num_open == 0)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{fake.url}/v1/completions", json={"prompt": "x"}, timeout=0.2)
        eventually(lambda: fake.engine.num_open == 0)
    finally:
        gate.set()
    assert fake.engine.num_closed_early == 2


def test_a_client_that_leaves_while_sending_its_body_is_no_error_of_ours(fake, caplog, eventually):
    port = int(fake.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    eventually(lambda: 'status="499"' in httpx.get(f"{fake.url}/metrics").text)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_stop_of_the_server_tells_running_streams(fake_engine, serving):
    gate = threading.Event()
    fake_engine.script = ["a", gate, "b"]
    lines = []

    def read():
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                started.set()

    started = threading.Event()
    with serving(fake_engine) as url:
        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(60)
    gate.set()
    reader.join(60)
    assert "shutting down" in lines[-4] and lines[-2] == "data: [DONE]"
    assert fake_engine.num_open == 0 and not fake_engine.is_running


def test_health_is_503_once_the_engine_has_died(fake):
    assert httpx.get(f"{fake.url}/health").status_code == 200
    fake.engine.is_running = False
    assert httpx.get(f"{fake.url}/health").status_code == 503


def test_priority_and_cache_salt_reach_the_engine(fake):
    httpx.post(f"{fake.url}/v1/completions", json={"prompt": "x", "priority": -3, "cache_salt": "s"})
    assert (fake.engine.calls[0].priority, fake.engine.calls[0].salt) == (-3, salted("", "s"))
