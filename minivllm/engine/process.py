"""The engine core as a process: `python -m minivllm.engine.process FOLDER`, started by ProcessLink and nobody else.

Its task comes as one line of JSON on standard input, which then stays open: its end means that the parent is gone, and
this process with it. Commands and messages pass through two ZeroMQ sockets in FOLDER (clients.py).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from functools import partial
from pathlib import Path

import msgspec

from minivllm import child, logs
from minivllm.config import EngineConfig
from minivllm.engine.clients import Clients
from minivllm.engine.messages import Ended, Failure


class Task(msgspec.Struct):
    config: EngineConfig
    cores: list[int] | None = None  # that it may use; None: those of its parent
    name: str = "engine"  # in the log


def main(folder: str) -> int:
    faulthandler.enable()  # a crash in a kernel leaves a stack
    # A terminal and systemd signal all of a group's processes: what it means is the parent's to say, whose clients want
    # to be told first.
    child.ignore_interrupts()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    task = child.read_task(Task, [folder])
    child.end_with_parent([folder])
    if task.cores is not None:
        os.sched_setaffinity(0, task.cores)  # before torch counts them
    config = task.config
    logs.setup(config.engine.log_format, process=task.name)
    clients = Clients(Path(folder))
    try:
        from minivllm.engine.build import build
        from minivllm.engine.link import facts_of, step_loop

        engine = build(config)
        clients.facts = partial(facts_of, engine)
        step_loop(engine, clients.take, clients.post).run()
        code = 0
    except Exception as error:
        clients.tell_end(Ended(Failure.of(error)))
        code = 1
    clients.close()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
