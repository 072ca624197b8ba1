"""What must not hurt: bytes that are no HTTP, bodies that are no requests, requests that ask for too much. Each gets a
4xx, or a closed connection where there is no request to answer; meanwhile and afterwards the server serves others.

Requests go over a raw socket, since a good client cannot send most of this.
"""

from __future__ import annotations

import json
import threading
import time
from typing import get_type_hints

import httpx
import pytest
from fire.wire import exchange, parse, read_all, request, served

from minivllm.serve import (
    llama_cpp_protocol,
    messages_protocol,
    ollama_protocol,
    protocol,
    responses_protocol,
    tokenize,
)

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]
PATIENCE = 5.0  # seconds, of the server
LONGEST_WAIT = 3.0  # seconds that nobody else may have to wait because of one of these, while the server is at work
MOST_WORK = 20.0  # seconds of a core
REFUSED = set(range(400, 500))
CLOSED = 0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loras")
    with served("--client-timeout", str(PATIENCE), "--max-num-seqs", "16", "--lora-dir", str(folder)) as server:
        yield server


@pytest.fixture(autouse=True)
def others_are_served_meanwhile(server):
    done, waits = threading.Event(), []

    def look():
        while not done.wait(0.1):
            begin, worked = time.monotonic(), server.cpu_seconds()
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            waits.append(min(time.monotonic() - begin, server.cpu_seconds() - worked))  # not while others had its core

    looker = threading.Thread(target=look)
    looker.start()
    yield
    done.set()
    looker.join()
    assert server.serves()
    assert max(waits, default=0.0) < LONGEST_WAIT


# ---------------------------------------------------------------------------------------- HTTP

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
CHUNKED, PAGE = b"transfer-encoding: chunked\r\n\r\n", b"origin: http://a\r\n"
GOOD = b'{"prompt": "x", "max_tokens": 1}'
HTTP = {
    "null bytes": b"\0" * 1000,
    "a TLS hello": bytes.fromhex("16030100a5010000a10303") + b"\x07" * 200,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nhost: x\r\n\r\n",
    "HTTP/0.9": b"GET /health HTTP/0.9\r\nhost: x\r\n\r\n",
    "no target": b"GET\r\n\r\n",
    "another protocol": b"GET / FTP/1.1\r\nhost: x\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nhost: x\r\nnonsense\r\n\r\n",
    "a space before the colon": b"GET /health HTTP/1.1\r\nhost : x\r\n\r\n",
    "a null byte in a header": b"GET /health HTTP/1.1\r\nhost: x\r\na: \0\r\n\r\n",
    "a bare line feed in a value": b"GET /health HTTP/1.1\r\nhost: x\r\na: b\x0bc\r\n\r\n",
    "not ASCII in a header's name": "GET /health HTTP/1.1\r\nhost: x\r\nü: 1\r\n\r\n".encode(),
    "an unknown method": b"FOO /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "CONNECT": b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "a long target": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "a path out of it": b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "a model out of it": b"GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "a null byte in the path": b"GET /v1/models/%00 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "a path of bad UTF-8": b"GET /v1/models/%ff%fe HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "a long header": b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"y" * 100_000 + b"\r\nconnection: close\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000 + b"connection: close\r\n\r\n",
    "two lengths": POST + b"content-length: 5\r\ncontent-length: 32\r\n\r\n" + GOOD,
    "a negative length": POST + b"content-length: -1\r\n\r\n" + GOOD,
    "a length with a sign": POST + b"content-length: +32\r\n\r\n" + GOOD,
    "a length in hexadecimal": POST + b"content-length: 0x20\r\n\r\n" + GOOD,
    "a length of 5,000 digits": POST + b"content-length: " + b"9" * 5000 + b"\r\n\r\n" + GOOD,
    "a length and chunks": POST + b"content-length: 32\r\n" + CHUNKED + b"20\r\n" + GOOD + b"\r\n0\r\n\r\n",
    "an unknown coding": POST + b"transfer-encoding: gzip\r\n\r\n" + GOOD,
    "a coding twice": POST + b"transfer-encoding: chunked, chunked\r\n\r\n20\r\n" + GOOD + b"\r\n0\r\n\r\n",
    "a chunk of no number": POST + CHUNKED + b"ZZ\r\n" + GOOD + b"\r\n0\r\n\r\n",
    "a chunk of a negative number": POST + CHUNKED + b"-1\r\n" + GOOD + b"\r\n0\r\n\r\n",
    "a chunk of 30 digits": POST + CHUNKED + b"" + b"f" * 30 + b"\r\n" + GOOD,
    "a chunk that is longer than it says": POST + CHUNKED + b"1\r\n" + GOOD + b"\r\n0\r\n\r\n",
    "a chunk's long extension": POST + CHUNKED + b"20;" + b"x" * 100_000 + b"\r\n" + GOOD,
    "trailers without end": POST + CHUNKED + b"0\r\n" + b"a: b\r\n" * 20_000,
    "64 MB": POST + b"content-length: 67108864\r\n\r\n" + b" " * 2**26,
    "64 MB in chunks": POST + CHUNKED + (b"100000\r\n" + b" " * 2**20 + b"\r\n") * 64,
    "gzip": POST + b"content-encoding: gzip\r\ncontent-length: 32\r\n\r\n" + GOOD,
    "a form": POST + b"content-type: multipart/form-data; boundary=x\r\ncontent-length: 32\r\n\r\n" + GOOD,
    "an image": POST + b"content-type: image/png\r\ncontent-length: 32\r\n\r\n" + GOOD,
    "text from a browser's page": POST + PAGE + b"content-type: text/plain\r\ncontent-length: 32\r\n\r\n" + GOOD,
    "no type from a browser's page": POST + PAGE + b"content-length: 32\r\n\r\n" + GOOD,
}  # fmt: skip


@pytest.mark.parametrize("data", HTTP.values(), ids=HTTP)
def test_bytes_that_are_no_good_request(server, data):
    answer = exchange(server.port, data)  # to the connection's end, which it waits for
    assert answer.status in REFUSED | {CLOSED, 505}  # a version of HTTP that is not spoken


@pytest.mark.parametrize("kind", ["", "application/json", "application/json; charset=utf-8",
                                  "application/x-www-form-urlencoded", "application/vnd.api+json"])  # fmt: skip
def test_what_tools_call_json_is_read(server, kind):
    header = f"content-type: {kind}\r\n".encode() if kind else b""
    assert exchange(server.port, POST + header + b"content-length: 32\r\n\r\n" + GOOD).status == 200


def test_a_page_may_send_text_without_being_asked_so_it_is_no_json(server):
    header = b"content-type: text/plain\r\ncontent-length: 32\r\n\r\n"
    assert exchange(server.port, POST + header + GOOD).status == 415


def test_a_bad_request_behind_a_good_one_is_answered_in_its_turn(server):
    good = request({"prompt": "x", "max_tokens": 1}).replace(b"connection: close\r\n", b"")
    import socket

    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(good + b"NONSENSE\r\n\r\n")
        data = read_all(client)
    assert parse(data).status == 200 and data.count(b"HTTP/1.1 400") == 1


# ---------------------------------------------------------------------------------------- JSON

DEEP, BELOW_THE_DECODERS_LIMIT = 100_000, 900


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


BODIES = {
    "nothing": b"",
    "half": b'{"prompt": "x"',
    "single quotes": b"{'prompt': 'x'}",
    "a comment": b'{"prompt": "x"} // x',
    "two": b'{"prompt": "x"}{"prompt": "x"}',
    "a list": b"[]",
    "null": b"null",
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "bad UTF-8": b'{"prompt": "\xff"}',
    "overlong UTF-8": b'{"prompt": "\xc0\x80"}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "half a surrogate pair": rb'{"prompt": "\ud800"}',
    "a raw null byte": b'{"prompt": "\0"}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "1e999": b'{"prompt": "x", "temperature": 1e999}',
    "nested lists": b'{"prompt": ' + b"[" * DEEP,
    "nested objects": b'{"prompt": "x", "guided_json": ' + nested(DEEP) + b"}",
    "a model of a megabyte": b'{"prompt": "x", "model": "' + b"a" * 10**6 + b'"}',
}


@pytest.mark.parametrize("data", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize(
    "path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES, "/tokenize", "/v1/load_lora_adapter", "/api/chat", "/completion"]
)
def test_a_body_that_is_no_request(server, path, data):
    answer = exchange(server.port, request(data, path))
    assert answer.status in REFUSED
    assert len(answer.body) < 10_000, "the error quotes all that was sent"


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_a_field_whose_name_is_a_megabyte_is_ignored_in_few_words(server, path):
    answer = exchange(server.port, request(b'{"prompt": "x", "' + b"a" * 10**6 + b'": 1}', path))
    assert answer.status == 200 and len(answer.body) < 10_000


NUMBERS = (2**63, 10**400, -1, 1e308, 5e-324)
OTHERS = ("\0", True, [], {"": None}, [[None]])
BASES = {
    COMPLETIONS: (protocol.CompletionRequest, {"prompt": "x", "max_tokens": 2}),
    CHAT: (protocol.ChatRequest, {"messages": HELLO, "max_tokens": 2}),
    RESPONSES: (responses_protocol.ResponsesRequest, {"input": "x", "max_output_tokens": 2}),
    MESSAGES: (messages_protocol.MessagesRequest, {"messages": HELLO, "max_tokens": 2}),
    "/v1/messages/count_tokens": (messages_protocol.CountTokensRequest, {"messages": HELLO}),
    "/tokenize": (tokenize.Tokenize, {"prompt": "x"}),
    "/detokenize": (tokenize.Detokenize, {"tokens": [1]}),
    "/api/chat": (ollama_protocol.OllamaChatRequest, {"messages": HELLO, "options": {"num_predict": 2}}),
    "/api/generate": (ollama_protocol.OllamaGenerateRequest, {"prompt": "x", "options": {"num_predict": 2}}),
    "/api/show": (ollama_protocol.OllamaShowRequest, {}),
    "/completion": (llama_cpp_protocol.LlamaCompletionRequest, {"prompt": "x", "n_predict": 2}),
    "/apply-template": (llama_cpp_protocol.TemplateRequest, {"messages": HELLO}),
    "/v1/load_lora_adapter": (protocol.LoadAdapter, {"lora_name": "a", "lora_path": "b"}),
    "/v1/unload_lora_adapter": (protocol.UnloadAdapter, {"lora_name": "a"}),
}


@pytest.mark.parametrize("path", BASES)
def test_every_field_with_every_odd_value_is_served_or_refused(server, path):
    kind, base = BASES[path]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for field in get_type_hints(kind):
            for value in NUMBERS + OTHERS:
                try:
                    body = json.dumps(base | {field: value})
                except ValueError:  # Python's limit on digits
                    continue
                reply = client.post(path, content=body)
                assert reply.status_code == 200 or reply.status_code in REFUSED, (field, str(value)[:50], reply.text)


@pytest.mark.parametrize("path", BASES)
def test_every_field_as_deep_as_json_may_be_is_served_or_refused(server, path):
    kind, base = BASES[path]
    for field in get_type_hints(kind):
        rest = json.dumps({name: value for name, value in base.items() if name != field})[1:-1]
        for depth in (200, BELOW_THE_DECODERS_LIMIT):
            data = f'{{"{field}": '.encode() + nested(depth) + (f", {rest}}}".encode() if rest else b"}")
            answer = exchange(server.port, request(data, path))
            assert answer.status == 200 or answer.status in REFUSED, (field, depth, answer.body[:300])


def tool(parameters) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def schema(value) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def deep_schema(depth: int) -> dict:
    made: dict = {"type": "string"}
    for _ in range(depth):
        made = {"type": "object", "properties": {"a": made}}
    return made


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
TOO_MUCH = {
    "10,000 stop strings": {"stop": [f"stop {i}" for i in range(10_000)]},
    "a stop string of 10 MB": {"stop": "x" * 10**7},
    "n of 10,000": {"n": 10_000},
    "best_of of 10,000": {"best_of": 10_000},
    "a bias for no token": {"logit_bias": {"10000000": 1}},
    "a bias that is none": {"logit_bias": {"5": 1e308}},
    "a bias for a word": {"logit_bias": {"x": 1}},
    "100,000 bad words": {"bad_words": [f"word {i}" for i in range(100_000)]},
    "a bad word of 10 MB": {"bad_words": ["x" * 10**7]},
    "3,000 prompts": {"prompt": ["x"] * 3000},
    "prompts times n": {"prompt": ["x"] * 100, "n": 100},
    "a million prompts": {"prompt": ["x"] * 10**6},
    "a prompt of 15 MB": {"prompt": "word " * 3 * 10**6},
    "a prompt of 3,000,000 tokens": {"prompt": [5] * 3 * 10**6},
    "nothing may follow": {"guided_choice": ["z"], "bad_words": ["z"]},
    "no token is allowed": {"allowed_token_ids": []},
    "a million token ids": {"allowed_token_ids": [2**31] * 10**6},
    "a length penalty that overflows": {"use_beam_search": True, "n": 2, "length_penalty": 1e308},
    "a length penalty that vanishes": {"use_beam_search": True, "n": 2, "length_penalty": -1e308},
    "100 beams": {"use_beam_search": True, "n": 100},
    "a repetition penalty that overflows": {"repetition_penalty": 1e-300, "temperature": 1},
    "a temperature that overflows": {"temperature": 1e300},
    "groups in groups": {"guided_regex": "(" * 8000 + "a" + ")" * 8000},
    "repetitions of repetitions": {"guided_regex": "(((((a{0,99}){0,99}){0,99}){0,99}){0,99}){0,99}"},
    "a long repetition": {"guided_regex": "a{1000000000}"},
    "a long regex": {"guided_regex": "(a|b)?" * 10_000},
    "a regex that is none": {"guided_regex": "[z-a]("},
    "groups in a grammar": {"guided_grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "a grammar of itself": {"guided_grammar": "root ::= root"},
    "a grammar without an end": {"guided_grammar": 'root ::= "a" root'},
    "a grammar that repeats": {"guided_grammar": 'root ::= (("a"{0,9999}){0,9999}){0,9999}'},
    "a schema as nested text": {"guided_json": "[" * 100_000},
    "a schema of nested text": {"guided_json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
    "a deep schema": {"guided_json": deep_schema(300)},
    "a schema without an instance": {"guided_json": {"$ref": "#"}},
    "many items": {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "a long string": {"guided_json": {"type": "string", "minLength": 10**9}},
    "references that double": {"guided_json": {"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2, "items": False}
           for i in range(40)}, "d40": {"type": "null"}}}},
    "1,500 optional properties": {"guided_json": {"type": "object", "properties": {
        f"p{i}": {"type": "integer"} for i in range(1500)}}},
    "a pattern that blows up": {"guided_json": {"type": "string", "pattern": "(.*a){30}(.*b){30}(.*c){30}"}},
    "100,000 choices": {"guided_choice": [f"choice {i}" for i in range(100_000)]},
    "two ways at once": {"guided_regex": "a", "guided_choice": ["a"]},
}  # fmt: skip
# These may be served too: they are large, not wrong. What counts is that nobody else waits for them.
MAY_BE_SERVED = {"a long regex", "a grammar without an end", "1,500 optional properties", "a pattern that blows up",
                 "many items", "a long string", "references that double", "groups in a grammar", "a long repetition",
                 "a grammar that repeats", "repetitions of repetitions", "a grammar of itself"}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_completion_that_asks_for_too_much(server, name):
    worked = server.cpu_seconds_of_all()
    answer = exchange(server.port, request({"prompt": "x", "max_tokens": 2} | TOO_MUCH[name]))
    assert answer.status in REFUSED or (answer.status == 200 and name in MAY_BE_SERVED), answer
    assert server.cpu_seconds_of_all() - worked < MOST_WORK


CHATS = {
    "no message": {"messages": []},
    "500,000 messages": {"messages": HELLO * 300_000},
    "100,000 parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]},
    "100,000 tools": {"tools": [tool({})] * 100_000},
    "a deep tool": {"tools": [tool(deep_schema(300))], "tool_choice": "required"},
    "deep arguments": {"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}, *HELLO]},
    "a bad tool": {"tools": [tool({"type": "strng"})], "tool_choice": "required"},
    "a template of one's own": {"chat_template": "{{ ''.__class__ }}"},
    "the template's messages": {"chat_template_kwargs": {"messages": []}},
    "the template's self": {"chat_template_kwargs": {"self": 1}},
    "a schema that is none": schema({"type": "strng"}),
    "a schema without an instance": schema(False),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_that_asks_for_too_much(server, name):
    worked = server.cpu_seconds_of_all()
    answer = exchange(server.port, request({"messages": HELLO, "max_tokens": 2} | CHATS[name], CHAT))
    assert answer.status in REFUSED, answer
    assert server.cpu_seconds_of_all() - worked < MOST_WORK


@pytest.mark.parametrize("kwargs", [{"raise_exception": 1}, {"range": 5}, {"loop": 1}, {"strftime_now": "x"},
                                    {"__class__": 1}, {"a b": 1}, {"bos_token": [1]}, {"tools": 1}, {"message": {}},
                                    {"x": "y" * 10**6}, {"true": 0}, {"namespace": 1}, {"": 1}], ids=str)  # fmt: skip
def test_variables_of_a_template_that_it_does_not_expect(server, kwargs):
    body = {"messages": HELLO, "max_tokens": 2, "chat_template_kwargs": kwargs}
    answer = exchange(server.port, request(body, CHAT))
    assert answer.status == 200 or answer.status in REFUSED, answer


@pytest.mark.parametrize("content", ["{{ ''.__class__.__mro__ }}", "{% for i in range(9**9) %}{% endfor %}",
                                     "{{ 9**9**9 }}", "\0", "<|im_end|>", "{% raw %}"], ids=repr)  # fmt: skip
def test_a_message_is_text_for_a_template_and_never_a_template(server, content):
    plain = server.post(CHAT, messages=HELLO, max_tokens=1).json()["usage"]["prompt_tokens"]
    reply = server.post(CHAT, messages=[{"role": "user", "content": content}], max_tokens=1)
    assert reply.status_code == 200
    assert reply.json()["usage"]["prompt_tokens"] < plain + 3 * len(content)
