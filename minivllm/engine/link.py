"""Links: how a front end reaches its engine core, in a thread of this process or in a process of its own.

    front end (event loop)                          core
    send(Add | Abort | Close)  ---- commands ---->  StepLoop
    receive(message)           <---- messages ----  Report a step, Refused, Ended

In one process nothing is copied, but the step loop and the front end (tokenising, detokenising, HTTP) share Python's
lock. In a process of its own (vLLM V1's design) the core never waits for them, and its death is something that the
front end can outlive: ZeroMQ over a socket file in a private folder, MessagePack on it, the child's standard input as
its lifeline: it ends when its parent does, however that happened.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from minivllm.config import EngineConfig
from minivllm.engine.build import Engine
from minivllm.engine.messages import MESSAGES, Close, Command, Ended, Facts, Failure, Message
from minivllm.engine.step_loop import StepLoop
from minivllm.errors import EngineDead

CLOSE_SECONDS = 10.0  # how long a core gets to end by itself

Receive = Callable[[Message], None]


class Link(Protocol):
    facts: Facts

    def start(self, receive: Receive) -> None:
        """From now on receive(message) is called for each message, in threads of the link's own."""
        ...

    def send(self, command: Command) -> None: ...

    def close(self) -> None:
        """End the core; returns once it has ended. A core that has ended already is no error."""
        ...

    @property
    def is_running(self) -> bool: ...


def facts_of(engine: Engine) -> Facts:
    return Facts(
        engine.config,
        list(engine.decisions),
        engine.max_model_len,
        engine.model_name,
        str(engine.tokenizer_dir),
        engine.info,
        list(engine.adapters.loaded.values()),
    )


class ThreadLink:
    """The core in a thread. Commands are objects in a queue."""

    def __init__(self, engine: Engine):
        self.core = engine.core
        self.calls = engine.calls
        self.facts = facts_of(engine)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, receive: Receive) -> None:
        loop = StepLoop(self.core, self.calls, self._take, receive, self.facts.config.engine.step_timeout)
        self._thread = threading.Thread(target=loop.run, name="minivllm-step", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def close(self) -> None:
        if self._thread is None:
            self.core.shutdown()
        elif self._thread.is_alive():
            self._inbox.put(Close())
            self._thread.join()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _take(self, block: bool) -> Command | None:
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(block)
        return None


class ProcessLink:
    """The core in a process of its own (engine/process.py). The constructor returns once its engine is ready.

    Raises what building the engine raised there.
    """

    def __init__(self, config: EngineConfig):
        import zmq

        self._folder = tempfile.TemporaryDirectory(prefix="minivllm-")  # mode 700: nobody else's messages
        self._context = zmq.Context()
        self._commands = self._socket(zmq.PUSH, "commands")
        self._messages = self._socket(zmq.PULL, "messages")
        self._lock = threading.Lock()  # sockets belong to one thread at a time
        self._thread: threading.Thread | None = None
        self._closing = False
        self._decoder = msgspec.msgpack.Decoder(MESSAGES)
        self._encoder = msgspec.msgpack.Encoder()
        command = [sys.executable, "-m", "minivllm.engine.process", self._folder.name]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            self._child.stdin.write(msgspec.json.encode(config) + b"\n")
            self._child.stdin.flush()  # and it stays open: the lifeline
            first = self._wait()
            if isinstance(first, Ended):
                raise first.error.exception()
        except BaseException:
            self._release()
            raise
        self.facts: Facts = first

    def _socket(self, kind: int, name: str):
        socket = self._context.socket(kind)
        socket.linger = 0  # a closed socket drops what nobody will read
        socket.set_hwm(0)
        socket.bind(f"ipc://{Path(self._folder.name, name)}")
        return socket

    def start(self, receive: Receive) -> None:
        def read() -> None:
            while True:
                message = self._wait()
                receive(message)
                if isinstance(message, Ended):
                    return

        self._thread = threading.Thread(target=read, name="minivllm-link", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """A core that is gone takes nothing: Ended says so, or has said so."""
        import zmq

        with self._lock, contextlib.suppress(zmq.Again):
            if not self._commands.closed:
                self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    def close(self) -> None:
        self._closing = True
        if self._child.poll() is None:
            self.send(Close())
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(CLOSE_SECONDS)
        self._release()

    @property
    def is_running(self) -> bool:
        return self._child.poll() is None

    @property
    def pid(self) -> int:
        return self._child.pid

    def _wait(self) -> Message:
        """The next message. A child that is gone gives Ended, with how it went."""
        while not self._messages.poll(200):
            if self._child.poll() is not None and not self._messages.poll(0):
                return Ended(Failure.of(EngineDead(_how_it_ended(self._child.returncode, self._closing))))
        return self._decoder.decode(self._messages.recv())

    def _release(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.stdin.close()
        self._child.wait()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            self._commands.close()
        self._messages.close()
        self._context.term()
        self._folder.cleanup()


def _how_it_ended(code: int, closing: bool) -> str:
    if closing:
        return "the engine was shut down"
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return f"the engine's process has ended {how}"
