"""Whose pages may use the server: names that a foreign page could have given it (DNS rebinding), and foreign pages."""

from __future__ import annotations

import httpx
import pytest
from serve.test_lifecycle import Process

from minivllm.serve import hosts

EVIL = {"host": "evil.example:8201", "origin": "http://evil.example:8201"}


def names(*given, host="127.0.0.1", bound="127.0.0.1"):
    return hosts.names(given, host, bound)


@pytest.fixture(scope="module")
def started():
    """As anybody starts it, with nothing but a model."""
    process = Process("--set", "kv.num_blocks=64")
    yield process.wait_ready()
    process.end()


@pytest.fixture(scope="module")
def one_server_of_names():
    from serve.conftest import FakeEngine, serving

    with serving(FakeEngine(), host_names=names("LLM.Example.org.", "*.pages.example", host="box")) as url:
        yield url


def test_a_page_that_rebinds_its_name_gets_nothing(started):
    """The review's M1. 200 before."""
    reply = httpx.post(f"{started}/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=EVIL)
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-host" in reply.json()["error"]["message"]
    for path in ("/", "/health", "/metrics", "/debug/live", "/v1/models", "/nothing"):
        assert httpx.get(started + path, headers=EVIL).status_code == 403, path
    assert httpx.post(f"{started}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_each_api_has_its_own_shape_of_the_refusal(one_server_of_names):
    for path in ("/v1/messages", "/api/chat"):
        told = httpx.post(one_server_of_names + path, json={}, headers=EVIL).json()
        assert "--allowed-host" in str(told["error"]) and told.keys() <= {"type", "error"}


OURS = (
    *("localhost", "localhost:8000", "LOCALHOST", "localhost.", "app.localhost:1", "127.0.0.1", "127.0.0.1:80"),
    *("[::1]", "[::1]:8000", "192.168.1.5:8000", "box", "llm.example.org", "llm.example.org:443", "Llm.Example.Org"),
    *("a.pages.example", "a.b.pages.example:80"),
)
NOT_OURS = (
    *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost", "x.llm.example.org", ""),
    *("pages.example", "evilpages.example", "[evil.example]", "[::1", "localhost:80:90", "localhost@evil.example"),
    *("127.0.0.1 evil.example", "a" * 5000 + ".example", "." * 5000, "*.pages.example.evil", "llm.example.org/"),
)


@pytest.mark.parametrize(("sent", "status"), [(h, 200) for h in OURS] + [(h, 403) for h in NOT_OURS])
def test_it_answers_to_localhost_addresses_and_what_it_was_named(one_server_of_names, sent, status):
    assert httpx.get(f"{one_server_of_names}/health", headers={"host": sent}).status_code == status


def test_what_it_answers_to_depends_on_where_it_listens():
    assert names() == {"127.0.0.1"} and names(host="box", bound="::1") == {"box"}
    assert names(bound="0.0.0.0") is None is names(bound="192.168.1.2"), "who can reach it needs no rebinding"
    assert names("a.example", bound="0.0.0.0") >= {"a.example"}, "but may be told names all the same"
    assert names(bound="") is None, "no browser opens a socket in the file system"
    assert names("*") is None and names("a", "*", bound="::") is None


@pytest.mark.parametrize("wrong", ["http://a.example", "a.example:80", "", "a b", "a..b", "*a.example", "a/", "[::1]"])
def test_a_name_has_no_scheme_and_no_port(wrong, capsys):
    with pytest.raises(SystemExit):
        names(wrong)
    assert "--allowed-host" in capsys.readouterr().err


# ---- pages of other sites

FOREIGN = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_takes_no_place_before_the_live_view(fake, site):
    headers = {"sec-fetch-site": site, "origin": "http://evil.example"}
    for path in ("/debug/live", "/debug/live?replica=0", "/debug/trace"):
        reply = httpx.get(fake.url + path, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "foreign_page")
    assert httpx.get(f"{fake.url}/health", headers=headers).status_code == 200


@pytest.mark.parametrize("site", ["same-origin", "none", ""])
def test_its_own_page_and_a_person_may_look(fake_engine, serving, site):
    with serving(fake_engine, debug_endpoints=True) as url:
        reply = httpx.get(f"{url}/debug/process", headers={"sec-fetch-site": site} if site else {})
        assert reply.status_code != 403


@pytest.mark.parametrize(("origins", "admitted"), [([], False), (["https://app.example"], True), (["*"], True)])
def test_a_named_origin_may_look_too(fake_engine, serving, origins, admitted):
    with serving(fake_engine, debug_endpoints=True, cors_origins=origins) as url:
        headers = FOREIGN | {"origin": "https://app.example"}
        assert (httpx.get(f"{url}/debug/process", headers=headers).status_code != 403) == admitted
        assert httpx.get(f"{url}/debug/process", headers=FOREIGN).status_code == 403  # an image has no origin
