"""Open-loop load over HTTP: each request goes out when its time has come, however many are still unanswered.

No coordinated omission (the term is Gil Tene's): a time counts from when the request was wanted, not from when a busy
client got round to sending it, no request waits for a connection, and how late each was sent is kept beside its times.
A client that is late by as much as what it measures has measured itself.

Knows nothing of rates, metrics or who serves.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from latency import Timeline

NUM_CLIENTS = 64
LEAD_SECONDS = 0.05  # from the decision to begin to the first arrival
LONGEST_ERROR = 300  # characters
STOP_SECONDS = 20
# Unused for so long, a connection is not used again: well before servers close it (uvicorn, and so vLLM, after 5). A
# request that is sent just as they do is lost, and httpx, which would wait as long as they, sends no request again.
IDLE_SECONDS = 2.0


class Wanted(NamedTuple):
    """A request and when it is wanted, in seconds from the beginning."""

    time_s: float
    body: bytes
    num_sequences: int = 1


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are of this process's perf_counter."""

    timelines: list[Timeline]  # one a sequence; the first has the prompt's tokens
    late_s: float = 0.0
    error: str | None = None
    num_reported: int | None = None  # output tokens of all sequences, as the server counts them
    steps: int = field(default=0)  # events with tokens

    def take(self, chunk: dict[str, Any], now: float) -> None:
        """One event of OpenAI's streams, of either endpoint."""
        if "error" in chunk:
            self.error = f"in the stream: {chunk['error'].get('message')}"[:LONGEST_ERROR]
            return
        for choice in chunk.get("choices", ()):
            if num := num_tokens_of(choice):
                timeline = self.timelines[choice["index"]]
                timeline.tokens += choice.get("token_ids") or ()
                timeline.at(now, self.steps, num)
                self.steps += 1
        if usage := chunk.get("usage"):
            self.timelines[0].num_in, self.num_reported = usage["prompt_tokens"], usage["completion_tokens"]

    def close(self) -> None:
        """Tokens that came with no event of their own (no text yet, several in one) count as come with the last."""
        if self.error is None and not all(timeline.times for timeline in self.timelines):
            self.error = "the stream has no token"
        if self.error is None and self.num_reported is not None:
            last = max(self.timelines, key=lambda timeline: timeline.times[-1])
            missing = self.num_reported - sum(len(timeline.times) for timeline in self.timelines)
            last.at(last.times[-1], self.steps, max(0, missing))


def num_tokens_of(choice: dict[str, Any]) -> int:
    """Of one choice of an event: its token ids if the server sends them, else 1 for any text."""
    if (ids := choice.get("token_ids")) is not None:
        return len(ids)
    delta = choice.get("delta") or {}
    return int(bool(choice.get("text") or delta.get("content") or delta.get("tool_calls")))


class Clients:
    """NUM_CLIENTS clients of httpx in turns. The pool of one looks at all its connections, for each of them, whenever a
    request begins or ends: with hundreds of requests in one pool the client is busy with nothing else."""

    def __init__(self, clients: Sequence[httpx.AsyncClient]):
        self._turns = itertools.cycle(clients)

    def turn(self) -> httpx.AsyncClient:
        return next(self._turns)


@contextmanager
def running(command: Sequence[str], cwd: Path | None = None) -> Iterator[str]:
    """The URL of the minivllm.serve that `command` starts. It is stopped at the end."""
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, text=True)
    try:
        ready = next((line for line in process.stdout if line.startswith("Ready")), "")
        if not ready:
            raise SystemExit(f"error: the server has not started (exit code {process.wait()})")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would block it
        yield ready.split(": ")[1].split()[0].removesuffix("/v1")
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@asynccontextmanager
async def connected(url: str, api_key: str | None, timeout: float) -> AsyncIterator[Clients]:
    """timeout: seconds without a byte. As many connections as there are requests, so that none waits for one here."""
    options: dict[str, Any] = {
        "base_url": url,
        "headers": {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {}),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_SECONDS),
        "timeout": timeout,
        "trust_env": False,
        "verify": httpx.create_ssl_context(),
    }
    async with AsyncExitStack() as stack:
        clients = [httpx.AsyncClient(**options) for _ in range(NUM_CLIENTS)]
        yield Clients([await stack.enter_async_context(client) for client in clients])


async def offer(clients: Clients, path: str, requests: Sequence[Wanted]) -> list[Answer]:
    """Send each when it is wanted; all answers, in order, once the last has ended. A request's failure is its own."""
    gc.collect()
    start = time.perf_counter() + LEAD_SECONDS
    tasks = []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(max(0.0, start + request.time_s - time.perf_counter()))
            tasks.append(group.create_task(ask(clients.turn(), path, request, start + request.time_s)))
    return [task.result() for task in tasks]


async def ask(http: httpx.AsyncClient, path: str, request: Wanted, wanted: float) -> Answer:
    """wanted: when, by perf_counter."""
    answer = Answer([Timeline(wanted, 0) for _ in range(request.num_sequences)])
    answer.late_s = time.perf_counter() - wanted
    try:
        async with http.stream("POST", path, content=request.body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')}"
                answer.error = answer.error[:LONGEST_ERROR]
                return answer
            async for line in lines_of(response):
                if line.startswith(b"data: {"):
                    answer.take(json.loads(line[6:]), time.perf_counter())
    except (httpx.HTTPError, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
    answer.close()
    return answer


async def lines_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """As they come. Not httpx's aiter_lines: it also ends a line at U+2028 and others, which may be in a text."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
