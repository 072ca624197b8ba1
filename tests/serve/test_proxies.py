"""Who is asking: what X-Forwarded-For says counts from a trusted proxy alone, and is an address or nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import contextmanager

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.engine.metrics import Metrics
from minivllm.serve import access, command, unix_socket
from minivllm.serve.app import create_app
from minivllm.serve.proxies import MOST_HOPS, Forwarded, TrustedProxies, address_of
from minivllm.serve.rate_limit import RateLimit
from minivllm.serve.server import Server

ONCE = RateLimit(1e-9, 1)  # a request of each client, ever


def complete(url, *forwarded, **options):
    headers = [("x-forwarded-for", value) for value in forwarded]
    return httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=headers, timeout=20, **options)


@pytest.fixture
def clients(caplog):
    """Whom the log names."""
    caplog.set_level(logging.INFO, "minivllm.serve.requests")
    return lambda: [record.fields["client"] for record in caplog.records if hasattr(record, "fields")]


@pytest.mark.parametrize("environment", [{}, {"FORWARDED_ALLOW_IPS": "*"}], ids=["plain", "environment"])
def test_without_a_trusted_proxy_nobody_says_for_whom_they_ask(fake_engine, serving, monkeypatch, clients, environment):
    """The review's M2: a new address each time was a new limit each time, and any text stood in the log."""
    for name, value in environment.items():
        monkeypatch.setitem(os.environ, name, value)
    with serving(fake_engine, rate_limit=ONCE) as url:
        told = [complete(url, sent).status_code for sent in ("10.0.0.1", "10.0.0.2", "x:y", "id cmpl-forged")]
        assert told == [200, 429, 429, 429]
    assert set(clients()) == {"127.0.0.1"}


def test_a_trusted_proxy_says_for_whom_it_asks(fake_engine, serving, clients):
    with serving(fake_engine, rate_limit=ONCE, proxies=TrustedProxies(["127.0.0.0/8", "10.0.0.0/8"])) as url:
        for sent in (["192.0.2.1"], ["192.0.2.2:4711"], ["[2001:db8::1]:443"], ["9.9.9.9, 192.0.2.3, 10.1.2.3"]):
            assert complete(url, *sent).status_code == 200
            assert complete(url, *sent).status_code == 429, "the same client once more"
        assert complete(url, "1.1.1.1, 192.0.2.3").status_code == 429, "left of a client anything may stand"
        assert complete(url, "5.5.5.5", "192.0.2.4").status_code == 200  # two headers are one list
        assert complete(url).status_code == 200  # the proxy itself
        for nonsense in ("x:y", "id cmpl-forged", "unknown", "", ",", "1.2.3", "[", "[x]:80", "1.1.1.1.1"):
            assert complete(url, nonsense).status_code == 429, "nobody: the proxy itself, which has asked"
    told = ["192.0.2.1", "192.0.2.2", "2001:db8::1", "192.0.2.3"]
    assert set(clients()) == {*told, "192.0.2.4", "127.0.0.1"}


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "client"),
    [
        ([], "10.0.0.1", "1.1.1.1", "10.0.0.1"),
        (["10.0.0.1"], "10.0.0.2", "1.1.1.1", "10.0.0.2"),
        (["10.0.0.1"], "10.0.0.1", "1.1.1.1", "1.1.1.1"),
        (["10.0.0.1"], "::ffff:10.0.0.1", "::ffff:1.1.1.1", "1.1.1.1"),
        (["10.0.0.1"], "10.0.0.1", "6.6.6.6, 1.1.1.1", "1.1.1.1"),
        (["10.0.0.0/8"], "10.0.0.1", "6.6.6.6, 1.1.1.1, 10.9.9.9", "1.1.1.1"),
        (["10.0.0.0/8"], "10.0.0.1", "10.0.0.5, 10.0.0.6", "10.0.0.5"),
        (["10.0.0.0/8"], "10.0.0.1", "1.1.1.1, junk, 10.0.0.6", "10.0.0.6"),
        (["fe80::/10"], "fe80::1%eth0", "2001:db8::2%evil text", "2001:db8::2"),
        (["unix"], "", "1.1.1.1", "1.1.1.1"),
        (["unix"], "10.0.0.1", "1.1.1.1", "10.0.0.1"),
        (["10.0.0.1"], "", "1.1.1.1", ""),
        (["0.0.0.0/0"], "10.0.0.1", "2.2.2.2" + ",3.3.3.3" * 10_000, "3.3.3.3"),
    ],
)
def test_the_client_is_the_rightmost_address_that_is_no_trusted_proxys(trusted, peer, forwarded, client):
    assert TrustedProxies(trusted).client(peer, [forwarded]) == client
    assert len((",1.1.1.1" * 100).rsplit(",", MOST_HOPS)) == MOST_HOPS + 1, "what is looked at is bounded"


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=80) | st.from_regex(r"[0-9a-f:.\[\]%]{0,60}"))
def test_whatever_is_written_the_client_is_an_address(text):
    client = TrustedProxies(["10.0.0.0/8"]).client("10.0.0.1", [text])
    assert client == "10.0.0.1" or (address_of(client) is not None and client == str(address_of(client)))


@pytest.mark.parametrize(
    ("trusted", "wanted"), [("127.0.0.1", ["https", "https", "http", "http"]), ("::1", ["http"] * 4)]
)
def test_the_scheme_is_that_of_a_trusted_proxys_client(trusted, wanted):
    asked = []

    async def app(scope, receive, send):
        asked.append(scope["scheme"])

    for value in (b"https", b"http, HTTPS", b"javascript", b""):
        scope = {"type": "http", "client": ("127.0.0.1", 1), "scheme": "http"}
        scope["headers"] = [(b"x-forwarded-proto", value)]
        asyncio.run(Forwarded(app, TrustedProxies([trusted]))(scope, None, None))
    assert asked == wanted


@contextmanager
def on_a_path(path, engine, **options):
    ready = threading.Event()
    server = Server(create_app(engine, Metrics("fake"), ["fake"], **options), ready.set)
    listener = unix_socket.bind(path)
    thread = threading.Thread(target=server.run_on, args=(listener,))
    thread.start()
    assert ready.wait(60)
    try:
        yield httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost")
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()


@pytest.mark.parametrize(("trusted", "wanted"), [(["unix"], [200, 200, 429]), (["127.0.0.1"], [200, 429, 429])])
def test_a_socket_in_the_file_system_is_trusted_by_name_alone(tmp_path, fake_engine, trusted, wanted):
    proxies = TrustedProxies(trusted)
    with on_a_path(tmp_path / "s", fake_engine, rate_limit=ONCE, proxies=proxies) as client, client:
        told = [
            client.post("/v1/completions", json={"prompt": "x"}, headers={"x-forwarded-for": sent}).status_code
            for sent in ("1.1.1.1", "2.2.2.2", "2.2.2.2")
        ]
    assert told == wanted


def test_the_option_takes_addresses_networks_and_unix(capsys):
    parse = command.parser("serve").parse_args
    given_proxies = ["--trusted-proxy", "10.0.0.0/8", "--trusted-proxy", "::1", "--trusted-proxy", "unix"]
    proxies = access.app_options(parse(given_proxies))["proxies"]
    assert proxies.trusts("10.1.2.3") and proxies.trusts("::1") and proxies.trusts("") and not proxies.trusts("1.1.1.1")
    assert not access.app_options(parse([]))["proxies"]
    for wrong in ("localhost", "10.0.0.1/8", "*", "10.0.0.1:80", ""):
        with pytest.raises(SystemExit):
            access.app_options(parse(["--trusted-proxy", wrong]))
        assert "--trusted-proxy" in capsys.readouterr().err
