"""Connections are bounded, in all and of each address, and running out of files is quiet."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from serve import certificates

from minivllm.serve import access, command
from minivllm.serve.connections import MAX_CONNECTIONS, REFUSAL, Acceptor, Connections
from minivllm.serve.connections import ConnectionLimits as Most

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def connect(url, source="127.0.0.1"):
    """A connection; of 127.0.0.2 as of another machine."""
    try:
        return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 20, (source, 0))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        pytest.skip("this system has one loopback address")


def status(client) -> int:
    """Of a whole answer."""
    return int(read(client).split(b" ")[1])


def read(client) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):  # of a request that came after the refusal
        while piece := client.recv(65536):
            data += piece
    return data


def ask(url, source="127.0.0.1") -> int:
    with connect(url, source) as client:
        client.sendall(GET)
        return status(client)


def is_let_in(client) -> bool:
    """Whether a connection that sends nothing is held, and not refused. What is refused is told without a request."""
    client.settimeout(20)
    client.sendall(GET[:10])
    client.sendall(GET[10:])
    return status(client) == 200


def test_an_address_has_its_share_and_others_theirs(fake_engine, serving, eventually):
    with serving(fake_engine, connection_limits=Most(100, 3)) as url:
        idle = [connect(url) for _ in range(3)]
        assert ask(url, "127.0.0.2") == 200, "which is answered after those before it were taken"
        with connect(url) as fourth:
            data = read(fourth)
        assert data == REFUSAL and b"429 Too Many Requests" in data and b'"too_many_connections"' in data
        assert [ask(url, "127.0.0.2") for _ in range(20)] == [200] * 20
        idle.pop().close()
        eventually(lambda: ask(url) == 200)
        for one in idle:
            one.close()


def test_beyond_the_limit_in_all_the_next_waits_and_is_served_once_one_has_ended(fake_engine, serving, caplog):
    with serving(fake_engine, connection_limits=Most(2, 2)) as url:
        first, second = connect(url), connect(url, "127.0.0.2")
        waiting = [connect(url, "127.0.0.2") for _ in range(30)]
        for client in waiting:
            client.sendall(GET)
        first.sendall(GET)
        assert status(first) == 200, "those that have a place are served meanwhile"
        second.close()
        assert {status(client) for client in waiting} <= {200, 429} and ask(url) == 200
    told = [record for record in caplog.records if "--max-connections" in record.getMessage()]
    assert len({record.msg for record in told}) == len(told), "one line of each kind"


def test_a_trusted_proxy_may_have_all_places(fake_engine, serving):
    from minivllm.serve.proxies import TrustedProxies

    with serving(fake_engine, connection_limits=Most(100, 1), proxies=TrustedProxies(["127.0.0.1"])) as url:
        clients = [connect(url) for _ in range(20)]
        assert all(is_let_in(client) for client in clients)


def test_a_handshake_that_fails_gives_its_place_back(fake_engine, serving, tmp_path):
    cert, key = certificates.make(tmp_path)
    with serving(fake_engine, tls={"ssl_certfile": cert, "ssl_keyfile": key}, connection_limits=Most(2, 2)) as url:
        for _ in range(10):
            with connect(url) as client:
                client.sendall(b"no handshake at all\r\n\r\n" * 10)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1000):
                    pass
        assert httpx.get(f"{url}/health", verify=False, timeout=20).status_code == 200


def test_a_place_is_given_back_once():
    rooms = []
    connections = Connections(Most(3, 2), lambda address: address == "9.9.9.9")
    connections.on_room = lambda: rooms.append(1)
    one, two = connections.take("1.1.1.1"), connections.take("::ffff:1.1.1.1")
    assert connections.take("1.1.1.1") is None, "the same address, as IPv6 writes it"
    assert connections.take("") and connections.is_full
    for _ in range(3):
        one()
    assert len(rooms) == 1 and not connections.is_full and connections.take("1.1.1.1")
    two()
    assert [bool(connections.take("9.9.9.9")) for _ in range(5)] == [True] * 5 and connections._held.num_clients() == 3


def test_a_network_of_ipv6_is_one_client():
    connections = Connections(Most(10, 1))
    assert connections.take("2001:db8::1") and not connections.take("2001:db8::2") and connections.take("2001:db8:1::1")


# ---- out of files


class Exhausted:
    """A listener whose every connection needs a file that nobody has."""

    def __init__(self, number=errno.EMFILE):
        self.pair = socket.socketpair()
        self.pair[1].send(b"a connection waits")
        self.number, self.num_tries = number, 0

    def fileno(self):
        return self.pair[0].fileno()

    def setblocking(self, flag):
        pass

    listen = setblocking

    def accept(self):
        self.num_tries += 1
        raise OSError(self.number, "Too many open files")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_without_files_it_tries_once_says_so_once_and_rests(number, caplog):
    """The review's M7: asyncio itself tries 2,048 times at once, and logs each."""
    listener = Exhausted(number)

    async def main():
        acceptor = Acceptor(listener, Connections(Most()), lambda: None, 100)
        for _ in range(500):
            await asyncio.sleep(0)  # turns of the loop, which finds the socket readable in each
        assert listener.num_tries == 1
        acceptor._connections.take("1.1.1.1")()  # a connection has ended: there may be a file again
        for _ in range(500):
            await asyncio.sleep(0)
        assert listener.num_tries == 2
        acceptor.close()

    asyncio.run(main())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


HOG = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from serve.conftest import FakeEngine, serving
with serving(FakeEngine()) as url:
    print(url, flush=True)
    for line in sys.stdin:
        held = []
        try:
            while line == "take\\n":
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        print("done", flush=True)
        sys.stdin.readline()
        for file in held:
            os.close(file)
        print("done", flush=True)
        break
    sys.stdin.readline()
"""


def test_when_its_files_run_out_it_is_quiet_and_serves_again_afterwards():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOG], cwd=Path(__file__).parent.parent, **pipes) as process:

        def tell(word):
            process.stdin.write(f"{word}\n")
            process.stdin.flush()

        url = process.stdout.readline().strip()
        assert ask(url) == 200
        tell("take")
        assert process.stdout.readline() == "done\n"
        waiting = [connect(url) for _ in range(120)]
        tell("free")
        assert process.stdout.readline() == "done\n"
        for client in waiting[60:]:
            client.close()
        for client in waiting[:60]:
            client.sendall(GET)
        assert {status(client) for client in waiting[:60]} <= {200, 429} and ask(url, "127.0.0.2") == 200
        tell("end")
        process.stdin.close()
        told = process.stderr.read()
    assert process.returncode == 0
    assert told.count("Too many open files") <= 1 and len(told) < 2000, told[:5000]


def test_there_are_no_more_places_than_files(monkeypatch):
    def places(soft, limits):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
        monkeypatch.setattr("os.listdir", lambda _: ["open"] * 40)
        return limits.within_files()

    plain = Most()
    assert places(resource.RLIM_INFINITY, plain) == places(65536, plain) == Most(MAX_CONNECTIONS, MAX_CONNECTIONS // 4)
    found = [places(files, plain) for files in (1024, 64, 20)]
    assert found == [
        plain._replace(of_one=230, here=920),
        plain._replace(of_one=3, here=12),
        plain._replace(of_one=1, here=1),
    ]
    assert places(1024, Most(100, 50)) == Most(100, 50, 100)


# ---- the rest


def test_an_upgrade_to_another_protocol_is_not_taken_up_and_not_logged(fake, caplog):
    more = b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    with connect(fake.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n" + more + b"\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_by_default_nine_hundred_idle_clients_of_one_address_keep_no_other_out(fake_engine, serving):
    """Such as a proxy on this machine, or a benchmark."""
    limits = Most().within_files()
    number = min(900, limits.of_one - 1)
    with serving(fake_engine) as url:
        clients = [connect(url) for _ in range(number)]
        assert [ask(url) for _ in range(10)] == [200] * 10 and is_let_in(clients[-1])
        for client in clients:
            client.close()


def test_the_options_are_numbers_of_connections(capsys):
    parse = command.parser("serve").parse_args
    given = {
        (): Most(), ("--max-connections", "100"): Most(100, 25), ("--max-connections", "1"): Most(1, 1),
        ("--max-connections-per-address", "9"): Most(MAX_CONNECTIONS, 9),
    }  # fmt: skip
    for args, limits in given.items():
        assert access.app_options(parse(args))["connection_limits"] == limits
    for wrong in ("--max-connections", "--max-connections-per-address"):
        with pytest.raises(SystemExit):
            access.app_options(parse([wrong, "0"]))
        assert f"{wrong} 0: must be at least 1" in capsys.readouterr().err
