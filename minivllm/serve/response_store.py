"""Responses that are kept: one SQLite file, which several servers may share.

A row is one response: the items of its request, and the answer, both as JSON. What it goes on from is the id of an
earlier row, so a conversation of n turns takes the room of n turns, and is read back along these ids.

An owner finds its own rows alone. A row that has a server is live: that server works on it. Each server holds a lock on
a file of its own, which the kernel gives up however the process ends; so whoever meets a live row can tell whether
anybody still works on it, and what nobody works on has failed.

Bounds: of bytes, and of age since a response was made or last gone on from. Where there are too many bytes, the owner
who holds most gives way, so that none loses anything as long as it holds less than an equal part; of an owner's, what
was used least recently goes first, and what is live stays. Nothing here knows of HTTP, nor of a response more than its
`status`, `error` and `output`. Every method may wait for the disk, or for another server's transaction, and any thread
may call it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from minivllm.errors import UserError

APPLICATION_ID = 0x6D_76_6C_6D  # in the file's header, so that no other program's database is taken for one of ours
VERSION = 2
BUSY_SECONDS = 10.0  # that a transaction waits for another server's
MAX_BYTES = 2**30
MAX_AGE = 30 * 86_400.0  # seconds
LONGEST_CONVERSATION = 1000  # responses

SCHEMA = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, server TEXT, used REAL NOT NULL,
    items BLOB NOT NULL, response BLOB NOT NULL, events BLOB,
    size INTEGER GENERATED ALWAYS AS (length(items) + length(response) + ifnull(length(events), 0)) STORED
);
CREATE INDEX by_use ON responses (used);
CREATE INDEX by_server ON responses (server) WHERE server IS NOT NULL;
CREATE TABLE about (secret BLOB NOT NULL, bytes INTEGER NOT NULL);
CREATE TRIGGER put AFTER INSERT ON responses BEGIN UPDATE about SET bytes = bytes + new.size; END;
CREATE TRIGGER changed AFTER UPDATE OF response, events ON responses
BEGIN UPDATE about SET bytes = bytes - old.size + new.size; END;
CREATE TRIGGER deleted AFTER DELETE ON responses BEGIN UPDATE about SET bytes = bytes - old.size; END;
"""
CONVERSATION = """
WITH RECURSIVE turns (id, number) AS (
    SELECT ?, 1 UNION ALL SELECT previous, number + 1 FROM turns JOIN responses USING (id)
    WHERE previous IS NOT NULL AND number < ?
) SELECT id FROM turns
"""
OWNERS = """
CREATE TABLE owners (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX by_bytes ON owners (bytes);
CREATE INDEX by_owner ON responses (owner, used);
INSERT INTO owners SELECT owner, sum(size) FROM responses GROUP BY owner;
CREATE TRIGGER put_own AFTER INSERT ON responses
BEGIN INSERT INTO owners VALUES (new.owner, new.size) ON CONFLICT (owner) DO UPDATE SET bytes = bytes + new.size; END;
CREATE TRIGGER changed_own AFTER UPDATE OF response, events ON responses
BEGIN UPDATE owners SET bytes = bytes - old.size + new.size WHERE owner = new.owner; END;
CREATE TRIGGER deleted_own AFTER DELETE ON responses BEGIN
    UPDATE owners SET bytes = bytes - old.size WHERE owner = old.owner;
    DELETE FROM owners WHERE owner = old.owner AND bytes <= 0;
END;
"""
PART = 256 * 2**10  # bytes of a response that are read at once
COLUMNS = "id, owner, items, response, previous, server, events"


class Record(Struct, frozen=True):
    id: str
    owner: str
    items: bytes  # of the request alone: a JSON array
    response: bytes  # a JSON object
    previous: str | None = None  # the response that it goes on from
    server: str | None = None  # that works on it; None: it is complete
    events: bytes | None = None  # that were streamed; None: it was not made to be streamed

    @property
    def size(self) -> int:
        return len(self.items) + len(self.response) + len(self.events or b"")


class Seen(NamedTuple):
    """A response that is kept, unread."""

    row: int
    id: str
    server: str | None
    previous: str | None
    num_items: int  # bytes
    num_response: int
    num_events: int | None


class Changed(Exception):
    """What was being read is another by now, or gone."""


class NotKept(Exception):
    """args: the id of a response of a conversation that is not there."""


class TooLong(Exception):
    """args: what of a conversation there is too much of."""


class TooLarge(Exception):
    """A response that is larger than all that may be kept."""


def default_path() -> Path:
    """~/.local/state/minivllm, or where XDG_STATE_HOME points: what outlives a program, and is neither a setting nor
    a cache that may be emptied."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "minivllm" / "responses.sqlite"


class ResponseStore:
    def __init__(self, path: Path, now: float, max_bytes: int = MAX_BYTES, max_age: float = MAX_AGE):
        """max_bytes: of JSON; the file is somewhat larger. max_age: seconds. Raises UserError for a file that cannot
        be used. `now` is here, as everywhere below, the time in seconds since the epoch."""
        self.path, self.max_bytes, self.max_age = path, max_bytes, max_age
        self.server = secrets.token_hex(8)
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(path.with_name(f"{path.name}-opening")):  # one at a time becomes, or sweeps, a database
                self._db = opened(path)
                self._alive = locked(self._file_of(self.server))
                self._sweep(now)
            self.trim(now)
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._file_of(self.server).unlink(missing_ok=True)
            self._alive.close()

    def owner(self, name: str) -> str:
        """What is written for an owner: a file that is stolen tells of no key, not even whether a guess is right
        elsewhere. The same after a restart."""
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest() if name else ""

    # --- one response

    def put(self, record: Record, now: float) -> None:
        """A new one. Raises TooLarge, also if all others hold less than it takes. The conversation that it goes on
        with counts as used."""
        if record.size > self.max_bytes:
            raise TooLarge
        fields = [getattr(record, name) for name in COLUMNS.split(", ")]
        with self._transaction() as db:
            db.execute(f"INSERT INTO responses ({COLUMNS}, used) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", [*fields, now])
            turns = (record.previous, LONGEST_CONVERSATION)
            db.execute(f"UPDATE responses SET used = ? WHERE id IN ({CONVERSATION})", (now, *turns))
        self.trim(now)
        with self._transaction("DEFERRED") as db:
            if db.execute("SELECT 1 FROM responses WHERE id = ?", (record.id,)).fetchone() is None:
                raise TooLarge

    def get(self, id: str, owner: str, now: float) -> Record | None:
        """None: there is none, or it is another owner's, or too old."""
        with self._transaction() as db:
            self._seen(db, id, owner, now)
            return self._row(id, owner, now)

    def seen(self, id: str, owner: str, now: float) -> Seen | None:
        """As get."""
        with self._transaction() as db:
            return self._seen(db, id, owner, now)

    def part(self, seen: Seen, column: Literal["response", "events"], begin: int) -> bytes:
        """PART bytes from there on, or what is left. Raises Changed."""
        with self._transaction("DEFERRED") as db:
            asked = f"SELECT id, server, length({column}) FROM responses WHERE rowid = ?"
            length = seen.num_response if column == "response" else seen.num_events
            if db.execute(asked, (seen.row,)).fetchone() != (seen.id, seen.server, length):
                raise Changed
            with db.blobopen("responses", column, seen.row, readonly=True) as blob:
                blob.seek(begin)
                return blob.read(PART)

    def delete(self, id: str, owner: str) -> bool:
        """Whether there was such a one."""
        with self._transaction() as db:
            gone = db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)).rowcount > 0
            give_room_back(db)
            return gone

    def conversation(self, id: str, owner: str, max_bytes: int, now: float) -> list[Record]:
        """That ends with this response, from its first. Raises NotKept and TooLong."""
        with self._transaction() as db:  # nothing is read before all of it is known to be little enough
            turns = list(self._turns(db, id, owner, max_bytes, now))
            return [self._row(turn.id, owner, now) for turn in reversed(turns)]

    def page(
        self, id: str, owner: str, after: str | None, limit: int, is_descending: bool, max_bytes: int, now: float
    ) -> tuple[list[bytes], bool]:
        """Some of the items that a response answers, each as JSON, behind the one called `after`, and whether there are
        more: those of its conversation, answers included, but not its own. Raises NotKept and TooLong as
        `conversation`, ValueError for an `after` that is none of them."""
        with self._transaction() as db:
            turns = list(self._turns(db, id, owner, max_bytes, now))[::-1]
            places = [(turn.row, column) for turn in turns for column in PARTS][:-1]  # where items lie
            found = [(name, place, i) for place in places for i, name in enumerate(_names(db, *place))]
            found = found[::-1] if is_descending else found
            begin = 0 if after is None else 1 + [name for name, *_ in found].index(after)
            shown = found[begin : begin + limit]
            wanted = [(place, i) for _, place, i in shown]
            texts = {}
            for place in dict.fromkeys(place for place, _ in wanted):
                numbers = [i for at, i in wanted if at == place]
                read = _items(db, *place, min(numbers), max(numbers))
                texts |= {(place, i): text for i, text in read}
            return [texts[item] for item in wanted], begin + limit < len(found)

    def _turns(self, db: sqlite3.Connection, id: str, owner: str, max_bytes: int, now: float) -> Iterator[Seen]:
        """Of a conversation, from its last. Raises NotKept and TooLong."""
        wanted, size, number = id, 0, 0
        while wanted is not None:
            if (turn := self._seen(db, wanted, owner, now)) is None:
                raise NotKept(wanted)
            yield turn
            wanted, size, number = turn.previous, size + turn.num_items + turn.num_response, number + 1
            if number > LONGEST_CONVERSATION:
                raise TooLong(f"more than {LONGEST_CONVERSATION} responses")
            if size > max_bytes:
                raise TooLong(f"more than {max_bytes} bytes")

    # --- those that are live

    def progress(self, id: str, response: bytes) -> None:
        with self._transaction() as db:
            db.execute("UPDATE responses SET response = ? WHERE id = ? AND server = ?", (response, id, self.server))

    def finish(self, id: str, response: bytes, events: bytes | None, now: float) -> bool:
        """Of one that this server works on. False: somebody else has stopped or deleted it."""
        change = "UPDATE responses SET response = ?, events = ?, used = ?, server = NULL WHERE id = ? AND server = ?"
        with self._transaction() as db:
            kept = db.execute(change, (response, events, now, id, self.server)).rowcount > 0
        self.trim(now)
        return kept

    def stop(self, id: str, owner: str, status: str, error: Any, now: float) -> None:
        """If it is live, it is over, with this status and error. Its server finds out by `mine`."""
        with self._transaction() as db:
            record = self._row(id, owner, now)
            if record is not None and record.server is not None:
                self._end(db, record, status, error, now)

    def mine(self) -> set[str]:
        """The ids of those that this server works on."""
        with self._transaction() as db:
            return {id for (id,) in db.execute("SELECT id FROM responses WHERE server = ?", (self.server,))}

    # --- bounds

    @property
    def num_bytes(self) -> int:
        with self._transaction() as db:
            return db.execute("SELECT bytes FROM about").fetchone()[0]

    def trim(self, now: float) -> None:
        """Let go what is too old, then, of the owner who holds most, what was used least recently, until the rest fits.
        The beginning of a conversation goes before its end."""
        oldest = "SELECT rowid FROM responses WHERE owner = ? AND server IS NULL ORDER BY used, rowid LIMIT 1"
        with self._transaction() as db:
            db.execute("DELETE FROM responses WHERE server IS NULL AND used < ?", (now - self.max_age,))
            while db.execute("SELECT bytes FROM about").fetchone()[0] > self.max_bytes:
                with closing(db.execute("SELECT owner FROM owners ORDER BY bytes DESC")) as largest:
                    rows = (db.execute(oldest, owner).fetchone() for owner in largest)
                    row = next(filter(None, rows), None)
                if row is None:
                    break  # all are live
                db.execute("DELETE FROM responses WHERE rowid = ?", row)
            give_room_back(db)

    # --- inside

    @contextmanager
    def _transaction(self, kind: Literal["IMMEDIATE", "DEFERRED"] = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute(f"BEGIN {kind}")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _row(self, id: str, owner: str, now: float) -> Record | None:
        found = self._db.execute(
            f"SELECT {COLUMNS} FROM responses WHERE id = ? AND owner = ? AND (used >= ? OR server IS NOT NULL)",
            (id, owner, now - self.max_age),
        ).fetchone()
        return found and Record(**dict(zip(COLUMNS.split(", "), found, strict=True)))

    def _seen(self, db: sqlite3.Connection, id: str, owner: str, now: float) -> Seen | None:
        """One that its server has left has failed."""
        asked = (
            "SELECT rowid, id, server, previous, length(items), length(response), length(events) FROM responses "
            "WHERE id = ? AND owner = ? AND (used >= ? OR server IS NOT NULL)"
        )
        found = db.execute(asked, (id, owner, now - self.max_age)).fetchone()
        if found is not None and found[2] is not None and not self._is_alive(found[2]):
            self._fail(db, self._row(id, owner, now), now)
            found = db.execute(asked, (id, owner, now - self.max_age)).fetchone()
        return found and Seen(*found)

    def _sweep(self, now: float) -> None:
        """What servers that are no more have left: rows, and the files that they held."""
        with self._transaction() as db:
            (self._secret,) = db.execute("SELECT secret FROM about").fetchone()
            live = db.execute("SELECT id, owner, server FROM responses WHERE server IS NOT NULL").fetchall()
            for id, owner, server in live:
                if not self._is_alive(server):
                    self._fail(db, self._row(id, owner, now), now)
        for file in self.path.parent.glob(f"{self.path.name}-server-*"):
            self._is_alive(file.name.rpartition("-")[2])

    def _fail(self, db: sqlite3.Connection, record: Record, now: float) -> None:
        why = "the server that worked on this response has ended"
        self._end(db, record, "failed", {"code": "server_error", "message": why}, now)

    def _end(self, db: sqlite3.Connection, record: Record, status: str, error: Any, now: float) -> None:
        response = msgspec.json.decode(record.response) | {"status": status, "error": error}
        change = "UPDATE responses SET response = ?, used = ?, server = NULL WHERE id = ?"
        db.execute(change, (msgspec.json.encode(response), now, record.id))

    def _file_of(self, server: str) -> Path:
        return self.path.with_name(f"{self.path.name}-server-{server}")

    def _is_alive(self, server: str) -> bool:
        if server == self.server:
            return True
        try:
            with self._file_of(server).open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        self._file_of(server).unlink(missing_ok=True)  # it will never be locked again
        return False


PARTS = ("items", "response")  # where a turn's items are: what was asked, and what was answered
_LIST = {"items": "json_each(CAST(items AS TEXT))", "response": "json_each(CAST(response AS TEXT), '$.output')"}


def _names(db: sqlite3.Connection, row: int, column: str) -> list[str]:
    """The ids of the items that lie there."""
    asked = f"SELECT json_extract(each.value, '$.id') FROM responses, {_LIST[column]} AS each WHERE responses.rowid = ?"
    return [name for (name,) in db.execute(asked, (row,))]


def _items(db: sqlite3.Connection, row: int, column: str, first: int, last: int) -> list[tuple[int, bytes]]:
    """Those from the first number to the last."""
    asked = f"SELECT each.key, each.value FROM responses, {_LIST[column]} AS each WHERE responses.rowid = ?"
    found = db.execute(f"{asked} AND each.key BETWEEN ? AND ?", (row, first, last))
    return [(number, text.encode()) for number, text in found]


def locked(path: Path) -> IO[bytes]:
    """A file that this process holds a lock on, until it is closed."""
    lock = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def give_room_back(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA incremental_vacuum").fetchall()  # a page at each step


def opened(path: Path) -> sqlite3.Connection:
    """The database, made if there is none. What is deleted is overwritten, and its room given back. The log and the
    index beside it get the permissions of the file."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    db = sqlite3.connect(path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        kind = db.execute("PRAGMA application_id").fetchone()[0], db.execute("PRAGMA user_version").fetchone()[0]
        is_new = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if not is_new and kind not in ((APPLICATION_ID, 1), (APPLICATION_ID, VERSION)):
            raise UserError(f"{path} is no store of responses, or one of another version of minivllm")
        path.chmod(0o600)
        for pragma in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
            db.execute(f"PRAGMA {pragma}").fetchall()
        if is_new:
            begin = f"BEGIN; PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION};"
            db.executescript(f"{begin} {SCHEMA} {OWNERS} INSERT INTO about VALUES (randomblob(16), 0); COMMIT;")
        elif kind[1] == 1:  # before owners had parts of it
            db.executescript(f"BEGIN; PRAGMA user_version = {VERSION}; {OWNERS} COMMIT;")
    except BaseException:
        db.close()
        raise
    return db
