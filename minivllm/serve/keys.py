"""API keys: who a caller is, and what it may do.

    use       ask for answers, vectors and models
    metrics   read /metrics and /load, which ask for a key as soon as there is one of this role; nothing else
    admin     all that; load and unload adapters, look at /debug

A key whose role nobody has said may use the server; that of the only client may do all: it is the operator's.

A file of keys is read again when it has changed, which is looked at with each request that has a key: a key is added
or taken back by writing the file anew, and all servers of one engine see it. A file that cannot be read any more, or
holds a mistake, changes nothing and is an error in the log: letting everybody in or nobody would both be worse.

Keys of one name are one client: the old and the new one, while they are exchanged, share limits, cache and responses.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from minivllm import logs
from minivllm.errors import UserError

ADMITS = {"use": ("use",), "metrics": ("metrics",), "admin": ("use", "metrics", "admin")}
IS_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
IS_SHA256 = re.compile(r"[0-9a-fA-F]{64}")

logger = logging.getLogger("minivllm.serve.audit")


class ApiKey(NamedTuple):
    hash: bytes
    role: str = ""  # "": nobody has said
    name: str = ""

    @property
    def owner(self) -> str:
        """Whose what is kept is (response_store.py): the same after a restart."""
        return f"name {self.name}" if self.name else self.hash.hex()


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """Of a file of keys, where it is JSON."""

    key: str = ""
    sha256: str = ""  # in the place of the key
    name: str = ""
    role: str = ""

    @property
    def client(self) -> str:
        return self.name or self.key or self.sha256.lower()


def read_lines(path: Path) -> list[Line]:
    """Raises UserError, which tells no key."""
    try:
        texts = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or 'is no text'}") from None
    numbered = [(i, text.strip()) for i, text in enumerate(texts, 1)]
    lines = [_line(text, f"{path}, line {i}") for i, text in numbered if text and not text.startswith("#")]
    if not lines:  # no keys would mean that everybody may come in
        raise UserError(f"{path} holds no key")
    return lines


def _line(text: str, where: str) -> Line:
    if not text.startswith("{"):
        return Line(key=text)
    try:
        line = msgspec.json.decode(text, type=Line)
    except msgspec.MsgspecError as error:
        raise UserError(f"{where}: {error}") from None
    if bool(line.key) == bool(line.sha256) or (line.sha256 and not IS_SHA256.fullmatch(line.sha256)):
        raise UserError(f"{where}: give key, or sha256 as 64 hexadecimal digits")
    if line.role and line.role not in ADMITS:
        raise UserError(f"{where}: role must be one of {', '.join(ADMITS)}")
    if line.name and not IS_NAME.fullmatch(line.name):
        raise UserError(f"{where}: a name has letters, digits and . _ @ -, 64 at most")
    return line


def _key(line: Line) -> ApiKey:
    digest = bytes.fromhex(line.sha256) if line.sha256 else _hash(line.key.encode())
    return ApiKey(digest, line.role, line.name)


class KeyFile:
    """The keys of a file as it is now."""

    def __init__(self, path: Path):
        """Raises UserError."""
        self.path = path
        self._seen = self._state()
        self.keys = [_key(line) for line in read_lines(path)]

    def look(self) -> bool:
        """Whether the keys have changed."""
        if (state := self._state()) == self._seen:
            return False
        self._seen = state
        try:
            keys = [_key(line) for line in read_lines(self.path)]
        except UserError as error:
            logger.error("the keys stay as they were: %s", error)
            return False
        fields = {"act": "read keys", "what": str(self.path), "keys": len(keys), "result": "done"}
        logs.event(logger, "audit", f"{self.path} has changed: {len(keys)} keys", fields)
        self.keys = keys
        return True

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Keys:
    """Of keys only hashes are kept. Comparing takes the same time whichever key is right or how nearly: all hashes are
    compared, each in constant time (`hmac.compare_digest`), and those of keys of any length are equally long."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        isolated: bool = True,
        secret: bytes | None = None,
        file: KeyFile | None = None,
    ):
        """isolated: each of several clients has its own part of the prefix cache. secret: what servers that share an
        engine share; None: of this object alone."""
        self._given = [ApiKey(_hash(key.encode())) for key in keys]
        self._file, self._isolated = file, isolated
        self._secret = os.urandom(16) if secret is None else secret
        self._use(self._given + (file.keys if file else []))

    def _use(self, keys: Sequence[ApiKey]) -> None:
        known = {key.hash: key for key in keys}
        self._num_clients = len({key.owner for key in known.values()})
        role = "admin" if self._num_clients == 1 else "use"
        self._keys = [key if key.role else key._replace(role=role) for key in known.values()]
        self._roles = {key.role for key in self._keys}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def has_role(self, role: str) -> bool:
        self._look()
        return role in self._roles

    def accept(self, key: bytes) -> ApiKey | None:
        self._look()
        given, found = _hash(key), None
        for known in self._keys:
            if hmac.compare_digest(given, known.hash):
                found = known
        return found

    def name(self, key: ApiKey) -> str:
        """What a key is called in the log: its name, or enough to tell it from others until the server ends, and
        nothing to find it by."""
        return key.name or self._hidden("log", key.owner)[:8]

    def tenant(self, key: ApiKey) -> str:
        """The beginning of the cache_salt of every request with this key; "": all keys share one cache. Of one length,
        so that no cache_salt of a request can make one key's salt into another's; of this process alone, so that a
        recorded trace says nothing about a key."""
        return self._hidden("tenant", key.owner)[:32] if self._isolated and self._num_clients > 1 else ""

    def share_of(self, client: str) -> str:
        """What the engine calls a client (rate_limit.name_of), where clients share it fairly. A recorded trace says
        nothing about whom it stands for."""
        return self._hidden("share", client)[:16]

    def _look(self) -> None:
        if self._file is not None and self._file.look():
            self._use(self._given + self._file.keys)

    def _hidden(self, purpose: str, text: str) -> str:
        return hmac.new(self._secret, f"{purpose} {text}".encode(), hashlib.sha256).hexdigest()


def salted(tenant: str, salt: str | None) -> str:
    """A request's whole cache_salt. Of its own part a digest: each sequence carries it, and each trace shows it."""
    return tenant + hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()[:32] if salt else tenant


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
