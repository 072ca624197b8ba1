"""Of how many values a body may consist. Decoding JSON is one call, which stops every thread until it is done: 16 MiB
of text take 30 ms, as much of `[],[],...` two seconds, most of them the garbage collector's. So what a body is made of
is counted before it is decoded, piece by piece, where other threads get their turn in between.

A body that has few of the characters between values has few values, wherever they stand; only where there are many are
those inside strings told from the others.
"""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.errors import BadRequest

MAX_PARTS = 2**19  # as many token ids; or as many messages as any endpoint takes (MAX_ITEMS), each in parts
PIECE = 2**16  # bytes

WEIGHTS = {b",": 1, b":": 4, b"[": 4, b"{": 4}  # fields, lists and objects are objects of Python's, and take longer


def check(data: bytes) -> None:
    """Raises BadRequest for JSON of too many parts."""
    if len(data) * max(WEIGHTS.values()) <= MAX_PARTS or _weight(data) <= MAX_PARTS:
        return
    weight = 0
    for outside in _outside_strings(data):
        weight += _weight(outside)
        if weight > MAX_PARTS:
            what = f"{MAX_PARTS:,} values at most, of which each field, list and object counts as five"
            raise BadRequest(f"the body has too many parts: {what}")


def _weight(data: bytes) -> int:
    return sum(weight * data.count(mark) for mark, weight in WEIGHTS.items())


def _outside_strings(data: bytes) -> Iterator[bytes]:
    """What of JSON stands in no string, in pieces."""
    begin, in_string = 0, False
    while begin < len(data):
        end = begin + PIECE
        piece = data[begin:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and end < len(data):  # what it escapes is in the next piece
            end -= 1
            piece = piece[:-1]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        begin = end
