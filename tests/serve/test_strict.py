"""A request is read in one way or not at all: what a proxy might read otherwise is a 400, and the end."""

from __future__ import annotations

import contextlib
import logging
import socket

import h11
import pytest

from minivllm.serve import strict

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
BODY = b'{"prompt":\n \n\t"x"}'
CHUNKS = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
CLOSE = b"connection: close\r\n"

LAX = {
    "all lines end in LF": b"GET /health HTTP/1.1\nhost: localhost\n\n",
    "the request line": b"GET /health HTTP/1.1\nhost: localhost\r\n\r\n",
    "a header": GET + b"a: b\nc: d\r\n\r\n",
    "the last header": GET + b"a: b\n\r\n",
    "the end": GET + b"\n",
    "a second end behind": GET + b"a: b\n\nGET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a blank line before": b"\n" + GET + b"\r\n",
    "a fold with a space": GET + b"a: b\r\n c\r\n\r\n",
    "a fold with a tab": GET + b"a: b\r\n\tc\r\n\r\n",
    "a fold of the host": b"GET /health HTTP/1.1\r\nhost:\r\n localhost\r\n\r\n",
    "a fold of the length": POST + b"content-length:\r\n 17\r\n\r\n" + BODY,
    "a fold of nothing": GET + b"a: b\r\n \r\n\r\n",
    "the end of chunks": CHUNKED + CHUNKS + b"\n",
    "a trailer": CHUNKED + CHUNKS + b"a: b\nc: d\r\n\r\n",
    "a trailer's fold": CHUNKED + CHUNKS + b"a: b\r\n c\r\n\r\n",
    "a chunk's size": CHUNKED + CHUNKS.replace(b"\r\n", b"\n", 1) + b"\r\n",
}
GOOD = {
    "plain": GET + CLOSE + b"\r\n",
    "a body of lines": POST + CLOSE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY,
    "chunks": CHUNKED.replace(b"\r\n\r\n", b"\r\n" + CLOSE + b"\r\n") + CHUNKS + b"\r\n",
    "a trailer": CHUNKED.replace(b"\r\n\r\n", b"\r\n" + CLOSE + b"\r\n") + CHUNKS + b"a: b\r\n\r\n",
    "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
}


def exchange(url, *pieces) -> bytes:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 20) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for piece in pieces:
                client.sendall(piece)
            while received := client.recv(65536):
                data += received
        return data


@pytest.mark.parametrize("sent", LAX.values(), ids=LAX)
def test_a_bare_line_feed_and_a_folded_header_are_a_400(fake, sent):
    """Of the review's low findings. All but three of them were taken before."""
    answer = exchange(fake.url, sent)
    assert answer == strict.REFUSAL and b'"invalid_http"' in answer and fake.engine.calls == []


@pytest.mark.parametrize("sent", GOOD.values(), ids=GOOD)
def test_what_is_right_is_answered_however_it_is_cut(fake, sent):
    assert exchange(fake.url, sent).startswith(b"HTTP/1.1 200 ")
    assert exchange(fake.url, *(sent[i : i + 1] for i in range(len(sent)))).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("wrong", list(LAX)[:10])
def test_cut_anywhere_it_is_as_wrong_as_in_one_piece(wrong):
    sent = LAX[wrong]
    for cut in range(1, len(sent)):
        made = strict.connection(1 << 15)
        with pytest.raises(h11.RemoteProtocolError):
            for piece in (sent[:cut], sent[cut:]):
                made.receive_data(piece)
                while made.next_event() not in (h11.NEED_DATA, h11.PAUSED):
                    pass


def test_a_bad_request_behind_good_ones_is_refused_in_its_turn(fake):
    good = GET + b"\r\n"
    answer = exchange(fake.url, good * 3 + LAX["a fold with a tab"])
    assert answer.count(b"HTTP/1.1 200 ") == 3 and answer.endswith(strict.REFUSAL)


def test_a_body_that_goes_wrong_after_its_answer_ends_the_connection_without_a_traceback(fake_engine, serving, caplog):
    with serving(fake_engine, max_body_bytes=10) as url:
        answer = exchange(url, CHUNKED + CHUNKS[:-3], b"no size of a chunk\r\n")
        assert answer.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 "))
        assert exchange(url, GOOD["plain"]).startswith(b"HTTP/1.1 200 ")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
