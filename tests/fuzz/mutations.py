"""Inputs that are nearly right, as a strategy that shrinks: some edits of an entry of the corpus, of its bytes or,
where it is JSON, of its values, since most edits of its bytes are only no JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

from fuzz.targets import Target
from hypothesis import strategies as st

LONGEST = 20_000  # bytes of an input
VALUES = (0, 1, 8, 9, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1)
NUMBERS = [value.to_bytes(8, "little") for value in VALUES]


PARTS = 10_000
ODD = (
    *(None, True, False, 0, -1, 0.5, 2**31, 2**64, 10**30),
    *("", "a", "\0", "../x", "((", [], {}, [[]], [None], [0], ["a"], {"a": None}, {"a": {}}),
)


class Edit(NamedTuple):
    kind: str
    at: int  # where: a part in PARTS of the length
    length: int
    what: bytes


def mutated(target: Target) -> st.SearchStrategy[bytes]:
    of_bytes = st.builds(apply, st.sampled_from(target.corpus), st.lists(_edits(target), min_size=1, max_size=6))
    if not (texts := [data for data in target.corpus if _is_json(data)]):
        return of_bytes
    changes = st.lists(st.tuples(st.integers(0, PARTS), st.sampled_from(ODD)), min_size=1, max_size=4)
    return of_bytes | st.builds(change, st.sampled_from(texts), changes)


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict | list)
    except (ValueError, RecursionError):
        return False


def change(data: bytes, changes: list[tuple[int, Any]]) -> bytes:
    """Put odd values in the places of some."""
    value = json.loads(data)
    for at, odd in changes:
        if places := list(_places(value)):
            inside, key = places[at % len(places)]
            inside[key] = json.loads(json.dumps(odd))  # a list of its own, which later changes may enter
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or object in it, with each of its indexes or names."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _edits(target: Target) -> st.SearchStrategy[Edit]:
    pieces = st.one_of(
        st.sampled_from(target.words), st.binary(min_size=1, max_size=8), st.sampled_from(NUMBERS), _parts(target)
    )
    kinds = st.sampled_from(["insert", "replace", "delete", "repeat", "cut"])
    return st.builds(Edit, kinds, st.integers(0, PARTS), st.integers(0, 64), pieces)


def _parts(target: Target) -> st.SearchStrategy[bytes]:
    """Of another entry."""
    return st.builds(
        lambda data, at, length: data[at * len(data) // PARTS :][:length],
        *(st.sampled_from(target.corpus), st.integers(0, PARTS), st.integers(1, 200)),
    )


def apply(data: bytes, edits: list[Edit]) -> bytes:
    return reduce(_apply, edits, data)[:LONGEST]


def _apply(data: bytes, edit: Edit) -> bytes:
    at = edit.at * len(data) // PARTS
    head, tail = data[:at], data[at:]
    match edit.kind:
        case "insert":
            return head + edit.what + tail
        case "replace":
            return head + edit.what + tail[len(edit.what) :]
        case "delete":
            return head + tail[edit.length :]
        case "repeat":  # a piece, or what stands there, up to 2,000 times
            piece = edit.what if edit.length % 2 else tail[: edit.length]
            return head + piece * (2 ** (edit.length % 12)) + tail
    return head
