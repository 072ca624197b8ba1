"""h11, less what it takes for the sake of old peers: lines that end in a bare LF, and values that go on in the next
line (obs-fold). RFC 9112 lets a server refuse both (2.2, 5.2), and a proxy before it may read them in another way: then
the two see different requests (smuggling). A bare CR, NUL and space before a colon h11 refuses by itself.

h11 reads the lines of a header, and of what may follow a chunked body, by one method of its buffer, and hides how they
ended. So it is given a buffer that looks first; what is wrong in it h11 tells as it tells all that it does not take.
"""

from __future__ import annotations

import h11
from h11._receivebuffer import ReceiveBuffer

from minivllm.serve import errors

MAX_HEADER_BYTES = 32 * 2**10
END = b"\r\n\r\n"
WRONG = "this is no request of HTTP/1.1: a line ends in CR and LF, and no header goes on in the next one"


def _refusal() -> bytes:
    body = errors.body(errors.ApiError(400, WRONG, "invalid_http"))
    head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


REFUSAL = _refusal()


class StrictBuffer(ReceiveBuffer):
    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Raises LocalProtocolError, which becomes the peer's error (h11.Connection.next_event)."""
        if not self._data.startswith(b"\r\n"):  # which is the end of a header without lines
            end = self._data.find(END)
            refuse_lax(self._data if end < 0 else self._data[: end + len(END)])
        return super().maybe_extract_lines()


def refuse_lax(header: bytearray) -> None:
    """header: all of it, or as much as has come."""
    if header.count(b"\n") != header.count(b"\r\n"):
        raise h11.LocalProtocolError("a line ends in a bare line feed")
    if b"\n " in header or b"\n\t" in header:
        raise h11.LocalProtocolError("a header goes on in the next line")


def connection(max_header_bytes: int) -> h11.Connection:
    """A server's."""
    made = h11.Connection(h11.SERVER, max_header_bytes)
    made._receive_buffer = StrictBuffer()
    return made
