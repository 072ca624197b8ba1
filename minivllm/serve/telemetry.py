"""OpenTelemetry: a span for each request that reached the engine, sent to a collector (`--otlp-traces-endpoint`).

The span is a child of what the client's `traceparent` header names (W3C Trace Context), else a trace of its own. Its
name, its attributes gen_ai.latency.* and the older names of token counts are vLLM's; the others are OpenTelemetry's
semantic conventions for generative AI. Nothing of a prompt or an answer is in it.

    gen_ai.latency.time_in_queue       arrival to the first step that had it
    gen_ai.latency.time_in_model_prefill   from there to the first token       ..._decode   from there to the last one
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from minivllm.errors import ConfigError
from minivllm.request import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from minivllm.engine.output import RequestOutput

CONTEXT_HEADERS = ("traceparent", "tracestate")
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
FLUSH_SECONDS = 2.0  # how long a server that ends waits for the collector

logger = logging.getLogger("minivllm.serve")


class Traced(Protocol):
    """What a span says of a request beside its outputs (generation.Job)."""

    params: SamplingParams | BeamSearchParams
    trace_context: Mapping[str, str]  # of CONTEXT_HEADERS, those that came
    operation: str  # chat or text_completion
    model: str  # as the answer names it
    arrival_time: float  # monotonic seconds


class NoTracing:
    def end(self, job: Traced, request_id: str, reason: str, output: RequestOutput | None, num_tokens: int) -> None:
        pass

    def close(self) -> None:
        pass


class Tracing:
    def __init__(self, provider: TracerProvider):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._propagator = provider, TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("minivllm")

    def end(self, job: Traced, request_id: str, reason: str, output: RequestOutput | None, num_tokens: int) -> None:
        """A request has ended. output: its last one; None if it was aborted or failed. num_tokens: of all choices."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        wall = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            self._propagator.extract(dict(job.trace_context)),
            SpanKind.SERVER,
            start_time=wall - int(1e9 * (time.monotonic() - job.arrival_time)),
        )
        span.set_attributes(_of_request(job, request_id))
        if output is not None:
            span.set_attributes(_of_output(output, num_tokens))
        if reason in ("abort", "error"):
            span.set_attribute("error.type", reason)
            span.set_status(Status(StatusCode.ERROR, reason))
        span.end(wall)

    def close(self) -> None:
        """Send what is left, if that takes no longer than FLUSH_SECONDS: no collector keeps a server from ending."""
        flushing = threading.Thread(target=self._provider.shutdown, name="minivllm-spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if flushing.is_alive():
            logger.warning("the collector of traces does not answer: the last spans are lost")


def _of_request(job: Traced, request_id: str) -> dict[str, Any]:
    params = job.params
    step = params.step if isinstance(params, BeamSearchParams) else params
    found = {
        "gen_ai.system": "minivllm",
        "gen_ai.provider.name": "minivllm",
        "gen_ai.operation.name": job.operation,
        "gen_ai.request.id": request_id,
        "gen_ai.request.model": job.model,
        "gen_ai.response.model": job.model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": step.temperature,
        "gen_ai.request.top_p": step.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.request.choice.count": params.n,
    }
    return {name: value for name, value in found.items() if value is not None}


def _of_output(output: RequestOutput, num_tokens: int) -> dict[str, Any]:
    times, num_prompt = output.metrics, len(output.prompt_token_ids)
    found: dict[str, Any] = {
        "gen_ai.usage.prompt_tokens": num_prompt,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.completion_tokens": num_tokens,
        "gen_ai.usage.output_tokens": num_tokens,
        "gen_ai.usage.num_sequences": times.num_choices if times else len(output.outputs),
        "gen_ai.response.finish_reasons": [out.finish_reason for out in output.outputs if out.finish_reason],
    }
    if times is None or not times.first_token_time:
        return found
    found["gen_ai.latency.time_to_first_token"] = times.first_token_time - times.arrival_time
    found["gen_ai.latency.e2e"] = times.last_token_time - times.arrival_time
    found["gen_ai.latency.time_in_model_decode"] = times.last_token_time - times.first_token_time
    found["gen_ai.latency.time_in_queue"] = times.scheduled_time - times.arrival_time
    found["gen_ai.latency.time_in_model_prefill"] = times.first_token_time - times.scheduled_time
    found["gen_ai.latency.time_in_model_inference"] = times.last_token_time - times.scheduled_time
    return found


def check(endpoint: str) -> None:
    """Raises ConfigError for an endpoint that is none, and without the extra `otel`."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: an address such as http://127.0.0.1:4318/v1/traces (OTLP over HTTP)"
        )
    try:
        import_module(EXPORTER)  # with all that it needs in its turn
    except ImportError as error:
        raise ConfigError(f'--otlp-traces-endpoint: {error}. Install it: pip install "minivllm[otel]"') from None


def start(endpoint: str | None) -> Tracing | NoTracing:
    """endpoint: of a collector, checked; spans go there in batches, from a thread of their own."""
    if endpoint is None:
        return NoTracing()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "minivllm"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
