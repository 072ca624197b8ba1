"""What do HTTP and the processes of a server cost, against the offline engine on the same requests?

On the same cores, in turns.

    python -m bench serve_overhead --rounds 7 --out

    throughput   --streams requests at once, each --input-len tokens in and --output-len out: `LLM.generate` against as
                 many concurrent streams. overhead = 1 - the server's output tokens a second / the offline engine's.
    TTFT         one request at a time, --singles of them: until `LLM` has the first token, and until a client has read
                 it. added = the difference of a round's medians.
    CPU          microseconds a token, of the server's process (HTTP, detokenising), of its engine core's and of the
                 client, which shares the cores and so is part of the overhead. It reads bytes and looks at them later.

Each side is loaded once and waits asleep for its turn; who goes first changes by the round. Prompts are new in every
round, the same for both sides, whose texts are compared: `same` is the share of requests with equal ones (below 1 only
by rounding: batches are put together in another order).

Prints one JSON line. `--before FOLDER` runs another checkout's in turns with this one's: what has a change cost?
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import before
import numpy as np
import psutil
from common import emit, note, parser, spread
from serve import server
from workloads import FIRST_ID, vocab_of

from minivllm.config import DEFAULT_MODEL, parse_set

Prompts = list[list[int]]

# -------------------------------------------------------------------------------------------- offline, in a process


def serve_offline() -> None:
    """Answer jobs, one JSON line each, until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    from minivllm import LLM, SamplingParams

    options = json.loads(sys.stdin.readline())
    llm = LLM(options["model"], overrides=options["overrides"])
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=job["num_tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "texts": [out.outputs[0].text for out in outputs]}), file=answers)


class Offline:
    def __init__(self, model: str, overrides: dict[str, Any]):
        command = [sys.executable, __file__, "--serve-offline"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask({"model": model, "overrides": overrides})

    def generate(self, prompts: Prompts, num_tokens: int) -> tuple[float, list[str]]:
        """(seconds, texts)"""
        answer = self._ask({"prompts": prompts, "num_tokens": num_tokens})
        return answer["seconds"], answer["texts"]

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: the offline engine ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


# -------------------------------------------------------------------------------------------- over HTTP


class Stream(asyncio.Protocol):
    """A client that does as little as one can: it notes when which bytes came."""

    def __init__(self, request: bytes):
        self.request = request
        self.pieces: list[tuple[float, bytes]] = []
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.sent = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None) if error is None else self.done.set_exception(error)

    @property
    def first_token(self) -> float:
        """When the first event with text came."""
        seen = b""
        for when, data in self.pieces:
            seen += data
            if b'"text":"' in seen and any(event_text(event) for event in events_of(seen)):
                return when
        raise SystemExit(f"error: no token came: {seen[:300]!r}")

    @property
    def text(self) -> str:
        return "".join(event_text(event) for event in events_of(b"".join(data for _, data in self.pieces)))


def events_of(answer: bytes) -> list[dict[str, Any]]:
    """Of a chunked HTTP answer, one or more events a chunk, so that no event is cut by a chunk's end."""
    head, _, _ = answer.partition(b"\r\n")
    if not head.endswith(b"200 OK"):
        raise SystemExit(f"error: {answer[:300].decode(errors='replace')}")
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {") and line.endswith(b"}")]
    return [json.loads(line[6:]) for line in lines]


def event_text(event: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def request_of(prompt: list[int], num_tokens: int) -> bytes:
    fields = {"prompt": prompt, "max_tokens": num_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def ask(port: int, requests: Sequence[bytes]) -> list[Stream]:
    """All at once."""
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda r=r: Stream(r), "127.0.0.1", port) for r in requests]
    streams = [stream for _, stream in made]
    await asyncio.gather(*(stream.done for stream in streams))
    return streams


# -------------------------------------------------------------------------------------------- rounds


@dataclass
class Found:
    """One value a round."""

    offline_rate: list[float] = field(default_factory=list)
    server_rate: list[float] = field(default_factory=list)
    overhead: list[float] = field(default_factory=list)
    offline_ttft_ms: list[float] = field(default_factory=list)
    server_ttft_ms: list[float] = field(default_factory=list)
    added_ttft_ms: list[float] = field(default_factory=list)
    server_us: list[float] = field(default_factory=list)
    core_us: list[float] = field(default_factory=list)
    client_us: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)


class Bench:
    def __init__(self, offline: Offline, url: str, args: argparse.Namespace):
        self.offline, self.port, self.args = offline, int(url.rpartition(":")[2]), args
        children = psutil.Process().children()
        (self.server,) = [child for child in children if "minivllm.serve" in child.cmdline()]
        self.random = np.random.default_rng(args.seed)

    def prompts(self, num: int) -> Prompts:
        return self.random.integers(FIRST_ID, self.args.vocab, (num, self.args.input_len)).tolist()

    def round(self, number: int, found: Found) -> None:
        prompts, singles = self.prompts(self.args.streams), self.prompts(self.args.singles)
        sides = [lambda: self.run_offline(prompts, singles, found), lambda: self.run_server(prompts, singles, found)]
        texts = [side() for side in (sides if number % 2 else sides[::-1])]
        found.same.append(sum(a == b for a, b in zip(*texts, strict=True)) / len(prompts))
        found.overhead.append(1 - found.server_rate[-1] / found.offline_rate[-1])
        found.added_ttft_ms.append(found.server_ttft_ms[-1] - found.offline_ttft_ms[-1])

    def run_offline(self, prompts: Prompts, singles: Prompts, found: Found) -> list[str]:
        seconds, texts = self.offline.generate(prompts, self.args.output_len)
        found.offline_rate.append(len(prompts) * self.args.output_len / seconds)
        first = [self.offline.generate([prompt], 1)[0] for prompt in singles]
        found.offline_ttft_ms.append(1e3 * statistics.median(first))
        return texts

    def run_server(self, prompts: Prompts, singles: Prompts, found: Found) -> list[str]:
        requests = [request_of(prompt, self.args.output_len) for prompt in prompts]
        processes = [self.server, *self.server.children(recursive=True)]
        before, begin = self.cpu(processes), time.perf_counter()
        streams = asyncio.run(ask(self.port, requests))
        seconds = max(stream.pieces[-1][0] for stream in streams) - begin
        num_tokens = len(prompts) * self.args.output_len
        used = [1e6 * (now - then) / num_tokens for now, then in zip(self.cpu(processes), before, strict=True)]
        found.server_rate.append(num_tokens / seconds)
        found.server_us.append(used[0])
        found.core_us.append(sum(used[1:-1]))
        found.client_us.append(used[-1])
        first = [asyncio.run(ask(self.port, [request_of(prompt, 2)]))[0] for prompt in singles]
        found.server_ttft_ms.append(1e3 * statistics.median(stream.first_token - stream.sent for stream in first))
        return [stream.text for stream in streams]

    def cpu(self, processes: Sequence[psutil.Process]) -> list[float]:
        """Seconds of each process, and of this one."""
        times = [process.cpu_times() for process in (*processes, psutil.Process())]
        return [time.user + time.system for time in times]


def measure(offline: Offline, url: str, args: argparse.Namespace) -> dict[str, Any]:
    bench, found = Bench(offline, url, args), Found()
    bench.round(0, Found())  # warms up
    for number in range(args.rounds):
        bench.round(number, found)
        last = {name: values[-1] for name, values in vars(found).items()}
        note(", ".join(f"{name} {value:.4g}" for name, value in last.items()))
    return {name: spread(values, 4) for name, values in vars(found).items()}


def figures(results: dict[str, dict[str, float]]) -> dict[str, float]:
    """For before.compare."""
    rates = {f"us a token {side}": 1e6 / results[f"{side}_rate"]["median"] for side in ("offline", "server")}
    times = ("offline_ttft_ms", "server_ttft_ms", "server_us", "core_us")
    return rates | {name: results[name]["median"] for name in times}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__.splitlines()[0], "serve_overhead")
    options.add_argument("--model", default=DEFAULT_MODEL)
    options.add_argument("--streams", type=int, default=32, help="at once")
    options.add_argument("--input-len", type=int, default=64)
    options.add_argument("--output-len", type=int, default=128)
    options.add_argument("--singles", type=int, default=9, help="requests one at a time, for the TTFT")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--core", choices=("process", "inproc"), default="process", help="engine.core of the server")
    options.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of both sides")
    options.add_argument("--serve", default="", metavar="ARGS", help="more options of the server alone")
    options.add_argument("--vocab", type=int, help="prompts are random ids below this (by --model)")
    options.add_argument("--seed", type=int, default=0)
    before.add_options(options)
    args = options.parse_args(argv)
    args.vocab = args.vocab or vocab_of(args.model)
    args.url = None  # serve.server starts one
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if before.is_asked(args):
        before.compare("serve_overhead", figures, args, sys.argv[1:] if argv is None else argv)
        return 0
    overrides = parse_set(args.set)
    given = [word for item in args.set for word in ("--set", item)]
    args.serve = shlex.join(["--set", f"engine.core={args.core}", *given, *shlex.split(args.serve)])
    offline = Offline(args.model, overrides)
    try:
        with server(args) as url:
            results = measure(offline, url, args)
    finally:
        offline.close()
    emit("serve_overhead", {k: v for k, v in vars(args).items() if k != "url"}, results, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(serve_offline() if sys.argv[1:] == ["--serve-offline"] else main())
