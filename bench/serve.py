"""What do clients of a server wait for at each rate of arrivals, and where is the knee?

Load over HTTP, at one rate or a sweep of them: latencies, throughput, goodput.

    python -m bench serve --rates 1 2 4 8 --slo ttft=500ms --slo tpot=50ms --out
    python -m bench serve --url http://127.0.0.1:8000 --endpoint chat --rates 2
    python -m bench serve --serve "--preset v0" --rates 1 2 4 8

Without --url a minivllm server is started on a free port of this machine and stopped at the end. Any server with
OpenAI's streams may be measured; --plain leaves out what only minivllm and vLLM understand, and then outputs are as
long as the server likes and a token is an event with text.

An open loop (bench/http_load.py): requests are Poisson arrivals (or evenly spaced, --arrivals fixed), sent whether or
not the server has answered those before. Prompts are bench/workloads.py's, other ones in every run, so that no run
finds in the prefix cache what another left. --endpoint chat asks the server for their text. bench/goodput.py says what
each figure means; `late` is the client's own delay, and a warning says when it is no longer small. Client and server
share this machine's cores unless --url is elsewhere.

Prints one JSON line; with --out it is appended there and drawn beside it, as PNG and SVG.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import plots
from common import RESULTS, ROOT, emit, note
from goodput import best_in_slo, errors, knee, median, parse_slo, summary
from http_load import Clients, connected, offer, running
from openai_requests import PATHS, requests_of, served
from workloads import WORKLOADS, Arrival, draw, vocab_of

from minivllm.config import DEFAULT_MODEL

FEWEST = 8  # requests of a run
STREAMING = [name for name in WORKLOADS if name != "beam"]
LATE = 0.1  # of the median TTFT: a client that is later than this measures itself

# ---------------------------------------------------------------------------------------- the server


@contextmanager
def server(args: argparse.Namespace) -> Iterator[str]:
    """Its URL. One that was started here is stopped."""
    if args.url:
        yield args.url.rstrip("/").removesuffix("/v1")
        return
    quiet = ["--log-level", "warning"]  # not a line a request
    command = [sys.executable, "-m", "minivllm.serve", "--port", "0", "--model", args.model, *quiet]
    command += shlex.split(args.serve)
    note(shlex.join(command))
    with running(command, cwd=ROOT) as url:
        yield url


# ---------------------------------------------------------------------------------------- requests


def arrivals_of(args: argparse.Namespace, rate: float, seed: int, num: int) -> list[Arrival]:
    scene = draw(args.workload, seed, vocab=args.vocab, num_requests=num, rate=rate, scale=args.scale)
    if args.arrivals == "poisson":
        return scene.arrivals
    return [arrival._replace(time_s=i / rate) for i, arrival in enumerate(scene.arrivals)]


# ---------------------------------------------------------------------------------------- runs


async def sweep(url: str, args: argparse.Namespace) -> dict[str, Any]:
    rows = [{"rate": rate, "num_requests": num_requests(args, rate)} for rate in args.rates]
    rows = [{**row, "runs": [], "errors": Counter()} for row in rows]
    key = args.api_key_file and args.api_key_file.read_text().splitlines()[0].strip()
    async with connected(url, key, args.timeout) as clients:
        model = await served(clients.turn())
        await warm_up(clients, model["id"], args)
        for repetition in range(args.repetitions):
            for i, row in enumerate(rows):
                seed = args.seed + 1 + repetition * len(rows) + i
                arrivals = arrivals_of(args, row["rate"], seed, row["num_requests"])
                check_lengths(arrivals, model.get("max_model_len"))
                requests = await requests_of(clients.turn(), model["id"], arrivals, args)
                answers = await offer(clients, PATHS[args.endpoint], requests)
                run = summary(answers, args.objectives)
                row["runs"].append({name: round(value, 4) for name, value in run.items()})
                row["errors"] += errors(answers)
                tell(row)
    found = {"model": model, "rows": rows, "knee": knee(rows)}
    return found | ({"best_in_slo": best_in_slo(rows, args.attain)} if args.objectives else {})


def num_requests(args: argparse.Namespace, rate: float) -> int:
    return args.num_requests or max(FEWEST, math.ceil(args.seconds * rate))


def check_lengths(arrivals: Sequence[Arrival], max_model_len: int | None) -> None:
    longest = max(len(arrival.prompt_token_ids) + arrival.max_tokens for arrival in arrivals)
    if max_model_len is not None and longest > max_model_len:
        raise SystemExit(f"error: a request has {longest} tokens, the server takes {max_model_len}: lower --scale")


async def warm_up(clients: Clients, model: str, args: argparse.Namespace) -> None:
    """All at once, so that larger batches have been seen too; not counted. One that fails ends the benchmark."""
    if not args.warmup:
        return
    arrivals = [arrival._replace(time_s=0.0) for arrival in arrivals_of(args, 1.0, args.seed, args.warmup)]
    answers = await offer(clients, PATHS[args.endpoint], await requests_of(clients.turn(), model, arrivals, args))
    if failed := errors(answers):
        raise SystemExit(f"error: warming up failed: {next(iter(failed))}")


def tell(row: dict[str, Any]) -> None:
    run = row["runs"][-1]
    shown = ("offered_rate", "request_rate", "output_rate", "ttft_p50", "ttft_p99", "tpot_p50", "latency_p99")
    shown += ("attained", "failed")
    note(f"{row['rate']:g}/s: " + ", ".join(f"{name} {run[name]:.4g}" for name in shown if name in run))
    if run["late_p99"] > LATE * run.get("ttft_p50", math.inf):
        note(f"*** the client was late by {run['late_p99']:.3g} ms (p99), a part of every latency: it needs a core ***")


# ---------------------------------------------------------------------------------------- the command


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs (none: start one)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"of a server that is started here ({DEFAULT_MODEL})")
    parser.add_argument("--serve", default="", metavar="ARGS", help='its options: "--preset v0 --max-num-seqs 8"')
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="its first line is the server's key (none)")
    parser.add_argument("--endpoint", choices=PATHS, default="completions", help="what is asked (completions)")
    parser.add_argument("--plain", action="store_true", help="send nothing that is not in OpenAI's API")
    parser.add_argument("--workload", choices=STREAMING, default="alpaca", metavar="W", help=", ".join(STREAMING))
    parser.add_argument("--rates", nargs="+", type=float, default=[1, 2, 4, 8], help="requests a second (1 2 4 8)")
    parser.add_argument("--arrivals", choices=("poisson", "fixed"), default="poisson", help="(poisson)")
    parser.add_argument("--seconds", type=float, default=30, help=f"of arrivals a rate; {FEWEST} requests or more (30)")
    parser.add_argument("--num-requests", type=int, help="of each rate, instead of --seconds")
    parser.add_argument("--repetitions", type=int, default=1, help="of the sweep, each with its own prompts (1)")
    parser.add_argument("--warmup", type=int, default=4, help="requests before, not counted (4)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths (1)")
    parser.add_argument("--vocab", type=int, help="prompts are random ids below this (by --model)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    what = "an objective: ttft, tpot, itl (the worst gap) or latency; may be repeated (none)"
    parser.add_argument("--slo", action="append", default=[], metavar="ttft=500ms", help=what)
    parser.add_argument("--attain", type=float, default=0.9, help="share of requests that must meet the SLO (0.9)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds without a byte that end a request (600)")
    default = RESULTS / "serve.jsonl"
    what = f"append the line to OUT ({default}), and draw it"
    parser.add_argument("--out", nargs="?", const=default, type=Path, help=what)
    args = parser.parse_args(argv)
    args.rates = sorted(set(args.rates))
    if not all(0 < rate < math.inf for rate in args.rates):
        parser.error("--rates: an open loop needs rates above 0, and finite (bench/offline.py: all at once)")
    try:
        args.objectives = parse_slo(args.slo)
    except ValueError as error:
        parser.error(f"--slo: {error}")
    args.vocab = args.vocab or vocab_of(args.model)
    return args


def conclude(results: dict[str, Any], attain: float) -> None:
    if (found := results["knee"]) is None:
        return note("nothing was answered")
    row = next(row for row in results["rows"] if row["rate"] == found["rate"])
    note(f"{found['says']}; latency p99 {median(row, 'latency_p99'):.0f} ms there")
    if "best_in_slo" in results:
        best = results["best_in_slo"]
        note(f"the SLO holds for {attain:.0%} of requests up to: {'no rate tried' if best is None else f'{best:g}/s'}")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    with server(args) as url:
        try:
            results = asyncio.run(sweep(url, args))
        except httpx.HTTPError as error:
            raise SystemExit(f"error: {url}: {type(error).__name__} {error}") from None
    params = {name: value for name, value in vars(args).items() if name != "api_key_file"}
    emit("serve", params, results, args.out)
    conclude(results, args.attain)
    if args.out is not None and results["knee"] is not None:
        note("\n".join(map(str, plots.write(args.out))))
    return 0 if results["knee"] is not None else 1


if __name__ == "__main__":
    raise SystemExit(main())
