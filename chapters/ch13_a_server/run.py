"""Chapter 13: what do users feel? A server under an open loop of requests, at rising rates."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from chapters.harness import in_time, main, note
from minivllm.config import DEFAULT_MODEL

BENCH = str(Path(__file__).parent.parent.parent / "bench")
sys.path.insert(0, BENCH)  # only while importing: its files are scripts, and know each other by bare names
from goodput import summary  # noqa: E402
from http_load import Answer, Clients, Wanted, ask, connected, offer, running  # noqa: E402

sys.path.remove(BENCH)

NUM_PROMPT, NUM_NEW = 32, 24  # tokens of each request
SHARES, SMOKE_SHARES = (0.2, 0.5, 0.8, 1.0, 1.3), (0.25, 1.5)  # of the rate that the server can answer
SECONDS, SMOKE_SECONDS = 6.0, 4.0  # of arrivals at each rate
FULL = 24  # requests at once, to find out what the server can answer
USERS = 2  # of the closed loop: each waits for its answer, then asks again
PATIENCE = 4.0  # an answer is good if it comes within so many times what it takes when nobody else is there
PATH = "/v1/completions"


def server() -> AbstractContextManager[str]:
    """Its URL. Stopped at the end."""
    return running([sys.executable, "-m", "minivllm.serve", "--port", "0", "--log-level", "warning"])


def request(time_s: float, rng: random.Random) -> Wanted:
    """A prompt that nobody has sent before: the prefix cache must not know it."""
    body = {
        "model": DEFAULT_MODEL,
        "prompt": [rng.randrange(1000, 40_000) for _ in range(NUM_PROMPT)],
        "max_tokens": NUM_NEW,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return Wanted(time_s, json.dumps(body).encode())


def arrivals(rate: float, seconds: float, seed: int) -> list[Wanted]:
    """At random times, as by people who know nothing of each other; as many as the rate says, and eight at least."""
    rng = random.Random(seed)
    num = max(8, round(rate * seconds))
    return [request(at, rng) for at in sorted(rng.uniform(0, num / rate) for _ in range(num))]


async def closed_loop(clients: Clients, num_users: int, seconds: float, seed: int) -> list[Answer]:
    """Users who ask again when they have their answer: what most load scripts do."""
    begin = time.perf_counter()

    async def user(i: int) -> list[Answer]:
        rng, answers = random.Random(seed + i), []
        while time.perf_counter() - begin < seconds:
            answers.append(await ask(clients.turn(), PATH, request(0.0, rng), time.perf_counter()))
        return answers

    return [answer for answers in await asyncio.gather(*map(user, range(num_users))) for answer in answers]


def told(answers: Sequence[Answer], slo: dict[str, float]) -> dict[str, float]:
    found = summary(answers, slo)
    names = ("request_rate", "goodput", "attained", "failed", "late_p99")
    names += tuple(f"{metric}_p{q}" for metric in ("ttft", "tpot", "latency") for q in (50, 99))
    return {name: round(found[name], 3) for name in names if name in found}


async def load(url: str, smoke: bool) -> dict[str, Any]:
    seconds = SMOKE_SECONDS if smoke else SECONDS
    async with connected(url, None, 120) as clients:
        note("  one request after the other, then many at once")
        alone = await closed_loop(clients, 1, seconds / 3, 100)
        alone = told(await closed_loop(clients, 1, seconds / 2, 200), {}) if alone else {}
        full = await offer(clients, PATH, [request(0.0, random.Random(300 + i)) for i in range(FULL)])
        capacity = summary(full, {})["request_rate"]
        slo = {"latency": PATIENCE * alone["latency_p50"] / 1e3}
        rows = []
        for i, share in enumerate(SMOKE_SHARES if smoke else SHARES):
            rate = share * capacity
            note(f"  {rate:.1f} requests a second")
            answers = await offer(clients, PATH, arrivals(rate, seconds, 400 + i))
            rows.append(
                {"rate": round(rate, 1 if rate < 10 else None), "num_requests": len(answers), **told(answers, slo)}
            )
        note(f"  {USERS} users who wait for their answers")
        closed = told(await closed_loop(clients, USERS, seconds, 500), slo)
    return {
        "alone": alone,
        "capacity": round(capacity, 2),
        "slo_ms": round(1e3 * slo["latency"]),
        "rows": rows,
        "closed": closed,
        "closed_ratio": round(rows[-1]["latency_p99"] / closed["latency_p99"], 1),
        "growth": round(rows[-1]["latency_p99"] / rows[0]["latency_p99"], 1),
        "best": max(rows, key=lambda row: row["goodput"]),
    }


def measure(smoke: bool) -> dict[str, Any]:
    note("  starting a server")
    with server() as url:
        found = asyncio.run(load(url, smoke))
    sizes = {"num_prompt": NUM_PROMPT, "num_new": NUM_NEW, "users": USERS, "patience": PATIENCE}
    return {"model": DEFAULT_MODEL, **sizes, **found}


def check(results: dict[str, Any]) -> None:
    """What the text claims, true on any machine."""
    rows = results["rows"]
    first, last = rows[0], rows[-1]
    assert not any(row["failed"] for row in rows), "the server turned somebody away"
    in_time(last["latency_p99"] > 1.5 * first["latency_p99"], "more requests than it can answer cost nothing")
    in_time(last["attained"] < first["attained"], "as many users are content as before")
    in_time(last["goodput"] < last["request_rate"], "every answer came in time")
    in_time(results["closed"]["latency_p99"] < last["latency_p99"], "users who wait see the queue too")
    grown = {metric: last[metric] - first[metric] for metric in ("ttft_p50", "latency_p50")}
    in_time(grown["ttft_p50"] < grown["latency_p50"] / 2, "what grew was the time before a request's turn")
    if len(rows) > 2:  # the smoke test has the two ends alone
        little = rows[1]["latency_p50"] - first["latency_p50"]
        in_time(little < last["latency_p50"] - rows[1]["latency_p50"], "the curve does not turn upwards")
        in_time(last["goodput"] < results["best"]["goodput"], "an overload is no loss to those who wait")


def tell(results: dict[str, Any]) -> str:
    lines = [
        f"alone: a request takes {results['alone']['latency_p50']:.0f} ms, its first token "
        f"{results['alone']['ttft_p50']:.0f} ms; at most {results['capacity']:.1f} requests a second are answered",
        f"good is an answer within {results['slo_ms']} ms",
        "",
        "offered   answered      good    first token ms      latency ms",
        "   a second, each of them        p50     p99       p50     p99",
    ]
    for row in results["rows"]:
        lines.append(
            f"{row['rate']:7.1f} {row['request_rate']:10.1f} {row['goodput']:9.1f} {row['ttft_p50']:10.0f} "
            f"{row['ttft_p99']:7.0f} {row['latency_p50']:9.0f} {row['latency_p99']:7.0f}"
        )
    closed = results["closed"]
    lines += [
        "",
        f"{results['users']} users who wait for their answers: {closed['request_rate']:.1f} a second, latency p50 "
        f"{closed['latency_p50']:.0f}, p99 {closed['latency_p99']:.0f} ms",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("13", measure, check, tell)
