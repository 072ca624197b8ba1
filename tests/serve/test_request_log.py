"""Request ids and the log: one line a request, that tells enough and nothing of keys, prompts or answers."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import subprocess
import sys
import tempfile
import threading

import httpx
import pytest

from minivllm import logs

PROMPT, KEY = "a-secret-prompt", "a-secret-key"


@pytest.fixture
def lines(caplog, eventually):
    """The next `num` request lines: (text, fields)."""
    caplog.set_level(logging.INFO, logger="minivllm.serve.requests")

    def take(num=1):
        found = []

        def enough():
            found[:] = [(r.getMessage(), r.fields) for r in caplog.records if r.name == "minivllm.serve.requests"]
            return len(found) >= num

        eventually(enough)
        caplog.clear()
        assert len(found) == num
        return found

    return take


def complete(url, headers=None, **fields):
    body = {"prompt": PROMPT, **fields}
    return httpx.post(f"{url}/v1/completions?q=secret", json=body, headers=headers or {}, timeout=20)


def test_a_line_has_id_path_status_time_tokens_and_the_keys_name(fake_engine, serving, lines):
    with serving(fake_engine, api_keys=[KEY]) as url:
        for stream in (False, True):
            reply = complete(url, {"x-api-key": KEY, "x-request-id": "mine/1"}, stream=stream)
            assert reply.status_code == 200 and reply.headers.get_list("x-request-id") == ["mine/1"]
            ((text, fields),) = lines()
            answer = re.search(r"cmpl-\w+", reply.text)[0]
            seconds, name = fields.pop("seconds"), fields["key"]
            assert len(name) == 8 and name != hashlib.sha256(KEY.encode()).hexdigest()[:8], "a guess could be tried"
            assert seconds > 0
            assert fields == {
                "event": "http_request", "id": "mine/1", "answer": answer, "method": "POST", "path": "/v1/completions",
                "status": 200, "client": "127.0.0.1", "key": name,
                "tokens_in": len(PROMPT), "tokens_out": 3,
            }  # fmt: skip
            for part in ("POST /v1/completions 200", "15 tokens in, 3 out", "id mine/1", f"answer {answer}"):
                assert part in text
            assert "secret" not in text + json.dumps(fields)


def test_without_one_the_id_is_that_of_the_answer_or_a_new_one(fake, lines):
    reply = complete(fake.url)
    assert reply.headers["x-request-id"] == reply.json()["id"] == lines()[0][1]["id"]
    replies = [httpx.get(f"{fake.url}/health") for _ in range(2)]
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert ids == [fields["id"] for _, fields in lines(2)]
    assert len(set(ids)) == 2 and all(id.startswith("req-") for id in ids)


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "a;b", 'a"b', "ü"])
def test_an_id_that_is_none_is_replaced(fake, lines, given):
    reply = httpx.get(f"{fake.url}/health", headers={"x-request-id": given.encode()})
    assert reply.headers["x-request-id"].startswith("req-")
    assert lines()[0][1]["id"] == reply.headers["x-request-id"]


def test_what_was_refused_or_failed_has_an_id_and_a_line_too(fake_engine, serving, lines):
    with serving(fake_engine, api_keys=[KEY]) as url:
        reply = complete(url, {"x-api-key": "wrong", "x-request-id": "a"})
        assert (reply.status_code, reply.headers["x-request-id"]) == (401, "a")
        ((_, fields),) = lines()
        assert fields["status"] == 401 and "key" not in fields and "tokens_in" not in fields
        headers = {"x-api-key": KEY, "x-request-id": "b"}
        assert httpx.post(f"{url}/nothing%0aforged", headers=headers).headers["x-request-id"] == "b"
        assert lines()[0][1]["path"] == "/nothing%0aforged"
        fake_engine.script = [RuntimeError("boom")]
        reply = complete(url, headers)
        assert (reply.status_code, reply.headers["x-request-id"]) == (500, "b")
        assert (lines()[0][1]["status"], fields["event"]) == (500, "http_request")


def test_a_client_that_left_is_logged_with_the_tokens_it_got(fake_engine, serving, lines):
    fake_engine.script = ["a", "b", threading.Event()]
    with serving(fake_engine) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "xyz", "stream": True}) as reply:
            for line in reply.iter_lines():
                if '"b"' in line:
                    break
        ((_, fields),) = lines()
        assert (fields["tokens_in"], fields["tokens_out"]) == (3, 2)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_endpoint_that_generates_counts_its_tokens(fake, lines, path):
    message = [{"role": "user", "content": "Hi"}]
    given = {"input": "Hi"} if path.endswith("responses") else {"messages": message, "max_tokens": 9}
    assert httpx.post(fake.url + path, json=given, timeout=20).status_code == 200
    ((_, fields),) = lines()
    assert fields["tokens_in"] > 2 and fields["tokens_out"] == 3


# ---- JSON


def test_a_record_is_one_line_whatever_is_in_it():
    formatter = logs.JSONFormatter("engine")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("minivllm", logging.WARNING, "", 0, "a %s\nü", ("b",), sys.exc_info())
    line = formatter.format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert "ValueError: two\nlines" in found.pop("exception")
    assert found == {"level": "warning", "logger": "minivllm", "process": "engine", "message": "a b\nü"}


def test_a_server_that_logs_json_writes_nothing_else_to_standard_error():
    """Its engine core lives in a process of its own, which logs to the same place."""
    options = ["--log-format", "json", "--host", "0.0.0.0", "--set", "engine.core=process", "--set", "kv.num_blocks=64"]
    command = [sys.executable, "-m", "minivllm.serve", "--model", "dummy:tiny", "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:  # which is never full, as a pipe is that nobody reads
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            port = next(found[1] for line in server.stdout if (found := re.search(r"Ready in .*:(\d+)/v1", line)))
            complete(f"http://127.0.0.1:{port}", {"x-request-id": "mine"})
        finally:
            server.terminate()
            server.communicate(timeout=60)
        log.seek(0)
        records = [json.loads(line) for line in log]
    assert any(r["level"] == "warning" and "--api-key" in r["message"] for r in records)
    (request,) = [r for r in records if r.get("event") == "http_request"]
    assert (request["id"], request["status"], request["tokens_out"]) == ("mine", 200, 16)
    assert {"time", "level", "logger"} <= request.keys()


def test_the_engines_own_process_logs_as_it_is_told():
    code = "from minivllm import logs; import logging; logs.setup('json', process='engine'); logging.warning('hm')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stderr)["process"] == "engine"
