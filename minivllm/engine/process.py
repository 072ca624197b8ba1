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
from typing import NoReturn

import msgspec

from minivllm import child, logs
from minivllm.config import EngineConfig
from minivllm.engine.clients import Clients
from minivllm.engine.messages import Ended, Failure
from minivllm.engine.pulse import Pulse
from minivllm.errors import EngineDead

STACKS = signal.SIGUSR1  # to the log, of all threads, whoever has Python's lock


class Task(msgspec.Struct):
    config: EngineConfig
    cores: list[int] | None = None  # that it may use; None: those of its parent
    name: str = "engine"  # in the log


class Body(Pulse):
    """This process, as the watchdog knows it."""

    def __init__(self, folder: Path, clients: Clients):
        super().__init__(folder)
        self._clients = clients

    def give_up(self, why: str) -> NoReturn:
        """Those who wait are told, the log gets all threads' stacks, and the process ends without asking them."""
        self._clients.post(Ended(Failure.of(EngineDead(f"{why}. The engine has been ended"))))
        self._clients.close()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def main(folder: str) -> int:
    faulthandler.enable()  # a crash in a kernel leaves a stack
    faulthandler.register(STACKS)
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
        child.freeze_heap()
        clients.facts = partial(facts_of, engine)
        step_loop(engine, clients.take, clients.post, Body(Path(folder), clients)).run()
        code = 0
    except Exception as error:
        clients.tell_end(Ended(Failure.of(error)))
        code = 1
    clients.close()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
