"""A folder of folders, each built once and never seen half done.

    <entry>            complete: it is there, or it is not (made by one rename)
    .<entry>.<random>  being written; left behind only by a process that died, removed by the next builder
    .<entry>.lock      held while building, so that two first starts do the work once

What is in an entry is decided by its name: whoever changes what a builder writes changes the name (a version number in
it), and old entries are simply not asked for any more.

What is run when it is loaded, a library or a pickle, is a sealed entry: it is used only if its file, and all folders on
the way there from the cache's root, are this user's (or root's) and nobody else's to write to, and if the file has the
digest that lies beside it. One that fails is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from minivllm.errors import ModelError

DIGEST = "sha256"
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

logger = logging.getLogger("minivllm")


def default_cache_dir() -> Path:
    """~/.cache/minivllm, or where XDG_CACHE_HOME points: the platform's convention, not a setting of the engine."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "minivllm"


class Cache:
    def __init__(self, root: Path | str | None = None):
        self.root = Path(root) if root is not None else default_cache_dir()

    def entry(self, name: str, build: Callable[[Path], None]) -> Path:
        """The folder `name`, made by `build(empty folder)` if it is not there yet."""
        path = self.root / name
        if path.is_dir():
            return path
        try:
            self.root.mkdir(0o755, parents=True, exist_ok=True)
            with _lock(self.root / f".{name}.lock"):
                if not path.is_dir():
                    self._build(path, build)
        except OSError as e:
            raise ModelError(
                f"{path}: the cache cannot be written ({e}). Make room or make {self.root} writable, or let "
                "XDG_CACHE_HOME name another folder"
            ) from e
        return path

    def sealed(self, name: str, file: str) -> Path | None:
        """The file of a sealed entry; None if there is none that may be used."""
        return self.root / name / file if self._flaw(name, file) is None else None

    def sealed_entry(self, name: str, file: str, build: Callable[[Path], None]) -> Path:
        """The file of a sealed entry, made by `build(empty folder)` if there is none that may be used."""

        def write(folder: Path) -> None:
            build(folder)
            (folder / DIGEST).write_text(_digest(folder, file, name))
            for made in (folder / file, folder / DIGEST):
                made.chmod(made.stat().st_mode & ~OTHERS_WRITE)

        self._close_to_others()
        for _ in range(2):
            self.entry(name, write)
            if (flaw := self._flaw(name, file)) is None:
                return self.root / name / file
            logger.warning("%s is not used, and built again: %s", self.root / name / file, flaw)
            self.discard(name)
        raise _unsafe(flaw)

    def _flaw(self, name: str, file: str) -> str | None:
        """Why a sealed entry must not be used."""
        folder = self.root / name
        try:
            for path in (self.root.resolve(), folder, folder / file, folder / DIGEST):
                if (why := _not_ours(path)) is not None:
                    return why
            is_whole = (folder / DIGEST).read_bytes() == _digest(folder, file).encode()
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return None if is_whole else f"{folder / file} has another digest"

    def _close_to_others(self) -> None:
        """Also a root that was made under another umask; what others have put there is judged entry by entry. Raises
        ModelError for one that is not ours."""
        if not self.root.exists():
            return
        with contextlib.suppress(OSError):
            if (mode := self.root.stat().st_mode) & OTHERS_WRITE:
                self.root.chmod(mode & ~OTHERS_WRITE)
                logger.warning("others could write to %s, from which code is run; now they cannot", self.root)
        if (why := _not_ours(self.root.resolve())) is not None:
            raise _unsafe(why)

    def discard(self, name: str) -> None:
        """Forget an entry that was found damaged. Whoever has its files open keeps them."""
        path = self.root / name
        if not path.exists():
            return
        with _lock(self.root / f".{name}.lock"):
            if path.is_dir():
                aside = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=self.root))
                path.rename(aside)  # not into it: a folder of somebody else's stays in the folder where it is
                shutil.rmtree(aside, ignore_errors=True)

    def _build(self, path: Path, build: Callable[[Path], None]) -> None:
        for leftover in self.root.glob(f".{glob.escape(path.name)}.*.tmp"):  # their writer is dead: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=self.root))
        try:
            build(aside)
            _sync(aside)
            aside.rename(path)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def _unsafe(why: str) -> ModelError:
    return ModelError(f"{why}, and what lies there is run. Let XDG_CACHE_HOME name a folder of this user's own")


def _digest(folder: Path, file: str, name: str | None = None) -> str:
    """Of an entry's file under its name, so that one entry cannot stand for another. name: that it will have."""
    digest = hashlib.sha256(f"{name or folder.name}/{file}\0".encode())
    with open(folder / file, "rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _not_ours(path: Path) -> str | None:
    """Why what lies there may be somebody else's. Raises FileNotFoundError."""
    found = path.lstat()
    if (owner := _owner(found)) not in (os.geteuid(), 0):
        return f"{path} belongs to user {owner}"
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    return f"others can write to {path}" if found.st_mode & OTHERS_WRITE else None


def _owner(found: os.stat_result) -> int:
    return found.st_uid


def file_key(path: Path) -> str:
    """Names this version of a local file without reading it: path, size and time of change."""
    stat = path.stat()
    return hashlib.sha256(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a kill
        yield


def _sync(folder: Path) -> None:
    """After this a rename cannot reach the disk before the contents do."""
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
