"""The engine core as a process: `python -m minivllm.engine.process FOLDER`, started by ProcessLink and nobody else.

The configuration comes as one line of JSON on standard input, which then stays open: its end means that the parent is
gone, and this process with it. Commands and messages pass through two ZeroMQ sockets in FOLDER.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from minivllm import logs
from minivllm.config import EngineConfig
from minivllm.engine.messages import COMMANDS, Command, Ended, Failure, Message


def main(folder: str) -> int:
    faulthandler.enable()  # a crash in a kernel leaves a stack
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    logs.setup(config.engine.log_format, process="engine")
    context = zmq.Context()
    commands, messages = (
        _connect(context, zmq.PULL, folder, "commands"),
        _connect(context, zmq.PUSH, folder, "messages"),
    )
    encoder, decoder = msgspec.msgpack.Encoder(enc_hook=str), msgspec.msgpack.Decoder(COMMANDS)

    def take(block: bool) -> Command | None:
        if not block and not commands.poll(0):
            return None
        return decoder.decode(commands.recv())

    lock = threading.Lock()  # the step loop and its watchdog; sockets belong to one thread at a time

    def post(message: Message) -> None:
        data = encoder.encode(message)
        with lock:
            messages.send(data)

    try:
        from minivllm.engine.build import build
        from minivllm.engine.link import facts_of
        from minivllm.engine.step_loop import StepLoop

        engine = build(config)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        post(facts_of(engine))
        StepLoop(engine.core, engine.calls, take, post, config.engine.step_timeout).run()
        code = 0
    except Exception as error:
        post(Ended(Failure.of(error)))
        code = 1
    messages.close(linger=2000)
    commands.close(linger=0)
    context.term()
    return code


def _connect(context: zmq.Context, kind: int, folder: str, name: str) -> zmq.Socket:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.connect(f"ipc://{Path(folder, name)}")
    return socket


def _die_with_parent() -> None:
    # Nothing more is ever written: this returns b"" when the pipe's other end is gone. Not through sys.stdin: an
    # interpreter that ends would wait for its lock.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
