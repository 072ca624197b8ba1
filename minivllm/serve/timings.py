"""What a request took, told in its answer: vLLM 0.33's --enable-per-request-metrics.

The names and what they measure are vLLM's: "first token" counts from the first step that had the request, not from its
arrival, and only what has one sequence is measured, since no one number fits several.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

if TYPE_CHECKING:
    from minivllm.engine.messages import Report
    from minivllm.engine.output import RequestMetrics
    from minivllm.request import EngineRequest


class RequestTimings(Struct, kw_only=True):
    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None | UnsetType
    tokens_per_second: float | None | UnsetType


class Measured(Protocol):
    """generation.Job."""

    num_sequences: int
    made: Sequence[RequestMetrics]

    def sequence_ids(self) -> Iterable[str]: ...


class NoTimings:
    def of(self, job: Measured) -> UnsetType:
        return UNSET


class FirstSteps:
    """A watcher of the engine, which alone sees when a request leaves the queue."""

    def __init__(self) -> None:
        self._joined: dict[str, float | None] = {}  # when a sequence's first step began; None: it waits

    def on_add(self, req: EngineRequest) -> None:
        self._joined[req.id] = None

    def on_abort(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            self._joined.pop(req_id, None)

    def on_report(self, report: Report) -> None:
        begin = time.monotonic() - sum(report.times_ms.values()) / 1e3
        for req_id in report.joined:
            if self._joined.get(req_id, begin) is None:  # its first step: one that was preempted joins again
                self._joined[req_id] = begin


class Timings(FirstSteps):
    def of(self, job: Measured) -> RequestTimings | None:
        """Of a request that has ended. None: it has several sequences, or no token."""
        joined = [self._joined.pop(req_id, None) for req_id in job.sequence_ids()]
        if job.num_sequences != 1 or joined[0] is None or not job.made or not job.made[0].first_token_time:
            return None
        return measured(job.made[0], joined[0])


def without_nulls(told: RequestTimings | None | UnsetType) -> RequestTimings | UnsetType:
    """As the end of a stream has it: vLLM's streams leave out what is null in a whole answer."""
    if not isinstance(told, RequestTimings):
        return UNSET
    nulls = {name: UNSET for name in told.__struct_fields__ if getattr(told, name) is None}
    return replace(told, **nulls)


def measured(times: RequestMetrics, joined: float) -> RequestTimings:
    """joined: when the request's first step began."""
    decoding, inference = times.last_token_time - times.first_token_time, times.last_token_time - joined
    num_later = times.num_generation_tokens - 1
    return RequestTimings(
        time_to_first_token_ms=1e3 * (times.first_token_time - joined),
        generation_time_ms=1e3 * decoding,
        queue_time_ms=1e3 * max(0.0, joined - times.arrival_time),
        mean_itl_ms=1e3 * decoding / num_later if num_later > 0 else None,
        tokens_per_second=times.num_generation_tokens / inference if inference > 0 else None,
    )
