"""A ledger (ledger.py) of several servers: a table in memory that they share, a row for each client.

    row      key | seen | bucket of requests | bucket of tokens | for each thing and each server: how much is held
    totals   for each thing and each server; for each thing, how many clients hold some of it

A server writes what it holds into columns of its own, so that what one that died has held is known, and its parent
forgets it. Whoever looks and takes holds the file's lock (flock), which the kernel takes back from the dead; from one
that is stopped inside nobody does, so after PATIENCE the others go on without it, and may then, for as long as it is
stopped, let a client have what each of them still sees as free.

Where all rows are taken, a new client gets the row of one that holds nothing: of SAMPLE such rows, in turn, the one
that was seen longest ago (Redis forgets keys like that). A client that finds no row is not limited.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path

from minivllm.serve.ledger import Bucket, Holdings

NUM_ROWS = 2**15  # as many as four servers have connections
SAMPLE = 16
KEY_BYTES = 8  # of a hash with a secret: nobody can look for two clients that have the same
CELL = 8  # bytes of every other value
THINGS = ("sequences", "answer_bytes", "connections", "body_bytes")
BUCKETS = ("requests", "tokens")
PATIENCE = 0.02  # seconds; alone is alone for some ten microseconds, and longer where a process loses its core
POLL_SECONDS = 0.0002


def create(path: Path, num_servers: int, num_rows: int = NUM_ROWS) -> None:
    """Raises OSError: what lacks room now would end a process later, where it writes."""
    with path.open("wb") as file:
        file.write(bytes(_Layout(num_servers, num_rows).num_bytes))


class _Layout:
    """Where what is, in cells: 64-bit integers, and floating-point numbers where a bucket is or when it was seen."""

    def __init__(self, num_servers: int, num_rows: int):
        self.num_servers, self.num_rows = num_servers, num_rows
        self.cursor = num_rows  # behind the keys, which stand together so that one search finds them
        self.totals = self.cursor + 1
        self.holders = self.totals + len(THINGS) * num_servers
        self.rows = self.holders + len(THINGS)
        self.held = 1 + 2 * len(BUCKETS)  # in a row
        self.row = self.held + len(THINGS) * num_servers
        self.num_bytes = CELL * (self.rows + num_rows * self.row)


class SharedLedger:
    """One server's view of it; the parent's has no number."""

    def __init__(self, path: Path, number: int | None, num_servers: int, secret: bytes, num_rows: int = NUM_ROWS):
        """number: of this server, which it writes for. secret: of all servers. Raises OSError."""
        self._layout = layout = _Layout(num_servers, num_rows)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(self._fd, layout.num_bytes)
        self._ints, self._floats = memoryview(self._map).cast("q"), memoryview(self._map).cast("d")
        self._number, self._secret = number, secret
        self._rows: dict[str, int] = {}  # where a client was last
        self._depth = 0
        self.sequences, self.answer_bytes, self.connections, bodies = (
            _SharedHoldings(self, i) for i in range(len(THINGS))
        )
        self.body_bytes: Holdings = bodies
        self.requests, self.tokens = (_SharedBuckets(self, i) for i in range(len(BUCKETS)))

    @contextmanager
    def alone(self) -> Iterator[None]:
        is_locked = not self._depth and self._lock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if is_locked:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def forget_server(self, number: int) -> None:
        """It has died: what it held is free."""
        with self.alone():
            for thing in range(len(THINGS)):
                self._column(thing, number)[:] = _zeros(self._layout.num_rows)
                self._ints[self._layout.totals + thing * self._layout.num_servers + number] = 0
                columns = [self._column(thing, server).tolist() for server in range(self._layout.num_servers)]
                self._ints[self._layout.holders + thing] = sum(map(any, zip(*columns, strict=True)))

    def _column(self, thing: int, server: int) -> memoryview:
        """How much each row's client holds there."""
        layout = self._layout
        return self._ints[layout.rows + layout.held + thing * layout.num_servers + server :: layout.row]

    def _lock(self) -> bool:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > until:
                    return False
                time.sleep(POLL_SECONDS)

    def row_of(self, client: str, is_new: bool = False) -> int | None:
        """The first cell of its row; None: it has none. is_new: it gets one, if there is one to be had."""
        key = self._key(client)
        index = self._rows.get(client)
        if index is None or self._map[CELL * index : CELL * index + KEY_BYTES] != key:
            index = self._find(key)
            if index is None and is_new:
                index = self._take_row(key)
            if index is None:
                return None
            if len(self._rows) >= self._layout.num_rows:
                self._rows.clear()
            self._rows[client] = index
        return self._layout.rows + index * self._layout.row

    def _key(self, client: str) -> bytes:
        key = hashlib.blake2b(client.encode(), digest_size=KEY_BYTES, key=self._secret).digest()
        return key if any(key) else b"\1" * KEY_BYTES  # an empty row's is zero

    def _find(self, key: bytes) -> int | None:
        at, end = -1, CELL * self._layout.num_rows
        while (at := self._map.find(key, at + 1, end)) >= 0:
            if at % CELL == 0:
                return at // CELL
        return None

    def _take_row(self, key: bytes) -> int | None:
        layout = self._layout
        begin = self._ints[layout.cursor]
        turn = ((begin + i) % layout.num_rows for i in range(layout.num_rows))
        found = list(islice((i for i in turn if not self._holds(i)), SAMPLE))
        if not found:
            return None
        index = min(found, key=lambda i: self._floats[layout.rows + i * layout.row])
        self._ints[layout.cursor] = (index + 1) % layout.num_rows
        row = layout.rows + index * layout.row
        self._ints[row : row + layout.row] = _zeros(layout.row)
        self._map[CELL * index : CELL * index + KEY_BYTES] = key
        self.saw(row)
        return index

    def _holds(self, index: int) -> bool:
        row = self._layout.rows + index * self._layout.row
        return any(self._ints[row + self._layout.held : row + self._layout.row])

    def saw(self, row: int) -> None:
        self._floats[row] = time.monotonic()

    # ------------------------------------------------------------------------------------------------ of one thing

    def held(self, thing: int, row: int) -> int:
        first = row + self._layout.held + thing * self._layout.num_servers
        return sum(self._ints[first : first + self._layout.num_servers])

    def total(self, thing: int) -> int:
        first = self._layout.totals + thing * self._layout.num_servers
        return sum(self._ints[first : first + self._layout.num_servers])

    def num_holders(self, thing: int) -> int:
        return self._ints[self._layout.holders + thing]

    def hold(self, thing: int, row: int, number: int) -> None:
        assert self._number is not None, "the parent holds nothing"
        column = thing * self._layout.num_servers + self._number
        own, before = row + self._layout.held + column, self.held(thing, row)
        number = max(number, -self._ints[own])  # of a client that had no row when it took
        self._ints[own] += number
        self._ints[self._layout.totals + column] += number
        self._ints[self._layout.holders + thing] += bool(self.held(thing, row)) - bool(before)
        self.saw(row)

    def bucket(self, which: int, row: int) -> Bucket | None:
        """None: it was never filled."""
        found = Bucket(*self._floats[row + 1 + 2 * which : row + 3 + 2 * which])
        return found if found.since else None

    def fill(self, which: int, row: int, bucket: Bucket) -> None:
        self._floats[row + 1 + 2 * which], self._floats[row + 2 + 2 * which] = bucket
        self.saw(row)


class _SharedHoldings:
    def __init__(self, ledger: SharedLedger, thing: int):
        self._ledger, self._thing = ledger, thing

    def alone(self) -> AbstractContextManager[None]:
        return self._ledger.alone()

    def of(self, client: str) -> int:
        row = self._ledger.row_of(client)
        return 0 if row is None else self._ledger.held(self._thing, row)

    def total(self) -> int:
        return self._ledger.total(self._thing)

    def num_clients(self) -> int:
        return self._ledger.num_holders(self._thing)

    def add(self, client: str, number: int) -> None:
        with self.alone():
            if (row := self._ledger.row_of(client, is_new=number > 0)) is not None:
                self._ledger.hold(self._thing, row, number)


class _SharedBuckets:
    def __init__(self, ledger: SharedLedger, which: int):
        self._ledger, self._which = ledger, which

    def alone(self) -> AbstractContextManager[None]:
        return self._ledger.alone()

    def get(self, client: str) -> Bucket | None:
        row = self._ledger.row_of(client)
        return None if row is None else self._ledger.bucket(self._which, row)

    def put(self, client: str, bucket: Bucket) -> None:
        with self.alone():
            if (row := self._ledger.row_of(client, is_new=True)) is not None:
                self._ledger.fill(self._which, row, bucket)


def _zeros(number: int) -> memoryview:
    return memoryview(bytes(CELL * number)).cast("q")
