"""`serve --uds PATH`: a socket in the file system in the place of a port, for a proxy on the same machine.

Who may connect is up to the file's mode, as the process's umask leaves it, and to its folder. Whoever holds the lock
beside the file (PATH.lock) owns the path: a server that was killed leaves its socket behind, but no lock, and one that
still loads its model does not listen, but has the lock. So a socket that nobody owns is cleared away, and no other is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import NoReturn

from minivllm.terminal import fail


class UnixSocket(socket.socket):
    """Bound to a path, which it clears away when it is closed. It does not listen yet."""

    def __init__(self, path: Path, lock: int):
        """lock: see _take. Raises OSError."""
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.bind(str(path))
        self.path, self.lock = path, lock

    def close(self) -> None:
        is_first = self.fileno() >= 0
        super().close()
        if is_first:
            self.path.unlink(missing_ok=True)
            _release(self.path, self.lock)


def bind(path: Path) -> UnixSocket:
    """Exits with what to do if the path cannot be had."""
    try:
        with contextlib.ExitStack() as on_failure:
            if (lock := _take(_lock_of(path))) is None:
                fail_in_use(path)
            on_failure.callback(_release, path, lock)
            if _answers(path):
                fail_in_use(path)
            _clear(path)
            listener = UnixSocket(path, lock)
            on_failure.pop_all()
            return listener
    except OSError as error:
        fail(f"--uds {path}: {error.strerror or error}")


def fail_in_use(path: Path) -> NoReturn:
    fail(f"--uds {path} is in use. Stop what uses it, or take another path.")


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _take(path: Path) -> int | None:
    """An open file that holds the lock; None: another process has it. Who had it may have removed the file meanwhile:
    then it is made again."""
    while True:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        os.close(lock)


def _release(path: Path, lock: int) -> None:
    _lock_of(path).unlink(missing_ok=True)
    os.close(lock)


def _answers(path: Path) -> bool:
    """Whether a program that knows nothing of the lock serves there."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _clear(path: Path) -> None:
    """What a server that was killed has left. Exits for anything but a socket."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            fail(f"--uds {path} is there already, and is no socket. Remove it, or take another path.")
        path.unlink()
