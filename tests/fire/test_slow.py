"""Clients that send nothing, or slowly, or do not read: they are let go, and meanwhile others are served."""

from __future__ import annotations

import socket
import time

import pytest
from eventually import PATIENCE as LONGEST
from eventually import eventually
from fire.wire import LONG, parse, read_all, request, served

from minivllm.serve.off_loop import NUM_THREADS

PATIENCE = 1.5  # seconds
WHOLE = request({"prompt": "x", "max_tokens": 2})
HEAD, _, BODY = WHOLE.partition(b"\r\n\r\n")


@pytest.fixture(scope="module")
def server():
    with served("--client-timeout", str(PATIENCE), "--debug-endpoints") as server:
        assert server.serves()
        yield server


def connect(server, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    client.settimeout(LONGEST)
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", server.port))
    return client


def trickle(client: socket.socket, data: bytes, pause: float = 0.2) -> int:
    """A byte at a time, until the server has had enough. Returns how many it took: if not all, it did not wait."""
    assert len(data) * pause > 3 * PATIENCE, "all of it would come in time"
    for i in range(len(data)):
        try:
            client.sendall(data[i : i + 1])
        except (BrokenPipeError, ConnectionResetError):
            return i
        time.sleep(pause)
    return len(data)


@pytest.mark.parametrize("sent", [b"", b"G", HEAD[:30], HEAD + b"\r\n"], ids=["nothing", "a byte", "half", "no end"])
def test_a_connection_without_a_whole_header_is_closed(server, sent):
    begin = time.monotonic()
    with connect(server) as client:
        client.sendall(sent)
        assert server.serves()
        assert parse(read_all(client)).status == 0
        assert time.monotonic() - begin > PATIENCE / 2


def test_a_second_request_on_a_connection_has_no_more_time_than_the_first(server):
    with connect(server) as client:
        client.sendall(WHOLE.replace(b"connection: close\r\n", b""))
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert trickle(client, HEAD) < len(HEAD)


def test_a_header_that_trickles_in_is_not_waited_for(server):
    with connect(server) as client:
        assert trickle(client, HEAD) < len(HEAD)


@pytest.mark.parametrize("pause", [0.1, None], ids=["trickles", "stops"])
def test_a_body_that_does_not_come_is_a_408(server, pause):
    with connect(server) as client:
        client.sendall(HEAD + b"\r\n\r\n" + BODY[:5])
        if pause:
            for i in range(5, 10):
                client.sendall(BODY[i : i + 1])
                time.sleep(pause)
        answer = parse(read_all(client))
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert server.serves()


def test_the_rest_of_a_body_that_was_refused_is_not_waited_for(server):
    with connect(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{")
        assert client.recv(1000).startswith(b"HTTP/1.1 413")
        assert trickle(client, b"x" * 100) < 100


def test_a_large_body_may_take_longer_than_a_small_one(server):
    body = b'{"prompt": "x", "max_tokens": 2' + b" " * 400_000 + b"}"
    with connect(server) as client:
        begin = time.monotonic()
        for at in range(0, len(body), 40_000):
            client.sendall(request(body)[: -len(body)] * (at == 0) + body[at : at + 40_000])
            time.sleep(0.2)
        assert time.monotonic() - begin > PATIENCE
        assert parse(read_all(client)).status == 200


def is_as_before(state, before):
    """But for the threads that write long answers, which stay."""
    num_more = state["threads"] - before["threads"]
    return 0 <= num_more <= NUM_THREADS and state | {"threads": before["threads"]} == before


def test_answers_that_nobody_reads_hold_nothing(server):
    before = server.state()
    body = LONG | {"stream": True, "logprobs": 20, "max_tokens": 500}  # megabytes
    clients = [connect(server, receive_buffer=4096) for _ in range(8)]
    try:
        for i, client in enumerate(clients):
            client.sendall(request(body | {"stream": i % 2 == 0}))
        assert clients[0].recv(20).startswith(b"HTTP/1.1 200")
        assert server.serves()
        eventually(lambda: is_as_before(server.state(), before))
    finally:
        for client in clients:
            client.close()


def test_a_slow_reader_that_reads_gets_all_of_it(server):
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20}
    with connect(server, receive_buffer=4096) as client:
        client.sendall(request(body))
        begin, data = time.monotonic(), b""
        while piece := client.recv(20_000):
            data += piece
            time.sleep(0.05)
        assert time.monotonic() - begin > PATIENCE, "it was not slow"
    answer = parse(data)
    assert answer.whole and answer.error is None and answer.body.endswith(b"data: [DONE]\n\n")
