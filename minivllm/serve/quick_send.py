"""The pieces of a stream, written as they come. h11 runs its state machine for each piece of a body and puts three byte
strings together, which takes longer than making the event; but between a chunked body's first piece and its end there
is nothing to decide. So those go straight to the transport, and h11 sees the beginning and the end: its bytes are the
same (tests/serve/test_quick_send.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from minivllm.serve.patience import PatientProtocol


class QuickProtocol(PatientProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        inner = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> Any:
            return await inner(scope, receive, self._quick(scope, send))

        self.app = app

    def _quick(self, scope: Scope, send: Send) -> Send:
        cycle, chunked = self.cycle, False

        async def quick(message: Message) -> None:
            nonlocal chunked
            if not (chunked and message.get("more_body")):
                await send(message)
                chunked = message["type"] == "http.response.start" and _is_chunked(scope, message)
                return
            if self.flow.write_paused and not cycle.disconnected:
                await self.flow.drain()
            gone = cycle.disconnected or self.transport.is_closing()  # the first is known a turn of the loop later
            if not gone and (body := message["body"]):
                self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

        return quick


def _is_chunked(scope: Scope, start: Message) -> bool:
    """Whether h11 sends the body of this answer in chunks: its length is not known, and the client knows chunks."""
    has_length = any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in start["headers"])
    no_body = scope["method"] == "HEAD" or start["status"] in (204, 304)
    return scope["http_version"] == "1.1" and not has_length and not no_body
