"""Servers of one engine count together what clients hold and use: a limit is the same however many there are."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from minivllm.serve import shared_ledger
from minivllm.serve.connections import ConnectionLimits, Connections
from minivllm.serve.ledger import Bucket, OwnLedger
from minivllm.serve.rate_limit import RateLimit, RateLimiter
from minivllm.serve.shared_ledger import BUCKETS, THINGS, SharedLedger

A_YEAR = 1 / (365 * 24 * 3600)  # of a request a second: none comes back while a test runs


@pytest.fixture
def servers(tmp_path):
    """A function: the views of so many servers, and their parent's."""

    def made(num_servers=2, num_rows=64):
        path = tmp_path / "ledger"
        shared_ledger.create(path, num_servers, num_rows)
        return [SharedLedger(path, number, num_servers, b"secret", num_rows) for number in [*range(num_servers), None]]

    return made


def complete(url, key="a", **fields):
    body = {"prompt": "x", "temperature": 1, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=20)


# ------------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("num_servers", [1, 3])
def test_several_views_together_are_what_one_ledger_would_be(servers, num_servers):
    *views, parent = servers(num_servers)
    one, rng, held = OwnLedger(), random.Random(1), Counter()
    for _ in range(3000):
        server, thing, client = rng.randrange(num_servers), rng.choice(THINGS), f"c{rng.randrange(40)}"
        mine = held[server, thing, client]
        number = rng.choice([1, 2, 5, -mine]) if mine else rng.choice([1, 2, 5])
        held[server, thing, client] += number
        for each in (one, views[server]):
            getattr(each, thing).add(client, number)
        which, bucket = rng.choice(BUCKETS), Bucket(rng.uniform(-5, 5), rng.uniform(1, 9))
        for each in (one, views[server]):
            getattr(each, which).put(client, bucket)
        for view in (*views, parent):
            seen, expected = getattr(view, thing), getattr(one, thing)
            assert seen.of(client) == expected.of(client)
            assert (seen.total(), seen.num_clients()) == (expected.total(), expected.num_clients())
            assert getattr(view, which).get(client) == bucket
            assert getattr(view, which).get("nobody") is None


def test_what_a_dead_server_held_is_forgotten_and_no_others(servers):
    one, two, parent = servers()
    for view in (one, two):
        for i, thing in enumerate(THINGS):
            getattr(view, thing).add("both", 2 + i)
    one.sequences.add("its own", 7)
    one.tokens.put("both", Bucket(-3.0, 5.0))
    parent.forget_server(0)
    for view in (one, two, parent):
        assert [getattr(view, thing).of("both") for thing in THINGS] == [2, 3, 4, 5]
        assert [getattr(view, thing).total() for thing in THINGS] == [2, 3, 4, 5]
        assert [getattr(view, thing).num_clients() for thing in THINGS] == [1, 1, 1, 1]
        assert view.sequences.of("its own") == 0
        assert view.tokens.get("both") == Bucket(-3.0, 5.0), "what was used stays used"


def test_where_rows_are_taken_those_that_hold_something_stay(servers):
    one, two, _ = servers(num_rows=20)
    one.sequences.add("holder", 3)
    for i in range(200):
        (one, two)[i % 2].requests.put(f"c{i}", Bucket(float(i), 1.0))
    assert two.sequences.of("holder") == 3 and two.sequences.num_clients() == 1
    assert two.requests.get("c199") == Bucket(199.0, 1.0) and two.requests.get("c0") is None
    for i in range(19):
        one.connections.add(f"open{i}", 1)
    two.sequences.add("no room", 5)
    assert two.sequences.of("no room") == 0
    one.connections.add("open0", -1)
    two.sequences.add("no room", 1)
    two.sequences.add("no room", -5)
    assert two.sequences.of("no room") == two.sequences.num_clients() - 1 == 0, "nothing is below zero"
    assert two.sequences.total() == 3


def test_those_seen_longest_ago_are_forgotten_first(servers, monkeypatch):
    now = [1.0]
    monkeypatch.setattr(shared_ledger.time, "monotonic", lambda: now[0])
    one, *_ = servers(num_rows=shared_ledger.SAMPLE)
    for i in range(shared_ledger.SAMPLE):
        now[0] += 1
        one.requests.put(f"c{i}", Bucket(1.0, 1.0))
    now[0] += 1
    one.requests.put("c0", Bucket(2.0, 1.0))
    one.requests.put("new", Bucket(3.0, 1.0))
    assert one.requests.get("c0") and one.requests.get("new") and one.requests.get("c1") is None


def test_two_clients_are_told_apart_by_a_secret(servers, tmp_path):
    one, *_ = servers()
    one.sequences.add("a", 1)
    stranger = SharedLedger(tmp_path / "ledger", 1, 2, b"another", 64)
    assert stranger.sequences.of("a") == 0


TAKES = """
import sys
from pathlib import Path
from minivllm.serve import shared_ledger
from minivllm.serve.rate_limit import RateLimit, RateLimiter
from minivllm.serve.shared_ledger import SharedLedger

shared_ledger.PATIENCE = 100.0  # nobody is stopped here, however long a core is away
number = int(sys.argv[2])
view = SharedLedger(Path(sys.argv[1]), number, 3, b"secret", 64)
limiter = RateLimiter(RateLimit(1e-9, 3000), buckets=view.requests)
sys.stdin.read()
taken = 0
for i in range(2000):
    taken += limiter.take("a") == 0
    with view.alone():
        if view.sequences.of("a") < 1500:
            view.sequences.add("a", 1)
print(taken, flush=True)
"""


def test_processes_that_take_at_once_take_together_what_there_is(servers, tmp_path):
    *_, parent = servers(3)
    command = [sys.executable, "-c", TAKES, str(tmp_path / "ledger")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(i)], **pipes) for i in range(3)]
    for process in processes:
        process.stdin.close()
    taken = [int(process.stdout.read()) for process in processes]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert sum(taken) == 3000 and parent.sequences.of("a") == parent.sequences.total() == 1500


def test_one_that_is_stopped_inside_holds_nobody_up_for_long(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_ledger, "PATIENCE", 0.0)
    one, *_ = servers()
    stopped = os.open(tmp_path / "ledger", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    one.sequences.add("a", 1)
    assert one.sequences.of("a") == 1
    os.close(stopped)
    with one.alone(), one.alone():
        other = os.open(tmp_path / "ledger", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


# ---------------------------------------------------------------------------------------------------------- limits


def test_a_clients_requests_are_limited_over_all_servers(servers):
    limiters = [RateLimiter(RateLimit(A_YEAR, 5), buckets=view.requests) for view in servers(3)[:3]]
    assert sum(limiters[i % 3].take("a") == 0 for i in range(30)) == 5
    assert limiters[0].take("b") == 0


def test_over_http_a_key_has_its_limit_once(fake_engine, serving, eventually, servers):
    """Two servers in this process, with the same secret, over an engine of each."""
    other_engine = type(fake_engine)()
    hold = threading.Event()
    fake_engine.script = other_engine.script = ["a", hold, "b"]
    one, two, _ = servers()
    options = {"sequence_limit": 3, "rate_limit": RateLimit(A_YEAR, 8), "token_limit": RateLimit(A_YEAR, 200)}
    options |= {"api_keys": ["a", "b"], "secret": b"of both"}
    with (
        serving(fake_engine, ledger=one, **options) as first,
        serving(other_engine, ledger=two, **options) as second,
        ThreadPoolExecutor(8) as pool,
    ):
        waiting = [pool.submit(complete, url, max_tokens=5, n=n) for url, n in ((first, 2), (second, 1))]
        eventually(lambda: (fake_engine.num_open, other_engine.num_open) == (1, 1))
        assert httpx.get(f"{first}/load").json() == httpx.get(f"{second}/load").json() == {"server_load": 3}
        refused = complete(second, max_tokens=5)
        assert refused.status_code == 429 and "3 of 3 sequences" in refused.json()["error"]["message"]
        assert refused.headers["x-ratelimit-remaining-requests"] == "5"
        assert refused.headers["x-ratelimit-remaining-tokens"] == str(200 - 11 - 6)
        hold.set()
        assert [reply.result().status_code for reply in waiting] == [200, 200]
        assert complete(second, max_tokens=5, n=3).status_code == 200, "what has ended is given back"
        statuses = [complete((first, second)[i % 2], max_tokens=1).status_code for i in range(8)]
        assert statuses == [200] * 4 + [429] * 4, "of eight requests four were left"
        assert complete(first, "b", max_tokens=5).status_code == 200
    assert one.sequences.total() == one.sequences.num_clients() == 0


def test_a_queue_that_others_have_filled_elsewhere_has_room_for_who_holds_less(
    fake_engine, serving, eventually, servers
):
    other_engine = type(fake_engine)()
    hold = threading.Event()
    fake_engine.script = other_engine.script = ["a", hold, "b"]
    one, two, _ = servers()
    options = {"max_waiting": 8, "api_keys": ["a", "b"], "secret": b"of both"}
    with (
        serving(fake_engine, ledger=one, **options) as first,
        serving(other_engine, ledger=two, **options) as second,
        ThreadPoolExecutor(20) as pool,
    ):
        flood = [pool.submit(complete, first) for _ in range(10)]
        eventually(lambda: fake_engine.num_open == 10)
        assert complete(second).status_code == 429, "its key fills the queue, if at another server"
        other = pool.submit(complete, second, "b")
        eventually(lambda: other_engine.num_open == 1)
        hold.set()
        assert [reply.result().status_code for reply in [*flood, other]] == [200] * 11


def test_connections_of_an_address_are_limited_over_all_servers(servers):
    one, two, _ = (Connections(ConnectionLimits(5, 3), held=view.connections) for view in servers())
    held = [one.take("1.1.1.1"), two.take("1.1.1.1"), two.take("1.1.1.1")]
    assert one.take("1.1.1.1") is None is two.take("1.1.1.1")
    held += [one.take("2.2.2.2"), two.take("2.2.2.2")]
    assert all(held) and one.is_full and two.is_full and one.waits_for_others
    held[1]()
    assert not one.is_full and one.take("1.1.1.1")


def test_a_server_that_is_full_because_of_another_takes_connections_once_that_has_room(fake_engine, serving, servers):
    one, two, _ = servers()
    two.connections.add("1.1.1.1", 2)
    url = serving(fake_engine, ledger=one, connection_limits=ConnectionLimits(2, 2))
    with url as at, socket.create_connection(("127.0.0.1", int(at.rpartition(":")[2])), 20) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        two.connections.add("1.1.1.1", -1)
        client.settimeout(20)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
