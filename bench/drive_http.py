"""One configuration as a server of its own, which is asked over HTTP: what drive.Side is, with all that a server does.

Times are what a client sees, so that HTTP, processes, serialising and detokenising are in them. The client is this
process and shares the machine's cores, alike for all configurations. Between its turns a server waits asleep.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import psutil
from common import ROOT
from goodput import errors
from http_load import Answer, connected, offer, running
from latency import request_metrics
from openai_requests import PATHS, requests_of, served
from workloads import Arrival

from minivllm.config import EngineConfig, fields
from minivllm.errors import ConfigError

SILENCE = 600.0  # seconds without a byte, after which a request has failed
PLACE = argparse.Namespace(endpoint="completions", plain=False)


class Server:
    """One configuration, loaded and listening."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self._stack, others = ExitStack(), set(psutil.Process().children())
        self._url = self._stack.enter_context(running(command_of(config), cwd=ROOT))
        (self._process,) = set(psutil.Process().children()) - others

    def check(self, largest: int) -> None:
        """Of ids that it does not know the server itself says so."""

    def run(self, arrivals: Sequence[Arrival], virtual: bool) -> tuple[dict[str, float], list[list[int]]]:
        """(metrics, the tokens of each sequence in order of arrival). virtual: all at once. Raises ConfigError for
        beams, of which no stream tells, SystemExit for a request that failed."""
        if any(arrival.beam_width for arrival in arrivals):
            raise ConfigError("over HTTP beams cannot be timed: their tokens come at the end")
        if virtual:
            arrivals = [arrival._replace(time_s=0.0) for arrival in arrivals]
        before = self._cpu_seconds()
        answers = asyncio.run(self._ask(arrivals))
        seconds = self._cpu_seconds() - before
        if failed := errors(answers):
            raise SystemExit(f"error: a request failed: {next(iter(failed))}")
        timelines = [timeline for answer in answers for timeline in answer.timelines]
        num_out = sum(len(timeline.times) for timeline in timelines)
        found = request_metrics(timelines) | {"cpu_us": 1e6 * seconds / num_out}
        return found, [timeline.tokens for timeline in timelines]

    def close(self) -> None:
        self._stack.close()

    async def _ask(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        async with connected(self._url, None, SILENCE) as clients:
            model = await served(clients.turn())
            requests = await requests_of(clients.turn(), model["id"], arrivals, PLACE)
            return await offer(clients, PATHS[PLACE.endpoint], requests)

    def _cpu_seconds(self) -> float:
        """Of all its processes so far."""
        times = [each.cpu_times() for each in (self._process, *self._process.children(recursive=True))]
        return sum(time.user + time.system for time in times)


def command_of(config: EngineConfig) -> list[str]:
    """What serves so: all that differs from the preset, and where the core is, which `serve` chooses otherwise."""
    preset = EngineConfig.build(config.preset)
    differing = [name for name in fields() if config.get(name) != preset.get(name)]
    sets = [f"{name}={_written(config.get(name))}" for name in dict.fromkeys([*differing, "engine.core"])]
    quiet = ["--log-level", "warning", "--no-page"]
    command = [sys.executable, "-m", "minivllm.serve", "--port", "0", "--preset", config.preset, *quiet]
    return [*command, *(word for text in sets for word in ("--set", text))]


def _written(value: object) -> str:
    return "none" if value is None else str(value)
