"""uvicorn on a socket that is ours, which stops at once and cleanly: running answers are told, the engine is closed.

uvicorn would wait for every stream to end by itself and then raise the signal again. Here SIGINT and SIGTERM resolve
`app.state.closing`, which ends each answer with a 503 or, in a stream, with an error event; an orderly stop exits
with 0. Who presses Ctrl-C again while that lasts gets the end at once, with 130: engine cores end with their parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from minivllm.serve.access import MAX_HEADER_BYTES
from minivllm.serve.patience import allow_many_connections
from minivllm.serve.quick_send import QuickProtocol

GRACE_SECONDS = 3
SAME_SECONDS = 0.5  # a wrapper that passes Ctrl-C on makes it come twice


class Server(uvicorn.Server):
    def __init__(
        self,
        app: Starlette,
        on_ready: Callable[[], None] = lambda: None,
        beside: Sequence[AbstractAsyncContextManager] = (),
        **tls: Path,
    ):
        """tls: ssl_certfile and ssl_keyfile, for HTTPS. beside: what is open as long as requests are taken; an OSError
        of theirs means that an address is taken."""
        config = uvicorn.Config(
            app,
            http=QuickProtocol,  # on h11, the only one with a limit on headers
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            access_log=False,  # serve/request_log.py
            timeout_graceful_shutdown=GRACE_SECONDS,
            server_header=False,
            **tls,
        )
        super().__init__(config)
        self.app, self.on_ready, self.beside = app, on_ready, beside
        self._open = contextlib.AsyncExitStack()
        self._interrupted: float | None = None

    def run_on(self, listener: socket.socket) -> int:
        """Serve until a signal; the exit code."""
        allow_many_connections()
        self.run(sockets=[listener])
        return 0 if self.started else 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
            for context in self.beside:
                await self._open.enter_async_context(context)
        except OSError:  # the address is taken after all
            await self.lifespan.shutdown()
            raise
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.closing.set_result(None)
        await self._open.aclose()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
            super().handle_exit(sig, frame)
        elif sig == signal.SIGINT and now - self._interrupted > SAME_SECONDS:
            os.write(2, b"interrupted\n")
            os._exit(130)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # where a test's server runs
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
