"""Attacks on a server with eight keys, while one of them is used by a client that asks for little.

    make attack                                  all, and a table
    make attack ARGS="H4 'a mask'"               those whose names or findings contain this

A row says what the quiet client saw: its 99th percentile alone and beside the attack, the longest wait, and how much
more memory the server holds once the attack is over. It fails if an answer differs or fails, if /health is anything but
true, if the server is still at work, or if memory grows by more than MOST_LEFT each time that the attack is made.

What should be refused, or be given up with its client, may slow others by MOST_SLOWED. Requests that are served in
their turn make each step longer, since more is computed in it: how many steps others wait is what scheduler.policy=fair
bounds (tests/scheduler/test_fair.py), and MOST_WAITED seconds are the bound here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from attack.attacks import Attack, named
from fire.wire import Answer, Served, parse, request, served

MIB = 2**20
KEYS = [f"key-{i}" for i in range(8)]
MOST_LEFT = 50.0  # MiB
MORE_TIMES = 3  # an attack is made, if it seems to leave more
MOST_SLOWED = 1.5
MOST_SPINNING = 0.5  # CPUs
QUIET_SECONDS, LEAST_SECONDS = 4.0, 4.0
MOST_WAITED = 1.0  # seconds
LONGEST = 60.0  # seconds for an answer, and for a server to be done with it
WORK = ("num_requests_running", "num_requests_waiting")


class Seen(NamedTuple):
    """What the quiet client noted in a while."""

    latencies: list[float]
    texts: set[str]
    failures: list[str]
    unhealthy: list[str]

    @property
    def p99(self) -> float:
        return sorted(self.latencies)[math.ceil(0.99 * len(self.latencies)) - 1] if self.latencies else math.inf


class Row(NamedTuple):
    attack: Attack
    alone: Seen
    beside: Seen
    answers: Counter[int]
    spins: float  # CPUs that it takes more than before
    left: float  # MiB; inf: the server was still at it when nobody waited for it any longer

    @property
    def is_slower(self) -> bool:
        most = MOST_WAITED if self.attack.served else MOST_SLOWED * self.alone.p99
        return self.beside.p99 > most

    @property
    def at_work(self) -> bool:
        return self.left == math.inf or self.spins > MOST_SPINNING

    def wrong(self) -> list[str]:
        """What no machine's speed excuses."""
        seen = self.beside
        found = [*seen.failures[:1], *seen.unhealthy[:1]] + ["nobody else was answered"] * (not seen.latencies)
        found += ["another answer"] * (bool(seen.texts - self.alone.texts))
        found += [f"{code} was answered" for code in self.answers if code >= 500]
        found += ["still at work"] * self.at_work
        return found + [f"{self.left:.0f} MiB left"] * (MOST_LEFT < self.left < math.inf)


class Quiet:
    """The quiet client's process, and what it has noted so far."""

    def __init__(self, port: int, key: str):
        command = [sys.executable, "-m", "attack.quiet", str(port), key]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, **pipes)
        self.notes: list[dict[str, Any]] = []
        self.reading = asyncio.create_task(asyncio.to_thread(self.read))

    def read(self) -> None:
        for line in self.process.stdout:
            self.notes.append(json.loads(line))

    async def answered(self, since: float) -> None:
        """Returns once it has an answer to what it asked after that moment, or has stopped waiting for one."""
        until = time.monotonic() + LONGEST
        while time.monotonic() < until and not any(n["at"] > since and n["kind"] != "/health" for n in self.notes):
            if self.reading.done():
                await self.reading  # what could not be read is raised
                raise AssertionError("the quiet client has ended")
            await asyncio.sleep(0.1)

    def seen(self, begin: float, end: float) -> Seen:
        """Of what was asked for between two times of the monotonic clock, which processes share."""
        notes = [note for note in self.notes if begin <= note["at"] < end]
        asked = [note for note in notes if note["kind"] != "/health"]
        good = [note for note in asked if note["ok"]]
        return Seen(
            [note["seconds"] for note in good], {note["said"] for note in good},
            [note["said"] for note in asked if not note["ok"]],
            [note["said"] for note in notes if note["kind"] == "/health" and not note["ok"]],
        )  # fmt: skip


@contextmanager
def quiet_client(port: int, key: str):
    client = Quiet(port, key)
    try:
        yield client
    finally:
        client.process.stdin.close()
        client.process.wait(2 * LONGEST)


def wire(attack: Attack, path: str, body: bytes, key: str) -> bytes:
    header = f"authorization: Bearer {key}\r\n"
    if attack.how == "get":
        return f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{header}\r\n".encode()
    data = request(body, path, header)
    return data[:-10] if attack.how == "cut" else data


async def send(port: int, data: bytes, leaves: float | None) -> int:
    """-> the status; 0: it left, or was left, before there was one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        data = await asyncio.wait_for(drained(reader), leaves or LONGEST)
    except (TimeoutError, ConnectionError):
        return 0
    finally:
        writer.close()
    return answered(data).status


async def drained(reader: asyncio.StreamReader) -> bytes:
    """Its first part; the rest is read and not kept."""
    data = b""
    while piece := await reader.read(1 << 18):
        data = data if len(data) > 4096 else data + piece
    return data


def answered(data: bytes) -> Answer:
    status = data.split(b" ", 2)
    return Answer(int(status[1]), b"", False) if len(status) > 2 else parse(data)


async def run(attack: Attack, server: Served, quiet: Quiet) -> Row:
    requests = await asyncio.to_thread(attack.requests)
    rss, begin = server.rss(), time.monotonic()
    await quiet.answered(begin)
    before = await cpus(server)
    attacked = time.monotonic()
    sent = (send(server.port, wire(attack, path, body, KEYS[0]), attack.leaves) for path, body in requests)
    statuses = await asyncio.gather(*sent)
    del requests
    await asyncio.sleep(max(0.0, attacked + LEAST_SECONDS - time.monotonic()))
    end = time.monotonic()
    await quiet.answered(end)
    is_idle, spins = await idle(server), await spinning(server, before)
    left = (server.rss() - rss) / MIB if is_idle else math.inf
    return Row(attack, quiet.seen(begin, attacked), quiet.seen(attacked, end), Counter(statuses), spins, left)


async def spinning(server: Served, before: float) -> float:
    """How many CPUs it takes more than before: at once, or else in the end. A child that was killed is replaced."""
    until = time.monotonic() + LONGEST
    while (more := await cpus(server) - before) > MOST_SPINNING and time.monotonic() < until:
        pass
    return more


async def cpus(server: Served) -> float:
    """How many it takes, in the mean of a few seconds."""
    begin, used = time.monotonic(), cpu_seconds(server)
    await asyncio.sleep(QUIET_SECONDS)
    return (cpu_seconds(server) - used) / (time.monotonic() - begin)


def cpu_seconds(server: Served) -> float:
    times = [process.cpu_times() for process in (server.ps, *server.ps.children(recursive=True))]
    return sum(time.user + time.system for time in times)


async def idle(server: Served) -> bool:
    """Whether it had, before long, nothing more to do than what the quiet client asks for."""
    until = time.monotonic() + LONGEST
    while time.monotonic() < until:
        with suppress(httpx.HTTPError):
            busy = await asyncio.to_thread(lambda: sum(map(server.metric, WORK)))
            if busy <= 1:
                return True
        await asyncio.sleep(0.2)
    return False


async def run_on(server: Served, attacks: list[Attack]) -> list[Row]:
    """Until one leaves the server at work; attacks: loses those that were run."""
    rows = []
    with quiet_client(server.port, KEYS[-1]) as quiet:
        await asyncio.sleep(QUIET_SECONDS)  # warm
        while attacks and not (rows and rows[-1].at_work):
            row = await run(attack := attacks.pop(0), server, quiet)
            for _ in range(MORE_TIMES):  # what an allocator keeps, or a child that is replaced, is no leak
                if MOST_LEFT < row.left < math.inf:
                    row = row._replace(left=(await run(attack, server, quiet)).left)
            rows.append(row)
            print(line(row), flush=True)
        quiet.process.stdin.close()
        await quiet.reading
    return rows


def line(row: Row) -> str:
    statuses = ", ".join(f"{count} x {code or 'left'}" for code, count in sorted(row.answers.items()))
    wrong = row.wrong() + ["slower than its bound"] * row.is_slower
    return (
        f"{row.attack.name:46s} p99 {row.alone.p99 * 1e3:6.0f} -> {row.beside.p99 * 1e3:6.0f} ms"
        f"  longest {max(row.beside.latencies, default=float('inf')):6.2f} s  {row.left:+6.0f} MiB"
        f"  {statuses:28s} {'; '.join(wrong) or 'holds'}"
    )


def options() -> list[str]:
    return [f"--api-key={key}" for key in KEYS]


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make attack", description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", help="parts of attacks' names or of their findings")
    attacks = named(parser.parse_args(argv).names)
    assert attacks, "no attack has such a name"
    rows: list[Row] = []
    while attacks:
        with served(*options()) as server:
            rows += asyncio.run(run_on(server, attacks))
    slow = [row.attack.name for row in rows if row.is_slower]
    wrong = [row.attack.name for row in rows if row.wrong()]
    print(f"{len(rows)} attacks: {len(wrong)} went wrong, {len(slow)} slowed others beyond the bound")
    return 1 if wrong or slow else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(main())
