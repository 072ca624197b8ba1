"""Many clients at once: a thousand short requests, two hundred that leave in the middle. In one process and in two."""

from __future__ import annotations

import asyncio
import socket

import pytest
from eventually import PATIENCE, eventually
from fire.wire import LONG, Answer, ask, leave_rudely, request, served

MIB = 2**20
PEOPLE, LEAVERS = 1000, 200


@pytest.fixture(scope="module", params=["inproc", "process"])
def server(request):
    from minivllm.serve.patience import allow_many_connections

    allow_many_connections()  # this process has as many
    options = ["--max-num-seqs", "128", "--dtype", "float32", "--debug-endpoints"]  # fp32: equal texts in any batch
    with served("--set", f"engine.core={request.param}", *options) as server:
        yield server


def body_of(i: int) -> dict:
    return {"prompt": [i % 90 + 5, i // 90 + 5, 7], "max_tokens": 3, "ignore_eos": True, "temperature": 0} | (
        {"stream": True} if i % 2 else {}
    )


def text_of(answer: Answer) -> str:
    return "".join(choice["text"] for event in answer.events or [] for choice in event["choices"])


async def crowd(port: int) -> list[Answer]:
    return await asyncio.gather(*(ask(port, body_of(i)) for i in range(PEOPLE)))


def test_a_thousand_at_once_are_all_answered_in_bounded_memory(server):
    answers = asyncio.run(crowd(server.port))
    assert {(answer.status, answer.whole) for answer in answers} == {(200, True)}
    streams = answers[1::2]
    assert all(answer.body.endswith(b"data: [DONE]\n\n") and answer.error is None for answer in streams)
    before = server.rss()
    again = asyncio.run(crowd(server.port))
    assert [text_of(answer) for answer in again[1::2]] == [text_of(answer) for answer in streams]
    assert {answer.status for answer in again} == {200}
    assert server.rss() - before < 64 * MIB  # what the first thousand needed is used again


def test_two_hundred_that_leave_leave_nothing(server):
    def leave_early():
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) for _ in range(LEAVERS)]
        for i, client in enumerate(clients):
            client.sendall(request(LONG | {"stream": i % 4 != 0}))
        for i, client in enumerate(clients):
            if i % 4 == 1 and i < 60:
                assert client.recv(64).startswith(b"HTTP/1.1 200")  # it has begun
        assert server.metric("num_requests_running") > 0
        for i, client in enumerate(clients):
            leave_rudely(client) if i % 3 else client.close()

    leave_early()
    eventually(lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0)
    assert server.serves()
    eventually(lambda: server.metric("kv_cache_usage_perc") == 0)
    before = server.state()  # what the first of everything makes, such as threads, is there by now
    assert (before["open_sequences"], before["known_requests"]) == (0, 0)
    leave_early()
    eventually(lambda: server.state() == before)
    assert server.serves()
