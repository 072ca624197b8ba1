"""--uds: a path belongs to one server, from before its model is loaded until it ends, and to nobody after that."""

from __future__ import annotations

import os
import socket
import stat
import threading

import httpx
import pytest

from minivllm.engine.metrics import Metrics
from minivllm.serve import command, unix_socket
from minivllm.serve.app import create_app
from minivllm.serve.rate_limit import RateLimit
from minivllm.serve.server import Server


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s"


def refused(path, capsys) -> str:
    with pytest.raises(SystemExit):
        unix_socket.bind(path)
    return capsys.readouterr().err


def test_a_server_answers_on_it_and_leaves_nothing_behind(path, fake_engine):
    ready = threading.Event()
    app = create_app(fake_engine, Metrics("fake"), ["fake"], rate_limit=RateLimit(1.0, 50))
    server, listener = Server(app, ready.set), unix_socket.bind(path)
    assert command.url_of(listener, tls=False) == f"http://unix:{path}:"
    thread = threading.Thread(target=server.run_on, args=(listener,))
    thread.start()
    try:
        assert ready.wait(60)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "fake"
            assert client.post("/v1/completions", json={"prompt": "a"}).json()["choices"][0]["text"] == "abc"
            with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as reply:
                assert reply.read().endswith(b"data: [DONE]\n\n")
    finally:
        server.should_exit = True
        thread.join(60)
    listener.close()
    assert not os.listdir(path.parent)


def test_a_path_is_taken_before_anybody_listens(path, capsys):
    with unix_socket.bind(path):
        assert "is in use" in refused(path, capsys)
    unix_socket.bind(path).close()


def test_what_a_killed_server_left_is_cleared_away(path):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    (path.parent / "s.lock").touch()
    assert path.exists()
    unix_socket.bind(path).close()
    assert not os.listdir(path.parent)


def test_a_path_where_another_program_listens_is_left_alone(path, capsys):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert "is in use" in refused(path, capsys)
        assert path.exists()


def test_a_file_that_is_no_socket_is_left_alone(path, capsys):
    path.write_text("mine")
    assert "no socket" in refused(path, capsys) and path.read_text() == "mine"
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(("where", "why"), [("no/such/s", "No such file"), ("x" * 200, "too long")])
def test_a_path_that_cannot_be_says_why(tmp_path, capsys, where, why):
    assert why in refused(tmp_path / where, capsys) and not os.listdir(tmp_path)


def test_the_umask_says_who_may_connect(path):
    before = os.umask(0o077)
    try:
        with unix_socket.bind(path):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    finally:
        os.umask(before)


@pytest.mark.parametrize("more", [["--port", "9"], ["--host", "0.0.0.0"], ["--api-servers", "2"]])
def test_what_does_not_go_with_it_is_refused(path, capsys, more):
    with pytest.raises(SystemExit):
        command.take_address(command.parser("serve").parse_args(["--uds", str(path), *more]))
    assert more[0] in capsys.readouterr().err and not path.exists()
