"""A server under everything at once, for minutes: does anything grow?

    make soak                          ten minutes
    make soak ARGS="--seconds 60"      another time

Workers send what clients send: short and long answers, streams that are read and streams that are left, chats, tools,
structured output, several choices, beams, requests that are refused, connections that say nothing. Every few seconds
they pause; once the server is idle it is looked at, so that what is left then is what nobody gave back.

What is counted (files, tasks, threads, processes, requests) must not be more in the last third of the looks than in the
middle one; blocks must all be free at each. Memory is a cloud of points: its slope is Theil and Sen's, the median of
the slopes between all pairs, which single jumps do not move, with the 95 % interval that Sen gave it (1968). It grows
if even the interval's lower end, over the time of the run, is more than MOST_GROWTH. The first third is warming up.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from fire.wire import Served, ask, request, served

MIB = 2**20
ROUND_SECONDS = 2.0
MOST_GROWTH = 4.0  # MiB in a run: caches fill for a while, and an allocator keeps what it has had
IDLE_SECONDS = 20.0  # at most, until a server has nothing left to do
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CHAT = "/v1/chat/completions"

# ---------------------------------------------------------------------------------------- load


async def leave(port: int, rng: random.Random) -> None:
    """Begin a long stream, read a little or nothing of it, and go."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request({"prompt": words(rng, 9), "max_tokens": 900, "ignore_eos": True, "stream": True}))
    if rng.random() < 0.7:
        await reader.read(200)
    await asyncio.sleep(rng.random() / 10)
    writer.transport.abort()


async def say_nothing(port: int, rng: random.Random) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" * rng.randrange(2))
    await asyncio.sleep(rng.random() / 10)
    writer.close()


def words(rng: random.Random, num: int) -> str:
    """Of a few hundred: a tokenizer remembers the last 10,000 words, which would grow for minutes and be no leak."""
    return " ".join(str(rng.randrange(300)) for _ in range(num))


def bodies(rng: random.Random) -> tuple[int, str, dict[str, Any]]:
    """(the status that is right, path, body) of one request."""
    stream = {"stream": rng.random() < 0.5}
    few = {"max_tokens": rng.randrange(1, 24), **stream}
    return rng.choice(
        [
            (200, "/v1/completions", {"prompt": words(rng, 5), **few}),
            (200, "/v1/completions", {"prompt": "the same beginning " * 20 + words(rng, 3), **few}),
            (200, "/v1/completions", {"prompt": words(rng, 90), "max_tokens": 60, "ignore_eos": True, **stream}),
            (200, "/v1/completions", {"prompt": [words(rng, 4), words(rng, 2)], "n": 3, **few}),
            (200, "/v1/completions", {"prompt": words(rng, 4), "logprobs": 5, "stop": [words(rng, 1), "a"], **few}),
            (200, "/v1/completions", {"prompt": words(rng, 4), "use_beam_search": True, "n": 2, "max_tokens": 6}),
            (200, CHAT, {"messages": HELLO, **few}),
            (200, CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", **few}),
            (200, CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}, **few}),
            (200, "/v1/completions", {"prompt": "x", "guided_regex": f"[ab]{{{rng.randrange(2, 99)}}}", **few}),
            (200, "/tokenize", {"prompt": words(rng, 50)}),
            (400, "/v1/completions", {"prompt": words(rng, 9), "temperature": -1}),
            (400, "/v1/completions", {"prompt": "x", "guided_regex": "(" + words(rng, 1)}),
            (404, CHAT, {"messages": HELLO, "model": words(rng, 1)}),
            (404, f"/{rng.randrange(10**9)}", {}),
        ]
    )


async def work(port: int, rng: random.Random, until: float) -> int:
    num = 0
    while time.monotonic() < until:
        chance = rng.random()
        if chance < 0.15:
            await leave(port, rng)
        elif chance < 0.2:
            await say_nothing(port, rng)
        else:
            status, path, body = bodies(rng)
            answer = await ask(port, body, path)
            assert (answer.status, answer.whole) == (status, True), (path, body, answer)
            assert status != 200 or answer.error is None, (path, body, answer)
        num += 1
    return num


async def round_of(port: int, number: int, workers: int, until: float) -> int:
    rngs = [random.Random(f"{number} {i}") for i in range(workers)]
    return sum(await asyncio.gather(*(work(port, rng, until) for rng in rngs)))


# ---------------------------------------------------------------------------------------- looks


class Look(NamedTuple):
    time: float  # seconds since the beginning
    rss: dict[str, float]  # MiB by process: server, core
    counts: dict[str, float]


def look(server: Served, begin: float) -> Look:
    """Once it is idle."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        counts = server.state()
        idle = not (counts["num_requests_running"] or counts["open_sequences"] or counts["known_requests"])
        if idle or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    time.sleep(0.2)  # for connections to be closed
    processes = {"server": server.ps} | {f"child {i}": p for i, p in enumerate(server.ps.children(recursive=True), 1)}
    rss = {name: process.memory_info().rss / MIB for name, process in processes.items()}
    return Look(time.monotonic() - begin, rss, server.state())


def soak(seconds: float, workers: int, options: Sequence[str]) -> tuple[list[Look], int]:
    """(looks, how many requests there were)"""
    looks, num = [], 0
    with served("--debug-endpoints", *options) as server:
        begin = time.monotonic()
        for number in itertools.count():
            if time.monotonic() - begin >= seconds and len(looks) >= 6:
                return looks, num
            until = time.monotonic() + min(ROUND_SECONDS, seconds / 10)
            num += asyncio.run(round_of(server.port, number, workers, until))
            looks.append(look(server, begin))
    raise AssertionError("unreachable")


# ---------------------------------------------------------------------------------------- verdicts


class Slope(NamedTuple):
    """A second. low and high: the 95 % interval."""

    middle: float
    low: float
    high: float


def slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    points = list(zip(times, values, strict=True))
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2))
    n, num = len(points), len(slopes)
    half = 1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)  # of Kendall's S, by the normal approximation
    low, high = max(0, math.floor((num - half) / 2)), min(num - 1, math.ceil((num + half) / 2))
    return Slope(statistics.median(slopes), slopes[low], slopes[high])


class Row(NamedTuple):
    what: str
    begin: float
    end: float
    an_hour: str
    grows: bool


def verdicts(looks: Sequence[Look], most_growth: float = MOST_GROWTH) -> list[Row]:
    third = len(looks) // 3
    middle, last, times = looks[third : 2 * third], looks[2 * third :], [look.time for look in looks[third:]]
    rows = []
    for name in looks[-1].rss:
        values = [look.rss.get(name, 0.0) for look in looks[third:]]
        found = slope(times, values)
        grows = found.low * (times[-1] - times[0]) > most_growth
        an_hour = f"{3600 * found.middle:+.1f} ({3600 * found.low:+.1f} to {3600 * found.high:+.1f})"
        rows.append(Row(f"memory of {name}, MiB", values[0], values[-1], an_hour, grows))
    for name in looks[-1].counts:
        before, after = [look.counts[name] for look in middle], [look.counts[name] for look in last]
        leaks = name == "blocks" and any(look.counts[name] for look in looks)
        rows.append(Row(name, before[0], after[-1], "", leaks or min(after) > max(before)))
    return rows


def table(rows: Sequence[Row]) -> str:
    head = f"{'what':28} {'begin':>9} {'end':>9}   {'an hour (95 %)':34} verdict"
    lines = [f"{r.what:28} {r.begin:9.4g} {r.end:9.4g}   {r.an_hour:34} {'GROWS' if r.grows else 'ok'}" for r in rows]
    return "\n".join([head, *lines])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="(600)")
    parser.add_argument("--workers", type=int, default=8, help="clients at a time (8)")
    parser.add_argument("--core", choices=("process", "inproc"), default="process", help="(process)")
    parser.add_argument("--json", action="store_true", help="print every look too, one line each")
    args = parser.parse_args(argv)
    options = ["--set", f"engine.core={args.core}", "--max-num-seqs", "32"]
    looks, num = soak(args.seconds, args.workers, options)
    if args.json:
        print("\n".join(json.dumps(look._asdict()) for look in looks))
    rows = verdicts(looks)
    print(f"{num} requests in {looks[-1].time:.0f} s, {len(looks)} looks\n{table(rows)}")
    return int(any(row.grows for row in rows))


if __name__ == "__main__":
    sys.exit(main())
