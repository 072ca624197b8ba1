"""JSON in pieces, none of which takes long to make: encoding is one call, which stops every thread until it is done. An
answer with 20 log-probabilities of each of many tokens has hundreds of megabytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET, Struct

MOST = 2000  # values of a piece, or as many times as many characters as that of text
CHARS = 64
ATOMS = {int, float, bool, type(None), type(UNSET)}
PIECE = 2**18  # bytes, below which pieces are put together


def is_long(data: Any) -> bool:
    return weight(data) > MOST


def weight(data: Any) -> int:
    """How many values it is made of, text counting as more; above MOST, how many were seen until then."""
    count, left = 0, [data]
    while left and count <= MOST:
        value = left.pop()
        if isinstance(value, str):
            count += len(value) // CHARS
            continue
        if isinstance(value, Struct):
            value = msgspec.structs.astuple(value)
        elif isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, list | tuple):
            continue
        count += len(value)
        if count <= MOST:
            left += [inner for inner in value if type(inner) not in ATOMS]
    return count


def encode(data: Any) -> list[bytes]:
    """What msgspec.json.encode makes, in pieces."""
    made: list[bytes] = []
    waiting: list[bytes] = []
    size = 0
    for piece in _pieces(data):
        waiting.append(piece)
        size += len(piece)
        if size >= PIECE:
            made.append(b"".join(waiting))
            waiting, size = [], 0
    return [*made, b"".join(waiting)]


def _pieces(data: Any) -> Iterator[bytes]:
    if isinstance(data, list | tuple) and is_long(data):
        return _list(data)
    if isinstance(data, dict) and is_long(data):
        return _object([(_key(key), value) for key, value in data.items()])
    if isinstance(data, Struct) and _is_plain(data) and is_long(data):
        fields = ((field.encode_name, getattr(data, field.name)) for field in msgspec.structs.fields(data))
        return _object([(_key(name), value) for name, value in fields if value is not UNSET])
    return iter((msgspec.json.encode(data),))


def _is_plain(data: Struct) -> bool:
    """Whether its fields are all that is written of it."""
    config = data.__struct_config__
    return config.tag is None and not config.omit_defaults and not config.array_like


def _key(key: Any) -> bytes:
    """With its colon; a number becomes a text."""
    return msgspec.json.encode({key: 0})[1:-2]


def _object(fields: list[tuple[bytes, Any]]) -> Iterator[bytes]:
    for i, (key, value) in enumerate(fields):
        yield (b"," if i else b"{") + key
        yield from _pieces(value)
    yield b"}"


def _list(items: list[Any] | tuple[Any, ...]) -> Iterator[bytes]:
    mark = b"["
    for group in _groups(items):
        pieces = _pieces(group[0]) if len(group) == 1 else iter((msgspec.json.encode(group)[1:-1],))
        yield from chain((mark,), pieces)
        mark = b","
    yield b"]"


def _groups(items: list[Any] | tuple[Any, ...]) -> Iterator[list[Any]]:
    """Neighbours, as many as make a piece."""
    group: list[Any] = []
    size = 0
    for item in items:
        more = 1 if type(item) in ATOMS else 1 + weight(item)
        if group and size + more > MOST:
            yield group
            group, size = [], 0
        group.append(item)
        size += more
    yield group
