"""How do TTFT, ITL and throughput of this server compare with those of vLLM's, at the same rates?

Same arrivals, same cores, in turns.

    make peers ARGS="--only vllm"                             vLLM's environment, once
    python -m bench serve_beside --rates 0.5 1 2 --out        all rates, --repetitions times each
    python -m bench serve_beside --only minivllm vllm-unbound

Each server is started once, as its users start it, and keeps its model; who waits for its turn is stopped (SIGSTOP). A
repetition of a rate is one run on each server, with prompts that no run before had; who goes first changes. vLLM has
two settings (see bench/peers), and minivllm serves the default model's own 4-bit weights and, as vLLM does, bf16. What
a figure means is said in bench/goodput.py and bench/latency.py.

Prints one JSON line, and a table for people.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import serve
from common import ROOT, emit, note, parser, spread
from goodput import errors, summary
from http_load import connected, offer
from openai_requests import PATHS, requests_of

sys.path.insert(0, str(ROOT))  # bench.peers is a package of the project's root

from bench.peers.engines import Engine, LeftOut, environment, known_engines, python_of
from bench.peers.install import FOLDER, export_model
from minivllm.config import DEFAULT_MODEL
from minivllm.machine import num_cores

START_SECONDS, STOP_SECONDS = 600, 20
METRICS = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "output_rate", "request_rate", "failed")
SIDES = ("minivllm", "minivllm-bf16", "vllm-unbound", "vllm-bound")


@dataclass
class Side:
    """A server that runs, or waits stopped."""

    name: str
    url: str
    model: str
    process: subprocess.Popen

    def signal(self, number: int) -> None:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for process in (parent, *parent.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()


def command_of(engine: Engine, port: int, args: argparse.Namespace) -> list[str]:
    if engine.family == "vllm":
        python = python_of(engine, args.peers)
        model = str(export_model(args.model, args.peers).absolute())
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        options = ["--dtype", "bfloat16", "--max-model-len", str(args.max_model_len), *shlex.split(args.vllm)]
        return [*command, "--host", "127.0.0.1", "--port", str(port), *options]
    command = [sys.executable, "-m", "minivllm.serve", "--model", args.model, "--port", str(port)]
    command += ["--log-level", "warning", "--set", "engine.core=process", "--max-model-len", str(args.max_model_len)]
    return command + (["--quantization", "none"] if engine.name == "minivllm-bf16" else [])


def start(engine: Engine, args: argparse.Namespace) -> Side:
    """Raises LeftOut."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = command_of(engine, port, args)
    args.logs.mkdir(parents=True, exist_ok=True)
    with open(args.logs / f"serve-{engine.name}.log", "w") as log:
        process = subprocess.Popen(command, env=environment(engine), cwd=args.logs, stdout=log, stderr=log)
    side = Side(engine.name, f"http://127.0.0.1:{port}", "", process)
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            side.model = httpx.get(f"{side.url}/v1/models", timeout=5).json()["data"][0]["id"]
            return side
        time.sleep(0.5)
    side.close()
    raise LeftOut(f"it has not started: see {args.logs / f'serve-{engine.name}.log'}")


async def run(side: Side, arrivals: Sequence[Any], args: argparse.Namespace) -> tuple[dict[str, float], Counter]:
    async with connected(side.url, None, args.timeout) as clients:
        requests = await requests_of(clients.turn(), side.model, arrivals, args)
        answers = await offer(clients, PATHS[args.endpoint], requests)
    return summary(answers, {}), errors(answers)


def turn(side: Side, arrivals: Sequence[Any], args: argparse.Namespace) -> tuple[dict[str, float], Counter]:
    side.signal(signal.SIGCONT)
    try:
        return asyncio.run(run(side, arrivals, args))
    finally:
        side.signal(signal.SIGSTOP)


def measure(sides: Sequence[Side], args: argparse.Namespace) -> list[dict[str, Any]]:
    warm = [arrival._replace(time_s=0.0) for arrival in serve.arrivals_of(args, 1.0, args.seed, args.warmup)]
    for side in sides:
        if failed := turn(side, warm, args)[1]:
            raise SystemExit(f"error: {side.name}: warming up failed: {next(iter(failed))}")
    rows = []
    for number, rate in enumerate(args.rates):
        runs: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
        failures: Counter = Counter()
        for repetition in range(args.repetitions):
            seed = args.seed + 1 + repetition * len(args.rates) + number
            arrivals = serve.arrivals_of(args, rate, seed, serve.num_requests(args, rate))
            for side in sides if repetition % 2 else sides[::-1]:
                found, failed = turn(side, arrivals, args)
                failures += failed
                runs[side.name].append({name: round(value, 4) for name, value in found.items()})
                note(f"{rate:g}/s, {side.name}: " + ", ".join(f"{m} {found[m]:.4g}" for m in METRICS if m in found))
        rows.append({"rate": rate, "runs": runs, "errors": failures})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians, with the range of the repetitions."""
    lines = [f"{'rate':>6} {'server':16}" + "".join(f"{name:>24}" for name in METRICS)]
    for row in summaries(rows):
        cells = [f"{'{median:.4g} ({min:.4g}-{max:.4g})'.format(**row[m]) if m in row else '-':>24}" for m in METRICS]
        lines.append(f"{row['rate']:6g} {row['server']:16}" + "".join(cells))
    return "\n".join(lines)


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each rate and server: the spread of each metric over its runs."""
    found = []
    for row in rows:
        for name, runs in row["runs"].items():
            values = {metric: [run[metric] for run in runs if metric in run] for metric in METRICS}
            spreads = {metric: spread(some, 4) for metric, some in values.items() if some}
            found.append({"rate": row["rate"], "server": name, **spreads})
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__.splitlines()[0], "serve_beside")
    options.add_argument("--only", nargs="+", choices=SIDES, default=SIDES)
    options.add_argument("--model", default=DEFAULT_MODEL)
    options.add_argument("--max-model-len", type=int, default=2048, help="of every server")
    options.add_argument("--rates", nargs="+", type=float, default=[0.5, 1, 2], help="requests a second")
    options.add_argument("--arrivals", choices=("poisson", "fixed"), default="poisson")
    options.add_argument("--workload", choices=serve.STREAMING, default="alpaca")
    options.add_argument("--endpoint", choices=PATHS, default="completions")
    options.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    options.add_argument("--seconds", type=float, default=30, help="of arrivals, a run")
    options.add_argument("--num-requests", type=int, help="of a run, instead of --seconds")
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--warmup", type=int, default=8, help="requests before, not counted")
    options.add_argument("--timeout", type=float, default=600, help="seconds without a byte that end a request")
    options.add_argument("--peers", type=Path, default=FOLDER, help="where make peers has put them")
    options.add_argument("--vllm", default="", metavar="ARGS", help="more options of vLLM's server")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args(argv)
    args.vocab, args.plain, args.logs = serve.vocab_of(args.model), False, args.peers / "logs"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    sides, left_out = [], {}
    with ExitStack() as stack:
        for name in args.only:
            try:
                side = start(known_engines(num_cores())[name], args)
            except LeftOut as reason:
                note(f"{name}: left out, {reason}")
                left_out[name] = str(reason)
                continue
            stack.callback(side.close)
            side.signal(signal.SIGSTOP)
            sides.append(side)
            note(f"{name}: ready")
        rows = measure(sides, args)
    note(table(rows))
    given = {k: str(v) if isinstance(v, os.PathLike) else v for k, v in vars(args).items()}
    for private in ("peers", "logs"):  # paths of one machine
        del given[private]
    emit("serve_beside", given, {"rows": rows, "summary": summaries(rows), "left_out": left_out}, args.out)
    return 0 if sides else 1


if __name__ == "__main__":
    raise SystemExit(main())
