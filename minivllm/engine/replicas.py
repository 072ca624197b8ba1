"""Starting the core, or the replicas of it, that a configuration asks for: each in a process of its own, on its share
of the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from minivllm.config import Decision, EngineConfig
from minivllm.engine.build import build_routing
from minivllm.engine.link import Link
from minivllm.engine.messages import Facts
from minivllm.engine.process_link import ProcessLink
from minivllm.engine.router import RouterLink
from minivllm.machine import cpu_quota, num_cores


def start_cores(config: EngineConfig) -> Link:
    """Returns once all of them are ready; raises what building one raised, and then none is left."""
    return over(config, start_processes(config))


def start_processes(config: EngineConfig) -> list[ProcessLink]:
    number = config.engine.replicas
    if number == 1:
        return [ProcessLink(config)]
    cores = share_cores(number)
    with ThreadPoolExecutor(number) as pool:
        started = [pool.submit(ProcessLink, share(config, i), cores[i], f"engine {i}") for i in range(number)]
    failures = [error for future in started if (error := future.exception()) is not None]
    if failures:
        for future in started:
            if future.exception() is None:
                future.result().close()
        raise failures[0]
    return [future.result() for future in started]


def over(config: EngineConfig, links: Sequence[Link]) -> Link:
    """One link over all replicas. config: of the engine as a whole."""
    if len(links) == 1:
        return links[0]
    return RouterLink(links, build_routing(config), facts_of_all(config, [link.facts for link in links]))


def facts_of_all(config: EngineConfig, each: Sequence[Facts]) -> Facts:
    first = each[0]
    reason = f"each has the model, KV blocks and threads of its own; engine.router={config.engine.router} chooses"
    decisions = [Decision("engine.replicas", len(each), reason), *first.decisions]
    longest = min(facts.max_model_len for facts in each)  # by what memory was free when each was built
    return msgspec.structs.replace(first, config=config, decisions=decisions, max_model_len=longest)


def share(config: EngineConfig, replica: int) -> EngineConfig:
    """What one replica is built from: its part of the threads, and a trace of its own (run.jsonl: run.1.jsonl). Its
    part of the memory runner/memory.py takes. Sizes that are given stay as they are given: they are a replica's."""
    number = config.engine.replicas
    changes: dict[str, object] = {}
    if config.executor.num_threads is None:
        changes["executor.num_threads"] = max(1, int(min(num_cores(), cpu_quota() or num_cores())) // number)
    if config.debug.trace is not None:
        path = Path(config.debug.trace)
        changes["debug.trace"] = str(path.with_name(f"{path.stem}.{replica}{path.suffix}"))
    return config.override(changes)


def share_cores(number: int) -> list[list[int] | None]:
    """Cores for each of so many replicas, apart from each other's; None: not where there are too few, or no way."""
    if not hasattr(os, "sched_getaffinity") or num_cores() < number:
        return [None] * number
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // number
    return [cores[i * each : (i + 1) * each] for i in range(number)]
