"""Python processes of our own that end with their parent, however that ends.

The lifeline is the child's standard input: the parent writes the task to it and then keeps it open, so its end, which
also a kill of the parent brings, means that nobody is there to work for. For a child that cannot look, see orphan.py.
"""

from __future__ import annotations

import functools
import gc
import os
import queue
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from minivllm import orphan

T = TypeVar("T")
INTERRUPT = {signal.SIGINT}
_LENGTH = struct.Struct("<Q")
_SOCKET_PATH_BYTES = 103  # what a system takes at least (macOS; Linux: 107)
_LONGEST_NAME = 16  # of a socket file in a folder of ours

_unclaimed: set[str] = set()  # folders whose child has not been started: nobody but this process removes them
_making = threading.RLock()  # or giving one away. Reentrant: an interrupt can come while its own thread has it


def start(module: str, *args: str, **options: Any) -> subprocess.Popen:
    """`python -m module args` with a pipe as standard input; it can import what this process can. options: Popen's.

    Ctrl-C reaches every process of a terminal, and one whose interpreter is just starting would print a traceback: the
    child begins with the signal blocked.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", module, *args]
    return _starter(os.getpid()).run(lambda: subprocess.Popen(command, stdin=subprocess.PIPE, env=env, **options))


class _Starter:
    """A thread that starts processes and lives as long as this one: to the kernel a child's parent is the thread that
    forked it (orphan.py), and those who ask come and go."""

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen], Future[subprocess.Popen]]]
        self._wanted = queue.SimpleQueue()
        threading.Thread(target=self._work, name="minivllm-starter", daemon=True).start()

    def run(self, start: Callable[[], subprocess.Popen]) -> subprocess.Popen:
        """If an interrupt ends the wait, nobody holds the child, so that its lifeline closes."""
        started: Future[subprocess.Popen] = Future()
        self._wanted.put((start, started))
        return started.result()

    def _work(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPT)  # of this thread, and so of its children
        while True:
            _start(*self._wanted.get())


def _start(start: Callable[[], subprocess.Popen], started: Future[subprocess.Popen]) -> None:
    try:
        started.set_result(start())
    except BaseException as error:
        started.set_exception(error)


@functools.cache
def _starter(process: int) -> _Starter:
    """process: this one; a fork of it does not have its threads."""
    return _Starter()


def make_folder() -> str:
    """A temporary folder for socket files, that only this user can enter. This process removes it, however it ends,
    until `claimed`. It is in /tmp where paths in TMPDIR would be longer than a socket's may be."""
    name = f"minivllm-{secrets.token_hex(8)}"
    folder = os.path.join(_temporary(), name)
    if len(os.fsencode(folder)) + 1 + _LONGEST_NAME > _SOCKET_PATH_BYTES:
        folder = os.path.join("/tmp", name)
    with _making:
        _unclaimed.add(folder)  # first: an interrupt between the two finds nothing to remove, and nothing is made then
        os.mkdir(folder, 0o700)
    return folder


def _temporary() -> str:
    """tempfile's folder. To find it, tempfile makes a file there and removes it again, and an interrupt between the two
    would leave it: so it is looked for by another thread, which has the lock that `remove_unclaimed` waits for."""
    if tempfile.tempdir is None:

        def find() -> None:
            with _making:
                tempfile.gettempdir()

        finding = threading.Thread(target=find, name="minivllm-tempdir", daemon=True)
        finding.start()
        finding.join()
    return tempfile.gettempdir()


def claimed(folder: str) -> None:
    """A child has been started that removes it at its parent's end. To be called before it is sent its task: this does
    not return while `remove_unclaimed` takes folders away, and a child without a task ends in silence."""
    with _making:
        _unclaimed.discard(folder)


def remove_folder(folder: str | Path) -> None:
    """Also while other threads write into it, as into a folder that is gone they cannot."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return


def remove_unclaimed() -> None:
    """Before a process ends at once: from now on no other thread makes a folder, or gives one to a child."""
    _making.acquire()
    for folder in tuple(_unclaimed):
        remove_folder(folder)


def ignore_interrupts() -> None:
    """In the child: Ctrl-C is the parent's to understand, until the signal gets another meaning here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPT)


def freeze_heap() -> None:
    """In a process of ours that has started: what is there stays for good, and Python's collector of cycles need not
    look at it ever again. It would, now and then, for tenths of a second in which no step runs (bench/LOG.md; vLLM's
    processes do the same)."""
    gc.freeze()


def read_task(kind: type[T], folders: Sequence[str | Path] = ()) -> T:
    """In the child: what `send_task` sent. The process ends if the parent has, before it could write it."""
    return msgspec.json.decode(read_bytes(folders), type=kind)


def send_task(process: subprocess.Popen, task: Any) -> None:
    send_bytes(process, msgspec.json.encode(task))


def read_bytes(folders: Sequence[str | Path] = ()) -> bytes:
    """In the child: what `send_bytes` sent. The process ends if the parent has meanwhile."""
    length = sys.stdin.buffer.read(_LENGTH.size)
    if len(length) == _LENGTH.size:
        (number,) = _LENGTH.unpack(length)
        if len(sent := sys.stdin.buffer.read(number)) == number:
            return sent
    _end(folders)


def send_bytes(process: subprocess.Popen, sent: bytes) -> None:
    """To a child of ours. Raises BrokenPipeError if it has ended."""
    process.stdin.write(_LENGTH.pack(len(sent)) + sent)
    process.stdin.flush()  # and it stays open: the lifeline


def end_with_parent(folders: Sequence[str | Path] = ()) -> None:
    """In the child's main thread, once it has read all that it was sent. folders: the parent's own temporary ones,
    which go with it even where it had no time to remove them."""
    asked = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(folders, asked), name="minivllm-lifeline", daemon=True).start()
    asked.wait()  # who is stopped before that stays so
    orphan.end_in_time()
    lifeline = select.poll()
    lifeline.register(0, 0)
    if lifeline.poll(0):  # closed before the kernel was asked
        _end(folders)


def _wait_for_the_end(folders: Sequence[str | Path], asked: threading.Event) -> None:
    try:
        orphan.go_on()
    finally:
        asked.set()
    while os.read(0, 1):  # not through sys.stdin: an interpreter that ends would wait for its lock
        pass
    _end(folders)


def _end(folders: Sequence[str | Path]) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what fails now, for want of a folder or a parent, is no news
    for folder in folders:
        remove_folder(folder)
    os._exit(1)
