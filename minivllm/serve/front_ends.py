"""`serve --api-servers N`: this process holds the port, the engine's cores and N servers (front_end.py), and answers
nothing itself.

    this process --- lifeline ---> core(s)  <--- ZeroMQ ---> server 1 \\
                 --- lifeline ---> servers 1 .. N            ..        > one port (SO_REUSEPORT): the kernel deals out
                                                             server N /  connections

Each server talks to each core by itself (engine/clients.py). A server that dies is started again, and the cores are
told that nobody reads the answers to its requests. A core that dies is started again by its link here, and found again
by the servers' links. Should this process die, however that happened, all others end with it.

What is one for all: the engine with its queue, adapters and prefix cache (also what keeps API keys apart in it), what
each client holds and may still have (shared_ledger.py), and /metrics, whichever server answers.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from minivllm import child
from minivllm.config import EngineConfig
from minivllm.engine.frontend import make_config
from minivllm.engine.messages import Gone
from minivllm.engine.process_link import RESTART_SECONDS, ProcessLink
from minivllm.engine.replicas import start_processes
from minivllm.serve import access, command, shared_ledger
from minivllm.serve.front_end import LEDGER, Task, listen_beside
from minivllm.serve.pooling import for_serving
from minivllm.serve.server import GRACE_SECONDS
from minivllm.terminal import fail, interrupts_end_at_once

LOOK_SECONDS = 0.1  # how often it is looked whether all servers run
STOP_SECONDS = GRACE_SECONDS + 5.0  # how long servers get to tell their clients and end
LONG_LIFE_SECONDS = 60.0  # a server that ran so long has not failed to start

logger = logging.getLogger("minivllm.serve")


def serve_together(
    args: argparse.Namespace, argv: Sequence[str], prog: str, options: dict[str, Any], listener: socket.socket
) -> int:
    """options: AsyncLLM's. listener: owns the port, so far. Returns the exit code."""
    begin = time.perf_counter()
    config = shared_config(args, options)
    with listen_beside(listener) as held, ExitStack() as stack:
        command.announce_loading(options)
        with interrupts_end_at_once():
            cores = start_processes(config)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="minivllm-"))
        try:
            shared_ledger.create(Path(folder) / LEDGER, args.api_servers)
        except OSError as error:
            fail(f"--api-servers {args.api_servers}: {folder}: {error.strerror}")
        servers = Servers(args.api_servers, cores, Task(list(argv), prog, config, held.getsockname()[:2], folder))
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        try:
            if not servers.start(stop):
                return 0 if stop.is_set() else 1
            command.announce_ready(begin, args, held, bool(access.tls_options(args)), args.grpc_port)
            while not stop.wait(LOOK_SECONDS):
                servers.look()
            return 0
        finally:
            servers.stop()
            with ThreadPoolExecutor(len(cores)) as pool:
                list(pool.map(ProcessLink.close, cores))


def shared_config(args: argparse.Namespace, options: dict[str, Any]) -> EngineConfig:
    """Exits where several servers cannot share the engine."""
    if not hasattr(socket, "SO_REUSEPORT"):
        fail(f"--api-servers {args.api_servers}: this system cannot share a port among processes")
    given = for_serving(options, access.keys_of(args))
    config = make_config(given.pop("model", None), given.pop("preset"), given.pop("overrides"), given)
    if config.engine.core != "process":
        fail(f"--api-servers {args.api_servers} needs engine.core=process: servers share what is in none of them")
    return config


@dataclass(slots=True)
class Started:
    """A server that runs, or has."""

    name: str
    process: subprocess.Popen
    ready: int  # the end of a pipe that becomes readable
    since: float = field(default_factory=time.monotonic)


class Servers:
    def __init__(self, number: int, cores: Sequence[ProcessLink], task: Task):
        """task: what the servers have in common."""
        task.folders = [str(core.folder) for core in cores]
        task.secret = os.urandom(16)
        self._ledger = shared_ledger.SharedLedger(Path(task.shared) / LEDGER, None, number, task.secret)
        self._task, self._cores = task, cores
        self._running: dict[int, Started | None] = dict.fromkeys(range(number))  # by number; None: not yet, or dead
        self._num_starts = 0
        self._num_failures = dict.fromkeys(range(number), 0)  # in a row
        self._not_before = dict.fromkeys(range(number), 0.0)
        for core in cores:
            core.start(lambda message: None)  # its link starts it again if need be; the news are for the servers

    def start(self, stop: threading.Event) -> bool:
        """All of them. False if one has ended before it was ready, or `stop` is set meanwhile."""
        for number in self._running:
            self._start(number)
        waiting = [started for started in self._running.values() if started is not None]
        while waiting and not stop.is_set():
            ready, _, _ = select.select([started.ready for started in waiting], [], [], LOOK_SECONDS)
            for started in [started for started in waiting if started.ready in ready]:
                if not os.read(started.ready, 1):
                    return False
                waiting.remove(started)
        return not stop.is_set()

    def look(self) -> None:
        """Start again what has ended: at once after a long life, after ever longer pauses if it does not live long."""
        now = time.monotonic()
        for number, started in self._running.items():
            if started is None:
                if now >= self._not_before[number]:
                    self._start(number)
            elif (code := started.process.poll()) is not None:
                self._bury(number, started)
                failures = 0 if now - started.since > LONG_LIFE_SECONDS else self._num_failures[number]
                self._not_before[number] = now + RESTART_SECONDS[min(failures, len(RESTART_SECONDS) - 1)]
                self._num_failures[number] = failures + 1
                how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
                logger.error("server %d (process %d) has ended %s: starting it again", number, started.process.pid, how)

    def stop(self) -> None:
        """End all: politely, so that they tell their clients, and those that do not end in time at once."""
        running = [started for started in self._running.values() if started is not None]
        for started in running:
            started.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for started in running:
            try:
                started.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.error("%s does not end: killing it", started.name)
                started.process.kill()
                started.process.wait()
            started.process.stdin.close()
            os.close(started.ready)

    def _start(self, number: int) -> None:
        self._num_starts += 1
        ready, tell = os.pipe()
        name = f"server-{number}.{self._num_starts}"
        first = self._num_starts == 1
        task = msgspec.structs.replace(self._task, number=number, name=name, ready=tell, first=first)
        process = child.start("minivllm.serve.front_end", pass_fds=(tell,))
        os.close(tell)
        child.send_task(process, task)
        self._running[number] = Started(task.name, process, ready)

    def _bury(self, number: int, started: Started) -> None:
        for core in self._cores:
            core.send(Gone(started.name))
        self._ledger.forget_server(number)
        started.process.stdin.close()
        os.close(started.ready)
        self._running[number] = None
