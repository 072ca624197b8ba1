"""How much CPU time does a server save by writing a stream's pieces past h11?

The time is its process's; the way past h11 is minivllm/serve/quick_send.py. Two servers that differ in nothing but the
class of their connections: QuickProtocol, or PatientProtocol below it, whose pieces go through h11's state machine. The
engine core is in a process of its own and has a model of almost no work, so that tokens come as fast as the server can
take them. In each round both answer the same number of streams, in turns; who goes first changes by the round. What
counts is the server's process alone, not its core's nor the client's.

    python -m bench quick_send --rounds 20 --out
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import psutil
from common import ROOT, emit, note, parser, spread
from http_load import running
from latency import bootstrap_ratio, shown
from serve_overhead import ask, request_of

from minivllm.serve import command, server
from minivllm.serve.patience import PatientProtocol
from minivllm.serve.quick_send import QuickProtocol

PROTOCOLS = {"quick": QuickProtocol, "h11": PatientProtocol}
PROMPT = list(range(10, 26))


def serve_with(name: str, argv: Sequence[str]) -> int:
    """`minivllm.serve` with this class of connections."""
    server.QuickProtocol = PROTOCOLS[name]
    return command.main(argv)


class Side(NamedTuple):
    port: int
    process: psutil.Process

    def us_per_token(self, streams: int, output_len: int) -> float:
        before = self.cpu_seconds()
        asyncio.run(ask(self.port, [request_of(PROMPT, output_len)] * streams))
        return 1e6 * (self.cpu_seconds() - before) / (streams * output_len)

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def started(name: str, model: str, stack: ExitStack) -> Side:
    options = ["--model", model, "--port", "0", "--log-level", "warning", "--set", "engine.core=process"]
    url = stack.enter_context(running([sys.executable, __file__, "--serve-with", name, *options], cwd=ROOT))
    (process,) = [child for child in psutil.Process().children() if name in child.cmdline()]
    return Side(int(url.rpartition(":")[2]), process)


def measure(sides: Mapping[str, Side], args: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds a token, one value a round."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.rounds + 1):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            found[name].append(sides[name].us_per_token(args.streams, args.output_len))
        note(", ".join(f"{name} {values[-1]:.1f} us a token" for name, values in found.items()))
    return {name: values[1:] for name, values in found.items()}  # the first round warms up


def main() -> int:
    p = parser(__doc__.splitlines()[0], "quick_send")
    p.add_argument("--model", default="dummy:tiny")
    p.add_argument("--streams", type=int, default=32, help="at once")
    p.add_argument("--output-len", type=int, default=500, help="tokens of each stream")
    p.add_argument("--rounds", type=int, default=20)
    args = p.parse_args()
    with ExitStack() as stack:
        found = measure({name: started(name, args.model, stack) for name in PROTOCOLS}, args)
    results = {"us_per_token": {name: spread(values) for name, values in found.items()}}
    results["quick_to_h11"] = shown(bootstrap_ratio(found["h11"], found["quick"]))
    note(str(results))
    emit("quick_send", vars(args), results, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(serve_with(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["--serve-with"] else main())
