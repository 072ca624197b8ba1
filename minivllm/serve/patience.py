"""How long the server waits for a client, so that none holds a connection, a request or blocks for ever.

its header     whole within --client-timeout of the connection, or of its first byte on one that is kept alive
its body       that long, and a second more for each SLOWEST bytes that have come (a slow body is not a dead one)
the answer     unread for that long: the connection is cut, and with it goes the request
no sign of it  a client whose machine is gone sends nothing, not even an end: the kernel asks for one (keep-alive)
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable
from typing import cast

import h11
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from minivllm.serve import strict

SLOWEST = 16 * 2**10  # bytes of a body a second, once the first --client-timeout is over
SEND_BUFFER = 128 * 2**10  # bytes, of the kernel: by itself it takes megabytes for each client that does not read
MAX_FILES = 65_536  # connections are open files; a soft limit of 1,024 is common


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1. By itself it waits for ever: for a header, and for a reader."""

    on_lost: Callable[[], None] = staticmethod(lambda: None)  # called once the connection has ended

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.conn = strict.connection(strict.MAX_HEADER_BYTES)
        app = cast(Starlette, self.config.app)
        self._patience: float = app.state.client_timeout
        self._header_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        bound(transport.get_extra_info("socket"), self._patience)
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_header()

    def pause_writing(self) -> None:
        """The transport's buffer is full: the client does not read."""
        super().pause_writing()
        if self._reader_timer is None:
            self._reader_timer = self.loop.call_later(self._patience, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader_timer = _stop(self._reader_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._header_timer, self._reader_timer = _stop(self._header_timer), _stop(self._reader_timer)
        self.on_lost()

    def send_400_response(self, msg: str) -> None:
        """To what is no request; nothing to a body that goes wrong once its answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(strict.REFUSAL)
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Never: to what does not know another protocol, a request for it is one like any other (RFC 9110, 7.8).
        uvicorn writes two lines into the log."""
        return False

    def _expect_header(self) -> None:
        """What comes while no request is being answered is a header, or the rest of a body that nobody wants."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._header_timer = _stop(self._header_timer)
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self._patience, self.transport.abort)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def bound(connection: socket.socket | None, seconds: float) -> None:
    """Have the kernel keep little of what a client has not read, and end a TCP connection whose other end has not been
    heard of for about so many seconds."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    most = max(1, int(seconds))
    options = {"TCP_KEEPIDLE": max(1, most // 2), "TCP_KEEPINTVL": max(1, most // 6), "TCP_KEEPCNT": 3}
    options["TCP_USER_TIMEOUT"] = 1000 * most  # also of data that it does not take
    for name, value in options.items():  # those that this system has
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def allow_many_connections() -> None:
    """Raise the soft limit on open files as far as the hard one lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
