"""One of several servers of one engine: `python -m minivllm.serve.front_end`, started by front_ends.py and nobody else.

Its task comes as one line of JSON on standard input, which then stays open: its end means that the parent is gone, and
this process with it. It reads the same command line as its parent did, so that all its options mean the same here.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import msgspec

from minivllm import child, logs
from minivllm.config import EngineConfig
from minivllm.serve import access, command, hosts, operate

LEDGER = "ledger"  # a file of the folder that servers share


class Task(msgspec.Struct):
    argv: list[str]
    prog: str
    config: EngineConfig  # of the engine as a whole
    address: tuple[str, int]
    shared: str  # a folder of all servers of the engine: what they count (shared_metrics.py, shared_ledger.py)
    folders: list[str] = []  # of the cores' sockets
    secret: bytes = b""  # that keeps API keys apart in the engine's prefix cache
    number: int = 0
    name: str = ""  # no other server's, now or before
    ready: int = -1  # a file: something is written there once requests are taken
    first: bool = True  # it says what is served


def listen_beside(listener: socket.socket) -> socket.socket:
    """A socket at the same address that lets others join; `listener` had it alone and gives it up."""
    family, address = listener.family, listener.getsockname()
    listener.close()
    return join(family, address)


def join(family: socket.AddressFamily, address: tuple) -> socket.socket:
    joined = socket.socket(family, socket.SOCK_STREAM)
    joined.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    joined.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    joined.bind(address)
    return joined


def main() -> int:
    child.ignore_interrupts()  # until the server gives them a meaning
    task = child.read_task(Task)
    child.end_with_parent([task.shared])
    args = command.parser(task.prog).parse_args(task.argv)
    logs.setup(args.log_format, args.log_level, process=f"server {task.number}")
    command.quiet_others()
    from minivllm.engine.async_llm import AsyncLLM
    from minivllm.engine.replicas import over
    from minivllm.engine.socket_link import SocketLink
    from minivllm.serve.live import Place
    from minivllm.serve.server import Server
    from minivllm.serve.shared_ledger import SharedLedger
    from minivllm.serve.shared_metrics import SharedMetrics

    links = [SocketLink(Path(folder), task.name) for folder in task.folders]
    engine = AsyncLLM.over(over(task.config, links), task.number)
    names, tls = args.served_model_name or [task.config.model.path], access.tls_options(args)
    own = {"secret": task.secret, "place": Place(task.number, args.api_servers)}
    own["ledger"] = SharedLedger(Path(task.shared) / LEDGER, task.number, args.api_servers, task.secret)
    own["host_names"] = hosts.names(args.allowed_host, args.host, task.address[0])
    app_options = access.app_options(args) | operate.app_options(args) | own
    app, parsers = command.application(args, engine, names, app_options)
    shared = SharedMetrics(Path(task.shared), task.name, app.state.service.metrics)
    family = socket.AF_INET6 if ":" in task.address[0] else socket.AF_INET
    with join(family, task.address) as listener:

        def announce() -> None:
            child.freeze_heap()
            if task.first:
                command.report(engine, names, command.url_of(listener, bool(tls)), parsers)
                sys.stdout.flush()
            os.write(task.ready, b"+")

        grpc = command.grpc_server(args, app, tls)
        beside = [shared.kept(), *([grpc.running()] if grpc else [])]
        return Server(app, announce, beside, **tls).run_on(listener)


if __name__ == "__main__":
    sys.exit(main())
