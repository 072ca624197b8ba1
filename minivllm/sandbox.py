"""Work on what a client has written, in a process that is killed when it takes too long or too much.

    Sandbox("minivllm.x", setup, limits)              child: python -m minivllm.sandbox minivllm.x
    run(task)  -- the first one starts the child -->  work = minivllm.x.prepare(setup)
               ----------- task ------------------->
               <---------- work(task) --------------

Work that makes its answer in parts is a generator of them, and asked by `stream`.

A thread cannot be stopped, and a compiler or a template can be made to run for ever: a process can be killed. One that
was is replaced by the next `run`. Its limits are wall-clock time, by the parent's watch, and address space beyond what
it has once it is prepared (RLIMIT_AS); a limit of CPU time (RLIMIT_CPU) ends it if nobody watches any more. On Linux
the kernel ends it with its parent (orphan.py), elsewhere the end of its standard input does between two tasks.

The parent sends and gets bytes, and decodes them as data: nothing is pickled. A child is started afresh, never forked
from a process with threads.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from minivllm import child, orphan
from minivllm.errors import MinivllmError
from minivllm.wanted import Unwanted

START_SECONDS = 120.0  # until a child is prepared: it may import much, on a machine that is busy
POLL_SECONDS = 0.05  # how soon it is seen that nobody wants an answer any more
CPU_PER_SECOND = 8  # CPU seconds for one of the clock: its threads
_LENGTH = struct.Struct("<Q")
_DONE, _FAILED, _NO_MEMORY, _PART = b"d", b"f", b"m", b"p"  # the first byte of what a child sends

Work = Callable[[bytes], bytes | None | Iterator[bytes]]


class TooMuch(MinivllmError):
    """The work went over a limit, or brought its process down. The message completes "it ..."."""


class WorkFailed(MinivllmError):
    """The work, or its preparation, raised: a defect. The message is the exception's."""


@dataclass(frozen=True, slots=True)
class Limits:
    seconds: float  # of the clock, for one task
    megabytes: int  # that its tasks may take beyond what it has when it is prepared


class Setup(msgspec.Struct, array_like=True):
    """What a child is told first."""

    setup: bytes
    seconds: float
    megabytes: int


def _always() -> bool:
    return True


class Sandbox:
    """One child. Calls from several threads take turns."""

    def __init__(self, module: str, setup: bytes, limits: Limits):
        """module: has prepare(setup: bytes) -> work(task: bytes) -> bytes, or an iterator of them, which tell of
        expected errors in their answer. Starts nothing yet."""
        self._module, self._setup, self._limits = module, setup, limits
        self._child: _Child | None = None
        self._turn = threading.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the child, if there is one."""
        found = self._child
        return None if found is None else found.process.pid

    def start(self) -> None:
        """Have a child that is prepared. Raises as `run` does."""
        with self._turn:
            if self._is_closed:
                raise Unwanted("nobody waits for it")
            self._prepared()

    def run(self, task: bytes, is_wanted: Callable[[], bool] = _always) -> bytes:
        """Raises TooMuch, Unwanted or WorkFailed. is_wanted: asked now and then; False kills the child."""
        return b"".join(self.stream(task, is_wanted))

    def stream(self, task: bytes, is_wanted: Callable[[], bool] = _always) -> Iterator[bytes]:
        """The parts of the answer as they are made, at most one ahead of the reader; raises as `run`. Nobody else has
        a turn before the last; one that is left before is killed."""
        with self._turn:
            if not is_wanted() or self._is_closed:
                raise Unwanted("nobody waits for it")
            at_work = self._prepared()
            try:
                yield from at_work.answers(task, self._limits.seconds, is_wanted)
            except WorkFailed:
                raise
            except BaseException:
                self._end()
                raise

    def close(self) -> None:
        """End the child, also one at work."""
        self._is_closed = True
        at_work = self._child
        if at_work is not None:
            at_work.process.kill()  # whoever waits for it sees its end
        with self._turn:
            self._end()

    def _prepared(self) -> _Child:
        if self._child is not None and self._child.process.poll() is not None:
            self._end()
        if self._child is None:
            self._child = _Child(self._module)
            limits = self._limits
            try:
                told = msgspec.msgpack.encode(Setup(self._setup, limits.seconds, limits.megabytes))
                for _ in self._child.answers(told, START_SECONDS, lambda: not self._is_closed):
                    pass
            except BaseException:
                self._end()
                raise
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """A process, as its parent sees it."""

    def __init__(self, module: str):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "bufsize": 0}
        self.process = child.start("minivllm.sandbox", module, **pipes)
        self._from_child = self.process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._from_child, select.POLLIN)

    def answers(self, told: bytes, seconds: float, is_wanted: Callable[[], bool]) -> Iterator[bytes]:
        deadline = time.monotonic() + seconds
        try:
            child.send_bytes(self.process, told)
        except BrokenPipeError:
            raise TooMuch(self._how_it_ended()) from None
        kind = _PART
        while kind == _PART:
            length = _LENGTH.unpack(self._read(_LENGTH.size, deadline, seconds, is_wanted))[0]
            sent = self._read(length, deadline, seconds, is_wanted)
            kind, rest = bytes(sent[:1]), bytes(memoryview(sent)[1:])
            if kind == _NO_MEMORY:
                raise TooMuch("takes too much memory")
            if kind == _FAILED:
                raise WorkFailed(rest.decode(errors="replace"))
            yield rest

    def _read(self, size: int, deadline: float, seconds: float, is_wanted: Callable[[], bool]) -> bytearray:
        found = bytearray()
        while len(found) < size:
            if not is_wanted():
                raise Unwanted("nobody waits for it")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TooMuch(f"takes over {seconds:g} s")
            if self._poll.poll(1e3 * min(left, POLL_SECONDS)):
                part = os.read(self._from_child, min(size - len(found), 1 << 20))
                if not part:
                    raise TooMuch(self._how_it_ended())
                found += part
        return found

    def _how_it_ended(self) -> str:
        code = self.process.wait()
        return f"has ended its process by signal {-code}" if code < 0 else f"has ended its process with code {code}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


# ------------------------------------------------------------------------------------------------ in the child


def main(module: str) -> NoReturn:
    orphan.end_in_time()
    child.ignore_interrupts()
    to_parent = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no answer
    told = msgspec.msgpack.decode(child.read_bytes(), type=Setup)
    work: list[Work] = []
    _send(to_parent, _answers(lambda setup: work.append(importlib.import_module(module).prepare(setup)), told.setup))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, _address_space() + (told.megabytes << 20))
    while True:
        task = child.read_bytes()
        _limit_cpu(told.seconds)
        _send(to_parent, _answers(work[0], task))


def _answers(work: Work, task: bytes) -> Iterator[bytes]:
    try:
        made = work(task)
        if made is None or isinstance(made, bytes):
            yield _DONE + (made or b"")
            return
        for part in made:
            yield _PART + part
        yield _DONE
    except MemoryError:
        yield _NO_MEMORY
    except BaseException as error:
        yield _FAILED + f"{type(error).__name__}: {error}".encode(errors="replace")


def _send(to_parent: int, answers: Iterator[bytes]) -> None:
    for answer in answers:
        left = memoryview(_LENGTH.pack(len(answer)) + answer)
        while left:
            left = left[os.write(to_parent, left) :]


def _address_space() -> int:
    """Bytes."""
    import psutil

    return psutil.Process().memory_info().vms


def _limit_cpu(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + CPU_PER_SECOND * seconds) + 1)


def _limit(what: int, most: int) -> None:
    """The soft limit, where the system lets it be set: some take it as a wish (macOS: address space)."""
    hard = resource.getrlimit(what)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main(*sys.argv[1:])
