"""ProcessLink: a core in a process of its own (process.py), of which this front end is the parent.

The child's standard input is its lifeline: it ends when its parent does, however that happened. A child that ends by
itself is told of with how it ended and, if engine.restart says so, started again: with the adapters that it had, after
ever longer pauses, until it works or the link is closed. A child that gives no sign of life, or is being built for far
longer than the first one was (pulse.py), is killed, and one whose step does not end ends itself (watchdog.py): to all
others they have ended like any.
"""

from __future__ import annotations

import itertools
import logging
import subprocess
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from minivllm import child
from minivllm.config import EngineConfig
from minivllm.engine.messages import Adapters, Close, Ended, Facts, Message
from minivllm.engine.process import STACKS, Task
from minivllm.engine.pulse import Listener
from minivllm.engine.socket_link import SocketLink
from minivllm.errors import TraceError

CLOSE_SECONDS = 10.0  # how long a core gets to end by itself
RESTART_SECONDS = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)  # before each attempt to start a dead core's process again

logger = logging.getLogger("minivllm")


class ProcessLink(SocketLink):
    """The constructor returns once the engine is ready; it raises what building the engine raised there."""

    def __init__(self, config: EngineConfig, cores: list[int] | None = None, name: str = "engine"):
        """cores: those that it may use; None: as this process. name: in the log."""
        self._task = Task(config, cores, name)
        self._files = child.make_folder()  # nobody else's messages
        self._remove_files = weakref.finalize(self, child.remove_folder, self._files)
        self._built_in: float | None = None  # seconds
        begin = time.monotonic()
        self._child, self._pulse = self._start_child()
        try:
            super().__init__(Path(self._files))
        except BaseException:
            self._end_child()
            self._remove_files()
            raise
        self._built_in = time.monotonic() - begin

    @property
    def is_running(self) -> bool:
        return self._running and self._child.poll() is None

    @property
    def pid(self) -> int:
        return self._child.pid

    def start(self, receive: Callable[[Message], None]) -> None:
        def remember(message: Message) -> None:
            if isinstance(message, Adapters):
                loras = {adapter.name: adapter.path for adapter in message.loaded}
                self._task.config = self._task.config.override({"lora.adapters": loras})
            receive(message)

        super().start(remember)

    def close(self) -> None:
        """End the core; returns once it has ended. A core that has ended already is no error."""
        was_running = self.is_running
        self._closing.set()
        if was_running:
            self.send(Close())
            try:
                self._child.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                logger.error("%s, process %d, does not end: killing it", self._task.name, self.pid)
        self._end_child()  # also one that is being built
        self._release()
        self._end_child()  # also one that the reader has started meanwhile
        self._remove_files()

    def _start_child(self) -> tuple[subprocess.Popen, Listener]:
        pulse = Listener(Path(self._files), self._task.config.engine.step_timeout, self._built_in)
        started = child.start("minivllm.engine.process", self._files)
        child.claimed(self._files)
        child.send_task(started, self._task)
        return started, pulse

    def _end_child(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.stdin.close()
        self._child.wait()

    def _again(self) -> Facts | None:
        if not self._task.config.engine.restart or self._closing.is_set():
            return None
        logger.error("%s: starting it again", self._how_it_ended())
        for seconds in itertools.chain(RESTART_SECONDS, itertools.repeat(RESTART_SECONDS[-1])):
            if self._closing.wait(seconds):
                return None
            self._end_child()
            self._disconnect()
            self._child, self._pulse = self._start_child()
            self._connect()
            message = self._next()
            if isinstance(message, Facts):
                logger.info("%s is ready again", self._task.name)
                return message
            if isinstance(message, Ended) and not self._closing.is_set():
                logger.error("%s does not start: %s", self._task.name, message.error.text)
                if message.error.kind == TraceError.__name__:  # it could be written at first: not worth the service
                    self._task.config = self._task.config.override({"debug.trace": None})
        return None

    def _is_gone(self) -> bool:
        if self._child.poll() is not None:
            return True
        if self._pulse.is_lost:
            self._child.kill()
        else:
            self._pulse.look()
            if self._pulse.is_lost:
                logger.error("%s, process %d, hangs: it tells where, and is killed", self._task.name, self.pid)
                self._child.send_signal(STACKS)  # until the next look
        return False

    def _how_it_ended(self) -> str:
        try:
            code = self._child.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return "the engine's process has closed its sockets"
        if self._closing.is_set():
            return "the engine was shut down"
        if self._pulse.is_lost:  # it was stopped, or something in it held Python's lock
            return f"the engine's process has {self._pulse.what} and is killed"
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"the engine's process has ended {how}"
