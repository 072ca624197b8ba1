"""Keys, CORS, TLS and limits: what keeps a server that others can reach usable."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from serve import certificates

from minivllm.serve import access, strict
from minivllm.serve.keys import Keys

HELLO = [{"role": "user", "content": "Hi"}]


def complete(url, **options):
    return httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=20, **options)


# ---- keys


def test_each_of_several_keys_opens_the_door_in_either_header(fake_engine, serving):
    with serving(fake_engine, api_keys=["one", "zwei ü"]) as url:
        for key in ("one", "zwei ü"):
            for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer {key}"}, {"x-api-key": key}):
                headers = {name: value.encode() for name, value in headers.items()}
                assert complete(url, headers=headers).status_code == 200
        wrong = ("", "on", "onee", "One", "one, zwei ü", "Bearer one")
        for headers in [{"x-api-key": key.encode()} for key in wrong] + [{}, {"authorization": "Basic one"}]:
            assert complete(url, headers=headers).status_code == 401
        # A wrong bearer token is wrong, whatever else is there.
        assert complete(url, headers={"authorization": "Bearer no", "x-api-key": "one"}).status_code == 401
        assert len(fake_engine.calls) == 6


def test_what_makes_the_server_work_needs_a_key_and_looking_at_it_does_not(fake_engine, serving):
    with serving(fake_engine, api_keys=["secret"]) as url:
        for path in ("/tokenize", "/detokenize", "/v1/completions", "/nothing"):
            assert httpx.post(url + path, json={}).status_code == 401
        assert httpx.get(f"{url}/v1/models").status_code == 401
        for path in ("/health", "/version", "/metrics", "/openapi.json"):
            assert httpx.get(url + path).status_code == 200


def test_keys_are_kept_as_hashes_and_all_compared():
    keys = Keys(["one", "two"])
    assert keys.accept(b"one") and keys.accept(b"two") and not keys.accept(b"") and not keys.accept(b"onetwo")
    hashes = [key.hash for key in keys._keys]
    assert b"one" not in b"".join(hashes) and len({len(h) for h in hashes}) == 1
    assert not Keys()


def test_a_key_file_has_a_key_a_line(tmp_path, capsys):
    path = tmp_path / "keys"
    path.write_text("# ours\none\n\n  two  \n")
    assert access.read_keys(path) == ["one", "two"]
    path.write_text("# nobody\n")
    for wrong in (path, tmp_path / "none"):  # else a slip would let everybody in
        with pytest.raises(SystemExit):
            access.read_keys(wrong)
    assert "holds no key" in capsys.readouterr().err


# ---- browsers


def test_pages_of_other_origins_are_kept_out_unless_they_are_named(fake_engine, serving):
    origin = {"origin": "https://app.example"}
    preflight = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with serving(fake_engine) as url:
        assert "access-control-allow-origin" not in complete(url, headers=origin).headers
        assert httpx.options(f"{url}/v1/completions", headers=preflight).status_code == 405
    with serving(fake_engine, cors_origins=["https://app.example"], api_keys=["k"]) as url:
        reply = httpx.options(f"{url}/v1/completions", headers=preflight)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "https://app.example")
        assert "authorization" in reply.headers["access-control-allow-headers"].lower()
        for headers, status in ((origin, 401), ({**origin, "x-api-key": "k"}, 200)):
            reply = complete(url, headers=headers)
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, "https://app.example")
        stranger = {"origin": "https://evil.example", "x-api-key": "k"}
        assert "access-control-allow-origin" not in complete(url, headers=stranger).headers


# ---- limits


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429_that_says_when_to_come_back(fake_engine, serving, eventually, stream):
    hold = threading.Event()
    fake_engine.script = ["a", hold, "b"]
    with serving(fake_engine, max_waiting=3) as url, ThreadPoolExecutor(8) as pool:
        running = [pool.submit(complete, url) for _ in range(5)]  # two in the batch, three waiting
        eventually(lambda: fake_engine.num_open == 5)
        body = {"messages": HELLO, "stream": stream}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20)
        assert reply.status_code == 429 and int(reply.headers["retry-after"]) > 0
        assert (reply.json()["error"]["type"], reply.json()["error"]["code"]) == ("rate_limit_error", "queue_full")
        reply = httpx.post(f"{url}/v1/messages", json={"messages": HELLO, "max_tokens": 5}, timeout=20)
        assert (reply.status_code, reply.json()["error"]["type"]) == (429, "rate_limit_error")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=3, timeout=20)
        retried = pool.submit(client.completions.create, model="fake", prompt="x")
        time.sleep(0.3)
        hold.set()
        assert [r.result().status_code for r in running] == [200] * 5
        assert retried.result().choices[0].text == "ab"
        assert complete(url).status_code == 200  # all places are free again


def test_what_the_engine_says_is_waiting_counts_too(fake_engine, serving):
    with serving(fake_engine, max_waiting=3) as url:
        fake_engine.stats.num_waiting = 3  # the KV cache is full, though the batch is not
        assert complete(url).status_code == 429
        fake_engine.stats.num_waiting = 2
        assert complete(url).status_code == 200


def test_places_are_given_back_however_a_request_ends(fake_engine, serving, eventually):
    with serving(fake_engine, max_waiting=0) as url:
        fake_engine.script = [RuntimeError("boom")]
        assert [complete(url).status_code for _ in range(4)] == [500] * 4
        fake_engine.script = ["a", threading.Event()]
        for _ in range(4):
            with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as reply:
                assert next(reply.iter_lines()) and fake_engine.num_open == 1
            eventually(lambda: fake_engine.num_open == 0)
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:  # waits for all of it
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 15\r\n\r\n")
                client.sendall(b'{"prompt": "x"}')
                eventually(lambda: fake_engine.num_open == 1)
            eventually(lambda: fake_engine.num_open == 0)
        fake_engine.script = ["a"]
        assert complete(url).status_code == 200


def test_a_header_bomb_is_a_4xx_and_the_server_goes_on(fake_engine, serving):
    with serving(fake_engine) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
            received = b""
            try:
                for i in range(2000):
                    sock.sendall(b"x-%d: %s\r\n" % (i, b"y" * 100))
                while data := sock.recv(1000):
                    received += data
            except (BrokenPipeError, ConnectionResetError):
                pass
        assert not received or received.startswith(b"HTTP/1.1 4")
        assert httpx.get(f"{url}/health", headers={"x-long": "y" * 10_000}).status_code == 200
        assert httpx.get(f"{url}/health", headers={"x-long": "y" * 2 * strict.MAX_HEADER_BYTES}).status_code == 431


# ---- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return certificates.make(tmp_path_factory.mktemp("tls"))


def test_https(fake_engine, serving, certificate):
    cert, key = certificate
    with serving(fake_engine, tls={"ssl_certfile": cert, "ssl_keyfile": key}) as url:
        assert url.startswith("https://")
        assert complete(url, verify=ssl.create_default_context(cafile=cert)).json()["choices"][0]["text"] == "abc"
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/health")


# ---- the command line


def refused(*args):
    done = subprocess.run(
        [sys.executable, "-m", "minivllm", "serve", "--port", "0", *map(str, args)],
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode != 0 and "Traceback" not in done.stderr and "Loading" not in done.stdout
    return done.stderr


def test_options_that_cannot_be_followed_end_it_before_the_model_is_loaded(certificate, tmp_path):
    cert, key = certificate
    other = tmp_path / "other.pem"
    other.write_text("no certificate")
    cases = [
        (["--ssl-keyfile", key], "needs --ssl-certfile"),
        (["--ssl-certfile", tmp_path / "none"], "no such file"),
        (["--ssl-certfile", other], "not a usable certificate"),
        (["--ssl-certfile", cert], "not a usable certificate"),  # its key is in another file
        (["--cors-origin", "example.org"], "scheme://host"),
        (["--api-key", ""], "empty"),
        (["--api-key-file", tmp_path / "none"], "No such file"),
        (["--max-waiting", -1], "at least 0"),
        (["--max-body-bytes", 0], "at least 1"),
        (["--rate-limit", "60"], "such as 60/min"),
        (["--rate-limit", "0/s"], "such as 60/min"),
        (["--rate-limit", "60/min", "--rate-burst", 0], "1 request at least"),
        (["--rate-burst", 5], "needs --rate-limit"),
        (["--token-limit", "100"], "--token-limit: a limit is a number"),
        (["--sequence-limit", 0], "at least 1"),
        (["--request-timeout", 0], "above 0"),
    ]
    with ThreadPoolExecutor(2) as pool:
        for (_, text), said in zip(cases, pool.map(lambda case: refused(*case[0]), cases), strict=True):
            assert text in said


@pytest.mark.parametrize(
    ("host", "keys", "tls", "word"),
    [("127.0.0.1", [], False, None), ("::1", [], False, None), ("0.0.0.0", [], True, "--api-key"),
     ("192.168.1.2", ["k"], False, "unencrypted"), ("::", ["k"], True, None), ("fe80::1%eth0", [], False, "--api-key")],
)  # fmt: skip
def test_an_address_that_others_can_reach_is_warned_of(host, keys, tls, word):
    warnings = access.warnings(host, keys, tls)
    assert [word in warning for warning in warnings] == ([True] if word else [])
