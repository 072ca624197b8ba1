"""How many requests a second does a simulated cluster take, and how does that grow with replicas and with requests?

Each row is a process of its own: engines are built, then requests arrive at a Poisson process's times, `--rate` a
second and replica, all of the same lengths. What is told is the CPU time of the process, since a shared machine's
clock says little; the clock's beside it, and the most memory that it had. Rows of more and more replicas have as many
requests each; rows of more and more requests have as many replicas. Then the first row once more, with a stopwatch
around the real scheduler and the worker: which part of the time is whose.

    python -m bench simulate_speed --replicas 10 100 1000 --per-replica 50 --requests 20000
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import emit, note, parser

from minivllm.config import EngineConfig
from minivllm.engine.build.cluster import build_cluster
from minivllm.simulate.cluster import Cluster
from minivllm.simulate.traces import load_trace
from minivllm.simulate.workload import TraceRequest

PARTS = {"schedule": "the scheduler plans", "update": "the scheduler takes tokens in", "execute": "the cost of a step"}


def config_of(args: argparse.Namespace) -> EngineConfig:
    options = {"executor.kind": "simulated", "executor.device": args.gpu, "engine.router": args.router}
    return EngineConfig.build("v1", {"model.path": args.model, "kv.prefix": args.prefix, **options})


def trace_of(args: argparse.Namespace, num_replicas: int, num_requests: int) -> Iterator[TraceRequest]:
    source = f"fixed:prompt={args.prompt},output={args.output}"
    return load_trace(source, rate=args.rate * num_replicas, num_requests=num_requests)


def measure(args: argparse.Namespace, num_replicas: int, num_requests: int) -> dict[str, Any]:
    begin = time.process_time()
    cluster = build_cluster(config_of(args), num_replicas)
    built, clock = time.process_time(), time.perf_counter()
    found = cluster.run(trace_of(args, num_replicas, num_requests)).summary()
    spent, passed = time.process_time() - built, time.perf_counter() - clock
    assert found["num_finished"] == num_requests, "some were refused"
    return {
        "replicas": num_replicas,
        "requests": num_requests,
        "steps": found["num_steps"],
        "build_ms": 1e3 * (built - begin) / num_replicas,  # of one
        "cpu_s": spent,
        "clock_s": passed,
        "requests_per_s": num_requests / spent,
        "us_per_token": 1e6 * spent / (num_requests * args.output),
        "times_real": found["seconds"] / spent,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "queue_grew": found["queue_grew"],
    }


def shares(args: argparse.Namespace, num_replicas: int, num_requests: int) -> dict[str, float]:
    """Of the CPU time of a run: PARTS, and the rest."""
    cluster = build_cluster(config_of(args), num_replicas)
    spent = dict.fromkeys(PARTS, 0.0)
    watch(cluster, spent)
    begin = time.process_time()
    cluster.run(trace_of(args, num_replicas, num_requests))
    total = time.process_time() - begin
    return {part: seconds / total for part, seconds in spent.items()} | {"rest": 1 - sum(spent.values()) / total}


def watch(cluster: Cluster, spent: dict[str, float]) -> None:
    def timed(part: str, call: Callable) -> Callable:
        def run(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*args)
            finally:
                spent[part] += time.thread_time() - begin

        return run

    for replica in cluster.replicas:
        core: Any = replica.core
        core.scheduler.schedule = timed("schedule", core.scheduler.schedule)
        core.scheduler.update = timed("update", core.scheduler.update)
        core.executor.worker.execute = timed("execute", core.executor.worker.execute)


def alone(call: Callable, *args: Any) -> Any:
    """In a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args).result()


def growth(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of one row and the next: so many times as many requests took so many times the CPU time."""
    return [
        {
            "replicas": f"{before['replicas']:,} to {after['replicas']:,}",
            "requests": f"{before['requests']:,} to {after['requests']:,}",
            "times_requests": after["requests"] / before["requests"],
            "times_cpu": after["cpu_s"] / before["cpu_s"],
        }
        for before, after in pairwise(rows)
    ]


def rowed(args: argparse.Namespace, num_replicas: int, num_requests: int) -> dict[str, Any]:
    row = alone(measure, args, num_replicas, num_requests)
    note(", ".join(f"{name} {value:,.6g}" for name, value in row.items()))
    return row


def main() -> None:
    args = parser(__doc__.splitlines()[0], Path(__file__).stem)
    args.add_argument("--model", default="dummy:llama-3.1-8b")
    args.add_argument("--gpu", default="h100")
    args.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    args.add_argument("--per-replica", type=int, default=50, help="requests for each, in rows of more replicas")
    args.add_argument("--requests", type=int, nargs="*", default=[20000], help="in all, in rows of --fixed replicas")
    args.add_argument("--fixed", type=int, default=100, help="replicas")
    args.add_argument("--rate", type=float, default=50.0, help="requests a second, for each replica")
    args.add_argument("--prompt", type=int, default=128, help="tokens")
    args.add_argument("--output", type=int, default=32, help="tokens")
    args.add_argument("--router", default="round_robin", help="engine.router")
    args.add_argument("--prefix", default="none", help="kv.prefix")
    args = args.parse_args()
    wider = [rowed(args, number, number * args.per_replica) for number in args.replicas]
    longer = [rowed(args, args.fixed, number) for number in args.requests]
    same = [row for row in wider if row["replicas"] == args.fixed]
    of = alone(shares, args, args.replicas[0], args.replicas[0] * args.per_replica)
    params = {name: value for name, value in vars(args).items() if name not in ("replicas", "requests", "fixed")}
    slopes = growth(wider) + growth(same + longer)
    emit("simulate_speed", params, {"rows": wider + longer, "slopes": slopes, "shares": of}, args.out)


if __name__ == "__main__":
    main()
