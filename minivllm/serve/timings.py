"""What a request took, told in its answer: vLLM 0.33's --enable-per-request-metrics.

The names and what they measure are vLLM's: "first token" counts from the first step that had the request, not from its
arrival, and only what has one sequence is measured, since no one number fits several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

if TYPE_CHECKING:
    from minivllm.engine.output import RequestMetrics


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


class NoTimings:
    def of(self, job: Measured) -> UnsetType:
        return UNSET


class Timings:
    def of(self, job: Measured) -> RequestTimings | None:
        """Of a request that has ended. None: it has several sequences, or no token."""
        return measured(job.made[0]) if job.num_sequences == 1 and job.made and job.made[0].first_token_time else None


def without_nulls(told: RequestTimings | None | UnsetType) -> RequestTimings | UnsetType:
    """As the end of a stream has it: vLLM's streams leave out what is null in a whole answer."""
    if not isinstance(told, RequestTimings):
        return UNSET
    nulls = {name: UNSET for name in told.__struct_fields__ if getattr(told, name) is None}
    return replace(told, **nulls)


def measured(times: RequestMetrics) -> RequestTimings:
    decoding, inference = times.last_token_time - times.first_token_time, times.last_token_time - times.scheduled_time
    num_later = times.num_generation_tokens - 1
    return RequestTimings(
        time_to_first_token_ms=1e3 * (times.first_token_time - times.scheduled_time),
        generation_time_ms=1e3 * decoding,
        queue_time_ms=1e3 * (times.scheduled_time - times.arrival_time),
        mean_itl_ms=1e3 * decoding / num_later if num_later > 0 else None,
        tokens_per_second=times.num_generation_tokens / inference if inference > 0 else None,
    )
