"""Rule: a request's memory is accounted from the first byte of its body to the last of its answer, by client and in
all."""

from __future__ import annotations

import http.client
import json
import random
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from eventually import PATIENCE, eventually

from minivllm.serve import app
from minivllm.serve.errors import ApiError
from minivllm.serve.ledger import OwnLedger
from minivllm.serve.memory import LIGHT, STEP, Memory

MIB = 2**20
LIMIT = 200_000  # bytes of a body


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_is_what_was_sent_and_nothing_afterwards(seed):
    draw, ledger, most = random.Random(seed), OwnLedger(), 8 * MIB
    clients = "abc"[: draw.randint(1, 3)]
    open_ones: list[tuple[str, Memory, int]] = []
    for _ in range(300):
        client = draw.choice(clients)
        memory, sent = Memory(ledger, client, most), 0
        if open_ones and draw.random() < 0.6:
            client, memory, sent = open_ones.pop(draw.randrange(len(open_ones)))
        if draw.random() < 0.2:
            memory.end()
            continue
        new = sent + draw.randint(1, MIB)
        try:
            memory.body(new)
            open_ones.append((client, memory, new))
        except ApiError as refusal:
            assert refusal.status == 429 and ledger.body_bytes.of(client) + MIB + STEP > most // len(clients)
            memory.end()
        held = {c: sum(size for of, _, size in open_ones if of == c and size > LIGHT) for c in clients}
        for c in clients:
            assert held[c] <= ledger.body_bytes.of(c) <= held[c] + STEP * len(open_ones)
        assert ledger.body_bytes.total() <= 2 * most  # a client's equal part aside
    for _, memory, _ in open_ones:
        memory.end()
    assert ledger.body_bytes.total() == ledger.body_bytes.num_clients() == 0


def test_unfinished_bodies_of_one_client_leave_room_for_others(fake_engine, serving, monkeypatch):
    monkeypatch.setattr(app, "MOST_BODIES", MIB)
    ledger = OwnLedger()
    body = json.dumps({"prompt": "x", "user": "u" * (LIMIT - 100)}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a\r\ncontent-length: {len(body)}\r\n\r\n"
    options = {"api_keys": ["a", "b"], "max_body_bytes": LIMIT, "ledger": ledger}
    with serving(fake_engine, **options) as url:
        place = urlsplit(url)
        clients = [socket.create_connection((place.hostname, place.port), timeout=PATIENCE) for _ in range(20)]
        for client in clients[:4]:
            client.sendall(head.encode() + body[:-10])
        eventually(lambda: ledger.body_bytes.total() == 4 * STEP)
        for client in clients[4:]:
            client.sendall(head.encode() + body[:-10])
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert answer.status == 429 and b"bodies_full" in answer.read()
        assert ledger.body_bytes.total() == 4 * STEP
        other = httpx.post(f"{url}/v1/completions", content=body, headers={"authorization": "Bearer b"}, timeout=20)
        assert other.status_code == 200
        clients[0].sendall(body[-10:])
        assert b" 200 " in clients[0].recv(65536).split(b"\r\n")[0]
        for client in clients:
            client.close()
        eventually(lambda: ledger.body_bytes.total() == 0)


def test_an_answer_that_is_not_read_is_held_as_long_as_it_is_there(fake_engine, serving):
    fake_engine.script, ledger = ["x" * 8 * MIB], OwnLedger()
    body = b'{"prompt": "x", "max_tokens": 3}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with serving(fake_engine, ledger=ledger) as url:
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(head + body)
            eventually(lambda: ledger.answer_bytes.total() >= 8 * MIB)
            assert ledger.sequences.total() == 0
        eventually(lambda: ledger.answer_bytes.total() == 0)
