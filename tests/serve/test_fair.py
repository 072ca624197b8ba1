"""Several clients of one server: whose a request is, and what a flood of one leaves to the others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

from minivllm.serve.access import keys_of
from minivllm.serve.command import parser
from minivllm.serve.pooling import for_serving


def complete(url, key="", **fields):
    return httpx.post(f"{url}/v1/completions", json={"prompt": "x"} | fields, headers={"x-api-key": key}, timeout=20)


@pytest.fixture
def fair_engine(fake_engine, monkeypatch):
    scheduler = SimpleNamespace(max_num_seqs=2, policy="fair")
    config = SimpleNamespace(**vars(fake_engine.config) | {"scheduler": scheduler})
    monkeypatch.setattr(fake_engine, "config", config)
    return fake_engine


@pytest.mark.parametrize(
    "path, asked",
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_a_client_is_a_key_by_a_name_that_does_not_tell_it(fake_engine, serving, path, asked):
    with serving(fake_engine, api_keys=["one", "two"], isolate_keys=False) as url:
        for key in ("one", "two", "one"):
            assert httpx.post(url + path, json=asked, headers={"x-api-key": key}, timeout=20).status_code == 200
    first, second, again = (call.client for call in fake_engine.calls)
    assert first == again != second and len(first) == len(second) == 16 and "one" not in first


def test_without_keys_a_client_is_an_address(fake_engine, serving):
    with serving(fake_engine) as url:
        for forwarded in ("10.0.0.1", "10.0.0.2", "10.0.0.1", "not:an address"):
            headers = {"x-forwarded-for": forwarded}
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
    names = [call.client for call in fake_engine.calls]
    assert names[0] == names[2] and len(set(names)) in (1, 3)  # one, if the server believes no proxy


def options_of(*args):
    parsed = parser("serve").parse_args(args)
    return for_serving({"overrides": dict(given.split("=") for given in parsed.set)}, keys_of(parsed))["overrides"]


def test_several_keys_are_served_fairly_unless_it_is_said_otherwise():
    keys = ["--api-key", "one", "--api-key", "two"]
    assert options_of(*keys)["scheduler.policy"] == "fair"
    assert options_of(*keys, "--set", "scheduler.policy=fcfs")["scheduler.policy"] == "fcfs"
    assert "scheduler.policy" not in options_of("--api-key", "one", "--api-key", "one")
    assert "scheduler.policy" not in options_of()


@pytest.mark.parametrize("asked", [{"n": 1}, {"n": 4}])
def test_a_full_queue_has_room_for_a_client_with_less_than_its_part(fair_engine, serving, eventually, asked):
    hold = threading.Event()
    fair_engine.script = ["a", hold, "b"]
    with serving(fair_engine, max_waiting=8, api_keys=["a", "b"]) as url, ThreadPoolExecutor(20) as pool:
        flood = [pool.submit(complete, url, "a") for _ in range(10)]  # two run, eight wait
        eventually(lambda: fair_engine.num_open == 10)
        fair_engine.stats.num_waiting = 8
        assert complete(url, "a").status_code == 429
        other = pool.submit(complete, url, "b", temperature=1, **asked)
        eventually(lambda: fair_engine.num_open == 11)
        assert complete(url, "b", n=5, temperature=1).status_code == 429  # 4 or 1 and 5 are more than half of 10
        hold.set()
        assert [reply.result().status_code for reply in [*flood, other]] == [200] * 11


def test_a_request_that_an_empty_queue_could_not_hold_is_a_400_with_the_limit(fake_engine, serving):
    with serving(fake_engine, max_waiting=3) as url:
        reply = complete(url, n=6, temperature=1)
        assert reply.status_code == 400 and "places for 5 (--max-waiting)" in reply.json()["error"]["message"]
        assert complete(url, n=5, temperature=1).status_code == 200
