"""Python processes of our own that end with their parent, however that ends.

The lifeline is the child's standard input: the parent writes the task to it and then keeps it open, so its end, which
also a kill of the parent brings, means that nobody is there to work for.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

T = TypeVar("T")
INTERRUPT = {signal.SIGINT}

# Temporary folders of children that have not been started: nobody but this process removes them.
unclaimed: set[str] = set()


def start(module: str, *args: str, **options: Any) -> subprocess.Popen:
    """`python -m module args` with a pipe as standard input; it can import what this process can. options: Popen's.

    Ctrl-C reaches every process of a terminal, and one whose interpreter is just starting would print a traceback: the
    child begins with the signal blocked.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPT)  # of this thread, and so of the child
    try:
        return subprocess.Popen([sys.executable, "-m", module, *args], stdin=subprocess.PIPE, env=env, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def remove_unclaimed() -> None:
    """Before a process ends at once."""
    for folder in tuple(unclaimed):
        shutil.rmtree(folder, ignore_errors=True)


def ignore_interrupts() -> None:
    """In the child: Ctrl-C is the parent's to understand, until the signal gets another meaning here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPT)


def read_task(kind: type[T], folders: Sequence[str | Path] = ()) -> T:
    """In the child: the line of JSON that it was sent. The process ends if the parent has, before it could write it."""
    if not (line := sys.stdin.buffer.readline()):
        _end(folders)
    return msgspec.json.decode(line, type=kind)


def end_with_parent(folders: Sequence[str | Path] = ()) -> None:
    """In the child, once it has read all that it was sent. folders: the parent's own temporary ones, which go with it
    even where it had no time to remove them."""
    threading.Thread(target=_wait_for_the_end, args=(folders,), name="minivllm-lifeline", daemon=True).start()


def _wait_for_the_end(folders: Sequence[str | Path]) -> None:
    while os.read(0, 1):  # not through sys.stdin: an interpreter that ends would wait for its lock
        pass
    _end(folders)


def _end(folders: Sequence[str | Path]) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what fails now, for want of a folder or a parent, is no news
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
