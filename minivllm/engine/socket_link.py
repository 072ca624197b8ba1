"""SocketLink: a core that is a process, whoever its parent is: ZeroMQ over socket files in a private folder.

    hello                 ---- messages ---->  ROUTER      by name, so that the core knows whom to answer (clients.py)
    receive(message)      <--- messages -----
    send(command)         ---- commands ---->  PULL        from another thread: a socket belongs to one at a time

A core that dies closes its end, which the operating system tells at once: `Ended`. From then on the link says hello
through a new socket until somebody answers: `Facts` again. For commands there is none meanwhile: it would keep what was
meant for the old core, and give it to the new one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

import msgspec
import zmq

from minivllm.engine.clients import COMMANDS_FILE, MESSAGES_FILE
from minivllm.engine.link import Receive
from minivllm.engine.messages import MESSAGES, Command, Ended, Facts, Failure, Gone, Message
from minivllm.errors import EngineDead

logger = logging.getLogger("minivllm")

LOOK_MS = 200  # how often what no socket tells is looked at
LAST_WORDS_MS = 50  # how long the last message of a core that has ended may still be under way


class SocketLink:
    """The constructor returns once the engine is ready; it raises what building the engine raised there."""

    def __init__(self, folder: Path, client: str = "front-end"):
        """folder: where the core's socket files are. client: this front end's name, no other's, now or before."""
        self.folder, self.client = folder, client
        self._context = zmq.Context()
        self._decoder, self._encoder = msgspec.msgpack.Decoder(MESSAGES), msgspec.msgpack.Encoder()
        self._commands: zmq.Socket | None = None  # while a core is there
        self._sending = threading.Lock()  # the commands' socket: whoever sends, and the reader that renews it
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._running = False
        try:
            self._connect()
            first = self._next()
            if isinstance(first, Ended):
                raise first.error.exception()
        except BaseException:
            self._disconnect()
            self._context.term()
            raise
        self._open()
        self.facts: Facts = first

    def start(self, receive: Receive) -> None:
        self._thread = threading.Thread(target=self._read, args=(receive,), name="minivllm-link", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """A core that is gone takes nothing: Ended says so, or has said so."""
        data = self._encoder.encode(command)
        with self._sending, contextlib.suppress(zmq.Again):
            if self._commands is not None:
                self._commands.send_multipart([self.client.encode(), data], zmq.NOBLOCK)

    def close(self) -> None:
        """The core goes on, without this front end and its requests."""
        self.send(Gone(self.client))
        self._closing.set()
        self._release(linger=LOOK_MS)

    @property
    def is_running(self) -> bool:
        return self._running

    def _connect(self) -> None:
        self._messages = self._socket(zmq.DEALER)
        self._messages.identity = self.client.encode()
        self._loss = self._messages.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._messages.connect(f"ipc://{self.folder / MESSAGES_FILE}")
        self._poller = zmq.Poller()
        self._poller.register(self._messages, zmq.POLLIN)
        self._poller.register(self._loss, zmq.POLLIN)
        self._messages.send(b"hello")

    def _disconnect(self) -> None:
        self._messages.disable_monitor()
        self._loss.close(linger=0)
        self._messages.close()

    def _open(self) -> None:
        """For commands: a core is there, and has said so."""
        with self._sending:
            self._commands = self._socket(zmq.PUSH)
            self._commands.connect(f"ipc://{self.folder / COMMANDS_FILE}")
        self._running = True

    def _shut(self, linger: int = 0) -> None:
        """linger: milliseconds for the last command to leave in."""
        with self._sending:
            if self._commands is not None:
                self._commands.close(linger=linger)
                self._commands = None

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0  # a closed socket drops what nobody will read
        socket.set_hwm(0)
        return socket

    def _read(self, receive: Receive) -> None:
        """Whoever receives must not raise; if they do, nothing is read any more, and nobody may take it for life."""
        try:
            self._read_on(receive)
        except Exception as error:
            logger.exception("the engine's messages are not read any more")
            self._running = False
            receive(
                Ended(Failure.of(EngineDead(f"its messages are not read any more: {type(error).__name__}: {error}")))
            )

    def _read_on(self, receive: Receive) -> None:
        while True:
            message = self._next()
            if not isinstance(message, Ended):
                receive(message)
                continue
            self._running = False
            if not self._closing.is_set():  # else the core may be there, and the last command on its way to it
                self._shut()
            receive(message)
            if (facts := self._again()) is None:
                return
            self._open()
            receive(facts)

    def _next(self) -> Message:
        """The next message; Ended once the core is gone, or this link closed."""
        lost = False
        while not self._closing.is_set():
            events = dict(self._poller.poll(LAST_WORDS_MS if lost else LOOK_MS))
            if self._messages in events:
                return self._decoder.decode(self._messages.recv())
            if lost:
                return Ended(Failure.of(EngineDead(self._how_it_ended())))
            if self._loss in events:
                self._loss.recv_multipart()
            lost = self._loss in events or self._is_gone()  # then look once more: its last words may have come
        return Ended(Failure.of(EngineDead("the engine was shut down")))

    def _again(self) -> Facts | None:
        """The facts of the core that follows one that ended; None if the link is closed before there is one."""
        while not self._closing.is_set():
            self._disconnect()
            self._connect()
            if isinstance(message := self._next(), Facts):
                return message
        return None

    def _is_gone(self) -> bool:
        """Whether more is known than what the socket tells: a core that never was there closes nothing."""
        return False

    def _how_it_ended(self) -> str:
        return "the engine's process has ended"

    def _release(self, linger: int = 0) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if not self._context.closed:
            self._shut(linger)
            self._disconnect()
            self._context.term()
