"""A folder of folders, each built once and never seen half done.

    <entry>            complete: it is there, or it is not (made by one rename)
    .<entry>.<random>  being written; left behind only by a process that died, removed by the next builder
    .<entry>.lock      held while building, so that two first starts do the work once

What is in an entry is decided by its name: whoever changes what a builder writes changes the name (a version number in
it), and old entries are simply not asked for any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from minivllm.errors import ModelError


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
            self.root.mkdir(parents=True, exist_ok=True)
            with _lock(self.root / f".{name}.lock"):
                if not path.is_dir():
                    self._build(path, build)
        except OSError as e:
            raise ModelError(
                f"{path}: the cache cannot be written ({e}). Make room or make {self.root} writable, or let "
                "XDG_CACHE_HOME name another folder"
            ) from e
        return path

    def discard(self, name: str) -> None:
        """Forget an entry that was found damaged. Whoever has its files open keeps them."""
        path = self.root / name
        with _lock(self.root / f".{name}.lock"):
            if path.is_dir():
                aside = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=self.root))
                path.rename(aside / name)
                shutil.rmtree(aside)

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
