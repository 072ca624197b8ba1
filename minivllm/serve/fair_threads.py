"""A few threads for the work of clients, none of whom has them all: one is left to whoever else comes.

Each client's work is done in its order, and of those that wait whoever has had least is next, by the size of what was
begun: the fair queueing of scheduler/fair.py, with bytes in the place of tokens. Who comes anew begins level with the
one that has had least, and before it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

R = TypeVar("R")


@dataclass(slots=True)
class _Line:
    """A client's."""

    had: int  # the size of what was begun, and where it was level with others when it came
    came: int
    jobs: deque[tuple[Future, int, Callable[[], Any]]] = field(default_factory=deque)
    num_running: int = 0


class FairThreads:
    def __init__(self, num_threads: int, name: str):
        """num_threads: 2 or more. A thread is started when it is first needed, and stays; the process ends without it,
        whatever it does then."""
        self._num_threads, self._name = num_threads, name
        self._begun: queue.SimpleQueue[tuple[str, Future, Callable[[], Any]]] = queue.SimpleQueue()
        self._num_started, self._num_free, self._most_each = 0, num_threads, num_threads - 1
        self._lines: dict[str, _Line] = {}  # of clients with work here
        self._num_came = 0
        self._lock = threading.Lock()

    def submit(self, client: str, size: int, work: Callable[[], R]) -> Future[R]:
        """A result that is cancelled before a thread has begun with it is never made."""
        future: Future[R] = Future()
        with self._lock:
            if (line := self._lines.get(client)) is None:
                self._num_came += 1
                least = min((other.had for other in self._lines.values()), default=0)
                self._lines[client] = line = _Line(least, self._num_came)
            line.jobs.append((future, size, work))
            self._begin()
        return future

    @property
    def is_busy(self) -> bool:
        return self._num_free < self._num_threads

    def _begin(self) -> None:
        """What there are threads for."""
        while self._num_free:
            able = [item for item in self._lines.items() if item[1].jobs and item[1].num_running < self._most_each]
            if not able:
                return
            client, line = min(able, key=lambda item: (item[1].had, -item[1].came))
            future, size, work = line.jobs.popleft()
            if not future.set_running_or_notify_cancel():
                self._forget_if_idle(client)
                continue
            line.had += size
            line.num_running += 1
            self._num_free -= 1
            self._begun.put((client, future, work))
            if self._num_threads - self._num_free > self._num_started:
                self._num_started += 1
                threading.Thread(target=self._run, name=f"{self._name}-{self._num_started}", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work()

    def _work(self) -> None:
        client, future, work = self._begun.get()
        try:
            result, error = work(), None
        except BaseException as raised:
            result, error = None, raised
        del work  # and what it holds, before anybody is told
        with self._lock:
            self._num_free += 1
            self._lines[client].num_running -= 1
            self._forget_if_idle(client)
            self._begin()
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _forget_if_idle(self, client: str) -> None:
        line = self._lines[client]
        if not (line.jobs or line.num_running):
            del self._lines[client]
