"""Clients: the front ends of one engine core in a process of its own, as one.

    front end 1 --- commands ---\\                       /--- messages ---> front end 1
    front end 2 --- commands ----> take -> StepLoop -> post -- messages ---> front end 2

The step loop takes commands and posts messages as if there were a single front end. Here each request and each call is
remembered with who made it: a step's report is divided by whose requests it is about, an answer goes to who asked, and
what concerns all (the gauges, a stall, the end) goes to all. A front end is known once it has said hello; that is
answered with the facts of the engine as they are then.

Two ZeroMQ sockets in a private folder, so that a front end may send from one thread and read in another. Both belong to
the thread of the step loop, and to its watchdog's while a step runs, never to both at once (watchdog.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import msgspec
import zmq

from minivllm.engine.messages import (
    COMMANDS,
    Abort,
    Adapters,
    Add,
    Call,
    Command,
    Ended,
    Facts,
    Failure,
    Gone,
    Message,
    Refused,
    Report,
    Returned,
)
from minivllm.errors import BadRequest
from minivllm.plan import Delta

COMMANDS_FILE, MESSAGES_FILE = "commands", "messages"
HELLO_SECONDS = 2.0  # how long a core that could not be built waits for somebody to tell
LAST_WORDS_MS = 2000  # how long a core that ends waits until its last messages are on their way

logger = logging.getLogger("minivllm")


class Clients:
    def __init__(self, folder: Path):
        self._context = zmq.Context()
        self._commands = self._bind(zmq.PULL, folder / COMMANDS_FILE)
        self._messages = self._bind(zmq.ROUTER, folder / MESSAGES_FILE)
        self._poller = zmq.Poller()
        for socket in (self._commands, self._messages):
            self._poller.register(socket, zmq.POLLIN)
        self._decoder, self._encoder = msgspec.msgpack.Decoder(COMMANDS), msgspec.msgpack.Encoder(enc_hook=str)
        self._known: dict[bytes, None] = {}  # in the order of their hellos
        self._owners: dict[str, bytes] = {}  # of live sequences, by the id that deltas bear
        self._calls: dict[int, tuple[bytes, Call]] = {}  # unanswered, by the id that the step loop knows
        self._call_ids = count(1)
        self._told_adapters: list[str] = []  # by key; all front ends know of these
        self.facts: Callable[[], Facts] | None = None  # once there is an engine

    def _bind(self, kind: int, path: Path) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(f"ipc://{path}")
        return socket

    def take(self, patience: float | None) -> Command | None:
        """The next command for the step loop. patience: seconds to wait for one; None: as long as it takes."""
        while events := dict(self._poller.poll(None if patience is None else 1e3 * patience)):
            if self._messages in events:
                self._greet(self._messages.recv_multipart()[0])
            if self._commands in events:
                client, data = self._commands.recv_multipart()
                if (command := self._as_of_one(client, self._decoder.decode(data))) is not None:
                    return command
        return None

    def post(self, message: Message) -> None:
        if isinstance(message, Report):
            for client, part in list(self._divided(message)):
                self._send(client, part)
        elif isinstance(message, Refused):
            if (client := self._owners.pop(message.req_id, None)) is not None:
                self._send(client, message)
        elif isinstance(message, Returned):
            self._answer(message)
        else:
            self._send_all(message)

    def tell_end(self, message: Ended) -> None:
        """There is no engine and will be none: whoever says hello is told why."""
        while self._messages.poll(0 if self._known else 1e3 * HELLO_SECONDS):
            client = self._messages.recv_multipart()[0]
            self._known[client] = None
            self._send(client, message)

    def close(self) -> None:
        self._messages.close(linger=LAST_WORDS_MS)
        self._commands.close(linger=0)
        self._context.term()

    def _greet(self, client: bytes) -> None:
        self._known[client] = None
        facts = self.facts()
        self._told_adapters = [adapter.key for adapter in facts.adapters]
        self._send(client, facts)

    def _as_of_one(self, client: bytes, command: Command) -> Command | None:
        """The command as the step loop shall see it; None if there is nothing left to do."""
        if isinstance(command, Add):
            return command if self._own(client, command) else None
        if isinstance(command, Abort):
            command.req_ids = [req_id for req_id in command.req_ids if self._owners.get(req_id) == client]
            return self._disowned(command.req_ids)
        if isinstance(command, Call):
            call_id = next(self._call_ids)
            self._calls[call_id] = (client, command)
            return Call(call_id, command.name, command.args)
        if isinstance(command, Gone):
            gone = command.client.encode()
            self._known.pop(gone, None)
            return self._disowned([req_id for req_id, owner in self._owners.items() if owner == gone])
        return command

    def _own(self, client: bytes, command: Add) -> bool:
        """False, once the client has been told, if the name is another's: two answers could not be told apart."""
        request, ids = command.request, command.sequence_ids
        if any(req_id in self._owners for req_id in ids):
            error = BadRequest(f'request id "{request.id}" is in use by another front end', "request_id")
            self._send(client, Refused(request.id, Failure.of(error)))
            return False
        self._owners.update(dict.fromkeys(ids, client))
        return True

    def _disowned(self, req_ids: list[str]) -> Abort | None:
        for req_id in req_ids:
            del self._owners[req_id]
        return Abort(req_ids) if req_ids else None

    def _divided(self, report: Report) -> Iterator[tuple[bytes, Report]]:
        """Each front end's part: its own requests, and what the step was for all."""
        deltas: dict[bytes, list[Delta]] = {client: [] for client in self._known}
        joined: dict[bytes, list[str]] = {client: [] for client in self._known}
        for req_id in report.joined:
            if (owner := self._owners.get(req_id)) in joined:
                joined[owner].append(req_id)
        for delta in report.deltas:
            if (owner := self._owners.get(delta.req_id)) in deltas:
                deltas[owner].append(delta)
            if delta.finish_reason is not None:
                self._owners.pop(delta.req_id, None)
        for client in self._known:
            part = Report(deltas[client], report.stats, joined[client], report.total_tokens, report.times_ms)
            yield client, part

    def _answer(self, message: Returned) -> None:
        """To who has asked. Other adapters than before are told to all, and before the answer."""
        client, call = self._calls.pop(message.id)
        adapters = self.facts().adapters
        if (keys := [adapter.key for adapter in adapters]) != self._told_adapters:
            self._told_adapters = keys
            self._send_all(Adapters(adapters))
        self._send(client, Returned(call.id, message.value, message.error))

    def _send_all(self, message: Message) -> None:
        for client in self._known:
            self._send(client, message)

    def _send(self, client: bytes, message: Message) -> None:
        """A front end that is gone takes nothing: the socket drops what is for nobody."""
        self._messages.send_multipart([client, self._encoder.encode(message)])
