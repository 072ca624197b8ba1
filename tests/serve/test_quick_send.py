"""What is written past h11 is what h11 would have written, byte for byte."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import uvicorn
from uvicorn.server import ServerState

from minivllm.serve.patience import PatientProtocol
from minivllm.serve.quick_send import QuickProtocol


class Transport:
    def __init__(self):
        self.written, self.closed, self.num_writes = b"", False, 0

    def write(self, data):
        self.written += data
        self.num_writes += 1

    def get_extra_info(self, name):
        return None

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = close

    def pause_reading(self): ...
    def resume_reading(self): ...


PIECES = [b"data: a\n\n", b"", b"x" * 70_000, "data: ü\n\n".encode(), b"\r\n0\r\n\r\n"]


def answer_in(headers=(), status=200, last=b""):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        for piece in PIECES:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": last})

    return app


LENGTH = str(sum(map(len, PIECES))).encode()
CASES = {
    "a stream": (answer_in(), b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"),
    "a stream with a last piece": (answer_in(last=b"end"), b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"),
    "two requests on a connection": (answer_in(), b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2),
    "a connection to be closed": (answer_in(), b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"),
    "an old client": (answer_in(), b"GET / HTTP/1.0\r\n\r\n"),
    "a length that is known": (answer_in([(b"Content-Length", LENGTH)]), b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"),
    "no body": (answer_in(), b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n"),
}


async def written(kind, app, request) -> Transport:
    app.state = SimpleNamespace(client_timeout=60.0)
    config = uvicorn.Config(app, log_config=None)
    protocol, transport = kind(config, ServerState(), {}), Transport()
    protocol.connection_made(transport)
    protocol.data_received(request)
    while protocol.tasks:
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    return transport


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_bytes_are_those_of_h11(case):
    quick, plain = (asyncio.run(written(kind, *case)) for kind in (QuickProtocol, PatientProtocol))
    assert quick.written == plain.written and quick.closed == plain.closed
    assert len(plain.written) > 40


def test_a_client_that_has_left_is_written_nothing_more():
    async def run():
        gate = asyncio.Event()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await gate.wait()
            await send({"type": "http.response.body", "body": b"late", "more_body": True})

        app.state = SimpleNamespace(client_timeout=60.0)
        protocol, transport = QuickProtocol(uvicorn.Config(app, log_config=None), ServerState(), {}), Transport()
        protocol.connection_made(transport)
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0)
        protocol.connection_lost(None)
        gate.set()
        while protocol.tasks:
            await asyncio.sleep(0)
        return transport.written

    assert b"late" not in asyncio.run(run())


def test_nothing_is_written_once_the_transport_closes():
    """Between a write that failed and connection_lost there is a turn of the loop; asyncio warns of writes in it."""
    transports = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in range(9):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            if piece == 3:
                transports[0].close()

    async def run():
        app.state = SimpleNamespace(client_timeout=60.0)
        protocol = QuickProtocol(uvicorn.Config(app, log_config=None), ServerState(), {})
        transports.append(Transport())
        protocol.connection_made(transports[0])
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        protocol.connection_lost(None)
        return transports[0].written

    assert asyncio.run(run()).count(b"1\r\nx\r\n") == 4
