"""Are two replicas of an engine core better than one core of twice the size, and by which router?

A router says which of the two a request goes to. Servers over one machine's cores and equal memory: one core has all
threads and all KV blocks, each of two replicas half of both (engine/replicas.py). All are started once and wait asleep
for their turn; the order is reversed from one round to the next. The requests are bench/workloads.py's many_prefixes,
other ones in every round, at each of --rates: what a router is worth shows in what is found in the prefix cache, and
that in the time to the first token. A pool that holds all beginnings once, but not twice, tells the routers apart; that
is what --pool-tokens is by default.

    throughput, ttft, latency   as the client sees them: bench/goodput.py
    hit_rate                    prompt tokens found in the prefix cache / looked up, of /metrics

On a machine of few cores two replicas are not expected to win: they share what one has to itself, and the weights are
read twice. They are for machines where one core's process is what is busy.

    python -m bench replicas --rounds 5 --out
    python -m bench replicas --only prefix round_robin --rates 8
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import httpx
from common import ROOT, emit, note, parser, spread
from goodput import errors, summary
from http_load import connected, offer, running
from latency import bootstrap_ratio, shown
from openai_requests import PATHS, requests_of, served
from prometheus_client.parser import text_string_to_metric_families
from workloads import Arrival, draw, vocab_of

from minivllm.config import DEFAULT_MODEL, parse_set

ONE = "one"
ROUTERS = ("round_robin", "least_loaded", "prefix")
METRICS = ("throughput", "ttft_p50", "ttft_p99", "latency_p50", "hit_rate")
BLOCK_SIZE = 16


def command_of(side: str, args: argparse.Namespace) -> list[str]:
    number = 1 if side == ONE else 2
    router = [] if side == ONE else ["--replicas", "2", "--set", f"engine.router={side}"]
    num_blocks = args.pool_tokens // BLOCK_SIZE // number + 1
    sizes = {"engine.core": "process", "kv.block_size": BLOCK_SIZE, "kv.num_blocks": num_blocks, **parse_set(args.set)}
    options = [word for name, value in sizes.items() for word in ("--set", f"{name}={value}")]
    quiet = ["--log-level", "warning", "--no-page"]
    return [sys.executable, "-m", "minivllm.serve", "--port", "0", "--model", args.model, *quiet, *router, *options]


def arrivals_of(rate: float, seed: int, args: argparse.Namespace) -> list[Arrival]:
    shape = {"vocab": args.vocab, "num_requests": args.num_requests, "scale": args.scale}
    return draw("many_prefixes", seed, rate=rate, groups=args.groups, **shape).arrivals


def looked_up(url: str) -> tuple[float, float]:
    """(tokens found in the prefix cache, tokens looked up) of all replicas so far."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    names = ("minivllm:prefix_cache_hits_total", "minivllm:prefix_cache_queries_total")
    return tuple(sum(sample.value for sample in samples if sample.name == name) for name in names)


async def run(url: str, arrivals: Sequence[Arrival], args: argparse.Namespace) -> dict[str, float]:
    async with connected(url, None, 600) as clients:
        model = await served(clients.turn())
        requests = await requests_of(clients.turn(), model["id"], arrivals, args)
        before = looked_up(url)
        answers = await offer(clients, PATHS[args.endpoint], requests)
    if failed := errors(answers):
        raise SystemExit(f"error: a request failed: {next(iter(failed))}")
    hits, queries = (now - then for now, then in zip(looked_up(url), before, strict=True))
    return summary(answers, {}) | {"hit_rate": hits / queries}


def measure(urls: Mapping[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[float, dict[str, list[dict[str, float]]]] = {
        rate: {name: [] for name in urls} for rate in sorted(args.rates)
    }
    for url in urls.values():
        asyncio.run(run(url, arrivals_of(math.inf, args.seed, args)[: args.warmup], args))
    for number in range(args.rounds):
        for i, (rate, runs) in enumerate(found.items()):
            arrivals = arrivals_of(rate, args.seed + 1 + number * len(found) + i, args)
            for name in list(urls) if number % 2 else list(urls)[::-1]:
                runs[name].append(asyncio.run(run(urls[name], arrivals, args)))
                said = (f"{metric} {runs[name][-1][metric]:.4g}" for metric in (*METRICS, "late_p99"))
                note(f"{rate:g}/s {name}: {', '.join(said)}")
    return [row(rate, runs) for rate, runs in found.items()]


def row(rate: float, runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Each side's metrics, and how they stand to the first side's, by round."""
    values = {name: {metric: [r[metric] for r in found] for metric in METRICS} for name, found in runs.items()}
    first, *others = values
    return {
        "rate": rate if math.isfinite(rate) else "inf",
        "sides": {name: {metric: spread(v, 4) for metric, v in of.items()} for name, of in values.items()},
        f"to_{first}": {
            name: {m: shown(bootstrap_ratio(values[first][m], values[name][m])) for m in METRICS} for name in others
        },
    }


def main() -> int:
    p = parser(__doc__.splitlines()[0], "replicas")
    p.add_argument("--model", default=DEFAULT_MODEL)
    p.add_argument("--only", nargs="+", choices=(ONE, *ROUTERS), default=[ONE, *ROUTERS], metavar="SIDE")
    rates = "requests a second; inf: all at once"
    p.add_argument("--rates", nargs="+", type=float, default=[4.0, math.inf], metavar="R", help=rates)
    p.add_argument("--num-requests", type=int, default=96, help="of each rate")
    p.add_argument("--groups", type=int, default=16, help="beginnings that requests share")
    p.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    p.add_argument("--pool-tokens", type=int, default=8192, help="KV slots of all replicas together")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--warmup", type=int, default=8, help="requests to each server before, not counted")
    p.add_argument("--vocab", type=int, help="prompts are random ids below this (by --model)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of all servers")
    p.set_defaults(endpoint="completions", plain=False)
    args = p.parse_args()
    args.vocab = args.vocab or vocab_of(args.model)
    with ExitStack() as stack:
        urls = {name: stack.enter_context(running(command_of(name, args), cwd=ROOT)) for name in args.only}
        rows = measure(urls, args)
    params = {name: value for name, value in vars(args).items() if name not in ("rates", "endpoint", "plain")}
    emit("replicas", params, {"rows": rows}, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
