"""uvicorn on a socket that is ours, which stops at once and cleanly: running answers are told, the engine is closed.

uvicorn would wait for every stream to end by itself and then raise the signal again. Here SIGINT and SIGTERM resolve
`app.state.closing`, which ends each answer with a 503 or, in a stream, with an error event; an orderly stop exits
with 0. Who presses Ctrl-C again while that lasts gets the end at once, with 130: engine cores end with their parent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from minivllm.serve import off_loop
from minivllm.serve.connections import Acceptor, Connections
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
            http=QuickProtocol,  # on h11, the only one with a limit on headers: see serve/patience.py
            ws="none",  # nothing here speaks it
            log_config=None,
            access_log=False,  # serve/request_log.py
            timeout_graceful_shutdown=GRACE_SECONDS,
            server_header=False,
            proxy_headers=False,  # serve/proxies.py
            **tls,
        )
        super().__init__(config)
        self.app, self.on_ready, self.beside = app, on_ready, beside
        self._open = contextlib.AsyncExitStack()
        self._acceptors: list[Acceptor] = []
        self._interrupted: float | None = None

    def run_on(self, listener: socket.socket) -> int:
        """Serve until a signal; the exit code."""
        allow_many_connections()
        self.run(sockets=[listener])
        code = 0 if self.started else 1
        if threading.current_thread() is threading.main_thread():
            atexit.register(off_loop.leave, code)
        return code

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        sys.setswitchinterval(off_loop.SWITCH_SECONDS)
        try:
            await super().startup([])  # uvicorn accepts without limits
            self._acceptors = [self._accept(listener) for listener in sockets or []]
            for context in self.beside:
                await self._open.enter_async_context(context)
        except OSError:  # the address is taken after all
            await self.lifespan.shutdown()
            raise
        self.on_ready()

    def _accept(self, listener: socket.socket) -> Acceptor:
        config, state = self.config, self.app.state

        def protocol() -> QuickProtocol:
            return QuickProtocol(config=config, server_state=self.server_state, app_state=self.lifespan.state)

        limits, held = state.connection_limits.within_files(), state.ledger.connections
        connections = Connections(limits, state.proxies.trusts, held)
        return Acceptor(listener, connections, protocol, config.backlog, config.ssl, state.client_timeout)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.closing.set_result(None)
        await self._open.aclose()
        for acceptor in self._acceptors:
            acceptor.close()
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
