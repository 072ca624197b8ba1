"""How many connections are open, in all and of each address: each is an open file, and files run out.

In all         beyond --max-connections of all servers of an engine together (ledger.py), or as many as this process may
               have files, new ones wait in the kernel's queue
of an address  beyond --max-connections-per-address they are told so (429) and closed, so that no client takes the
               places of others; of IPv6 it is the /64. Trusted proxies, and who connects to a path, have no such limit
out of files   the system's, or all that we may have: accepting rests until one is closed, or for a while

asyncio's own accepting (3.11) knows no limit, and where files have run out it tries, and logs, 2,048 times at once,
each of which asks it to try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable
from typing import NamedTuple

from minivllm.serve import errors, strict
from minivllm.serve.ledger import Holdings, OwnHoldings
from minivllm.serve.patience import PatientProtocol
from minivllm.serve.rate_limit import client_of

MAX_CONNECTIONS = 8192
SHARE = 4  # an address may have a quarter of all places
SPARE_FILES = 64  # for all else that a server opens meanwhile
AT_ONCE = 64  # connections taken before the event loop does other things
REST_SECONDS = 1.0
LOOK_SECONDS = 0.1  # how often it is looked whether connections of other servers have ended
TELL_SECONDS = 60.0  # between two lines in the log of the same kind

logger = logging.getLogger("minivllm.serve")


class ConnectionLimits(NamedTuple):
    in_all: int = MAX_CONNECTIONS
    of_one: int = MAX_CONNECTIONS // SHARE
    here: int = MAX_CONNECTIONS  # of this process

    def within_files(self) -> ConnectionLimits:
        """Here, as many as this process may have files. An address keeps to its part of them."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self._replace(here=self.in_all)
        left = soft - len(os.listdir("/dev/fd"))
        most = max(1, left - min(SPARE_FILES, left // 2))
        if most >= self.in_all:
            return self._replace(here=self.in_all)
        logger.info("%d open files (ulimit -n) are room for %d connections", soft, most)
        return ConnectionLimits(self.in_all, min(self.of_one, max(1, most // SHARE)), most)


class Connections:
    """Those that are open. `on_room` is called whenever one has ended."""

    def __init__(
        self,
        limits: ConnectionLimits,
        is_exempt: Callable[[str], bool] = lambda address: False,
        held: Holdings | None = None,
    ):
        """is_exempt: addresses that may have all places. held: by all servers of the engine; None: this is the only
        one."""
        self.limits, self._is_exempt = limits, is_exempt
        self._held = OwnHoldings() if held is None else held
        self._number = 0  # of this process
        self.on_room: Callable[[], None] = lambda: None

    @property
    def is_full(self) -> bool:
        return self._number >= self.limits.here or self._held.total() >= self.limits.in_all

    @property
    def waits_for_others(self) -> bool:
        """Whether a connection that ends elsewhere makes room."""
        return self._number < min(self.limits.here, self._held.total())

    def take(self, address: str) -> Callable[[], None] | None:
        """What gives the place back, however often it is called. None: this address has too many."""
        client = client_of(address)
        with self._held.alone():
            if address and self._held.of(client) >= self.limits.of_one and not self._is_exempt(address):
                return None
            self._held.add(client, 1)
        self._number += 1
        is_held = True

        def give_back() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._number -= 1
                self._held.add(client, -1)
                self.on_room()

        return give_back


class Acceptor:
    """Takes the connections of a socket, as long as there is room."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        protocol: Callable[[], PatientProtocol],
        backlog: int,
        tls: ssl.SSLContext | None = None,
        tls_seconds: float = 60.0,
    ):
        """tls_seconds: for a handshake. Raises OSError if the address is taken after all."""
        self._listener, self._connections, self._protocol = listener, connections, protocol
        self._tls = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": tls_seconds}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task] = set()
        self._told: dict[str, float] = {}
        self._look: asyncio.TimerHandle | None = None
        self._is_accepting = self._is_closed = False
        listener.setblocking(False)
        listener.listen(backlog)
        connections.on_room = self._resume
        self._resume()

    def close(self) -> None:
        """The socket stays open: it belongs to who made it."""
        self._is_closed = True
        self._pause()
        for task in self._tasks:
            task.cancel()

    def _resume(self) -> None:
        if not (self._is_accepting or self._is_closed):
            self._is_accepting = True
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._listener)

    def _look_again(self) -> None:
        self._look = None
        self._resume()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if self._connections.is_full:
                self._pause()
                if self._connections.waits_for_others:
                    self._look = self._look or self._loop.call_later(LOOK_SECONDS, self._look_again)
                return self._tell("full", "%d connections are open (--max-connections): others wait", self._in_all)
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no files, no memory
                self._pause()
                self._loop.call_later(REST_SECONDS, self._resume)
                return self._tell("rest", "no connection can be taken for now: %s", error.strerror)
            self._admit(connection, peer[0] if isinstance(peer, tuple) else "")

    @property
    def _in_all(self) -> int:
        limits = self._connections.limits
        return min(limits.in_all, limits.here)

    def _admit(self, connection: socket.socket, address: str) -> None:
        if (give_back := self._connections.take(address)) is None:
            self._refuse(connection, address)
            return
        task = self._loop.create_task(self._connect(connection, give_back))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, connection: socket.socket, address: str) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            if not self._tls:
                connection.send(REFUSAL)
            connection.recv(strict.MAX_HEADER_BYTES)  # what is unread when it is closed would make the kernel reset it
        most = self._connections.limits.of_one
        self._tell("one", "%s has %d connections (--max-connections-per-address): no more of it", address, most)

    async def _connect(self, connection: socket.socket, give_back: Callable[[], None]) -> None:
        def protocol() -> PatientProtocol:
            made = self._protocol()
            made.on_lost = give_back
            return made

        try:
            await self._loop.connect_accepted_socket(protocol, connection, **self._tls)
        except BaseException as error:  # a handshake that failed, or the server's end
            give_back()
            if not isinstance(error, OSError):
                raise

    def _tell(self, kind: str, text: str, *values: object) -> None:
        now = self._loop.time()
        if now - self._told.get(kind, -TELL_SECONDS) >= TELL_SECONDS:
            self._told[kind] = now
            logger.warning(text, *values)


def _refusal() -> bytes:
    error = errors.ApiError(429, "your address has too many connections open; close some", "too_many_connections")
    body = errors.body(error)
    head = "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}retry-after: {errors.RETRY_SECONDS}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


REFUSAL = _refusal()
