"""What Prometheus reads: vLLM's metric names, under the prefix "minivllm:" or, for what reads vLLM's, under "vllm:".

Three sources. Gauges and totals are read from `EngineStats` when somebody scrapes. What happens between two tokens
(ITL, queue time, tokens a step) is told by the engine's reports, one a step, in the thread that brings them. What a
whole request took (TTFT, TPOT, end to end, finish reason) is told by the front end, which alone knows of stop strings
and of clients that left.

A histogram here takes a weight: all requests of a step share an interval, so 256 of them cost one update. Each has a
single writer thread, so none needs a lock; a scrape may miss the newest sample. When requests had their last token does
need one: they begin and are aborted in the front end's thread.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from minivllm.plan import Delta
from minivllm.request import EngineRequest

if TYPE_CHECKING:
    from minivllm.config import EngineConfig
    from minivllm.engine.core import EngineStats
    from minivllm.engine.messages import Report
    from minivllm.engine.output import RequestMetrics

PREFIX = "minivllm"
FINISH_REASONS = ("stop", "length", "abort", "error")


def grid(low: int, high: int) -> list[float]:
    """1, 2 and 5 times each power of ten from 10^low up to 10^high."""
    return [step * 10.0**power for power in range(low, high) for step in (1, 2, 5)] + [10.0**high]


class Histogram:
    def __init__(self, name: str, what: str, bounds: list[float]):
        self.name, self.what, self.bounds = name, what, bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above all bounds
        self.sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += weight
        self.sum += value * weight

    def family(self, labels: dict[str, str]) -> Metric:
        family = HistogramMetricFamily(self.name, self.what, labels=list(labels))
        total, buckets = 0, []
        for bound, count in zip([*self.bounds, "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((f"{bound:g}" if isinstance(bound, float) else bound, total))
        family.add_metric(list(labels.values()), buckets, self.sum)
        return family


class Snapshot(msgspec.Struct):
    """What one front end has counted."""

    finished: dict[str, int]
    responses: list[tuple[str, str, str, int]]  # method, path, status, how many
    histograms: dict[str, tuple[list[int], float]]  # name -> counts, sum


class Metrics:
    """A watcher of an AsyncLLM, and a collector of a registry of its own."""

    def __init__(self, model_name: str = "", clock: Callable[[], float] = time.monotonic, prefix: str = PREFIX):
        self.stats: EngineStats | None = None  # set once there is an engine
        self.cache: dict[str, str] = {}  # labels of cache_config_info: what the KV cache is; none: there is none
        self.labels = {"model_name": model_name}
        self.clock, self.prefix = clock, prefix
        self._of_requests: list[Histogram] = []
        seconds, tokens, few = grid(-3, 3), grid(0, 5), grid(0, 2)
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", seconds)
        self.itl = self._histogram("inter_token_latency_seconds", "Between two tokens of one request", seconds)
        what = "Mean time per token after the first, by request"
        self.tpot = self._histogram("time_per_output_token_seconds", what, seconds)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token", seconds)
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to first scheduled", seconds)
        self.prefill = self._histogram("request_prefill_time_seconds", "First scheduled to first token", seconds)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last token", seconds)
        self.inference = self._histogram("request_inference_time_seconds", "First scheduled to last token", seconds)
        self.prompt = self._histogram("request_prompt_tokens", "Prompt tokens, by request", tokens)
        self.generation = self._histogram("request_generation_tokens", "Generated tokens, by request", tokens)
        self.preemptions = self._histogram("request_num_preemptions", "Preemptions, by request", [0.0, *few])
        self.asked_n = self._histogram("request_params_n", "Choices asked for, by request", few)
        self.asked_tokens = self._histogram("request_params_max_tokens", "max_tokens, by request that has it", tokens)
        self.step_tokens = Histogram(f"{prefix}:iteration_tokens_total", "Tokens computed in a step", tokens)
        self.finished: Counter[str] = Counter()
        self.responses: Counter[tuple[str, str, str]] = Counter()  # (method, path, status)
        self.others: Callable[[], Iterable[Snapshot]] = tuple  # of this engine, where several servers share it
        self._queued: dict[str, float] = {}  # arrival of requests that have not run
        self._last_token: dict[str, float | None] = {}  # of requests in the engine; None: they wait for the first
        self._lock = threading.Lock()  # of _last_token
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def _histogram(self, name: str, what: str, bounds: list[float]) -> Histogram:
        """Of requests: each front end has its own, and a scrape adds them up."""
        self._of_requests.append(made := Histogram(f"{self.prefix}:{name}", what, bounds))
        return made

    # -- a watcher of the engine (AsyncLLM)

    def on_add(self, req: EngineRequest) -> None:
        self._queued[req.id] = self.clock()
        with self._lock:
            self._last_token[req.id] = None

    def on_abort(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            self._queued.pop(req_id, None)
            with self._lock:
                self._last_token.pop(req_id, None)

    def on_report(self, report: Report) -> None:
        now = self.clock()
        begin = now - sum(report.times_ms.values()) / 1e3
        self.step_tokens.observe(report.total_tokens)
        for req_id in report.joined:
            if (queued := self._queued.pop(req_id, None)) is not None:
                self.queue.observe(max(0.0, begin - queued))
        self._count_intervals(report.deltas, now)

    def _count_intervals(self, deltas: list[Delta], now: float) -> None:
        intervals: Counter[float] = Counter()  # most requests had their last token in the same earlier step
        last = self._last_token
        with self._lock:
            for delta in deltas:
                if not delta.token_ids or delta.req_id not in last:  # a step was under way when its request was aborted
                    continue
                if (before := last[delta.req_id]) is not None:
                    intervals[now - before] += 1
                last[delta.req_id] = now
        self.on_abort(delta.req_id for delta in deltas if delta.finish_reason is not None)
        for interval, weight in intervals.items():
            self.itl.observe(interval, weight)

    # -- the front end's thread

    def on_request_end(
        self,
        reason: str,
        times: RequestMetrics | None = None,
        num_prompt: int = 0,
        num_generated: int = 0,
        n: int = 1,
        max_tokens: int | None = None,
    ) -> None:
        """A request has ended. What follows the reason: if it ended by itself; num_generated: of its longest choice; n
        and max_tokens: what it asked for."""
        self.finished[reason] += 1
        if times is None or not times.first_token_time:
            return
        self.prompt.observe(num_prompt)
        self.generation.observe(num_generated)
        self.ttft.observe(times.first_token_time - times.arrival_time)
        self.e2e.observe(times.last_token_time - times.arrival_time)
        self.prefill.observe(times.first_token_time - times.scheduled_time)
        self.decode.observe(times.last_token_time - times.first_token_time)
        self.inference.observe(times.last_token_time - times.scheduled_time)
        self.preemptions.observe(times.num_preemptions)
        self.asked_n.observe(n)
        if max_tokens is not None:
            self.asked_tokens.observe(max_tokens)
        if num_generated > 1:
            self.tpot.observe((times.last_token_time - times.first_token_time) / (num_generated - 1))

    def on_response(self, method: str, path: str, status: int) -> None:
        self.responses[method, path, str(status)] += 1

    # -- a scrape

    def snapshot(self) -> Snapshot:
        """What this front end has counted of its own requests."""
        histograms = {histogram.name: (list(histogram.counts), histogram.sum) for histogram in self._of_requests}
        return Snapshot(dict(self.finished), [(*key, count) for key, count in self.responses.items()], histograms)

    def _with_others(self) -> Metrics:
        """The sum with what other front ends of the same engine have counted; all see the same engine."""
        total = Metrics(prefix=self.prefix)
        total.labels = self.labels
        for snapshot in (self.snapshot(), *self.others()):
            total.finished.update(snapshot.finished)
            for method, path, status, number in snapshot.responses:
                total.responses[method, path, status] += number
            for histogram in total._of_requests:
                counts, sum_ = snapshot.histograms[histogram.name]
                histogram.counts = [a + b for a, b in zip(histogram.counts, counts, strict=True)]
                histogram.sum += sum_
        return total

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        if self.stats is not None:
            yield from self._engine_families(self.stats)
        yield from self._with_others()._request_families()
        yield self.step_tokens.family(self.labels)

    def _request_families(self) -> Iterator[Metric]:
        names, values = list(self.labels), list(self.labels.values())
        success = CounterMetricFamily(
            f"{self.prefix}:request_success", "Requests that ended, by reason", labels=[*names, "finished_reason"]
        )
        for reason in FINISH_REASONS:
            success.add_metric([*values, reason], self.finished[reason])
        yield success
        http = CounterMetricFamily(
            f"{self.prefix}:http_requests", "HTTP responses", labels=[*names, "method", "path", "status"]
        )
        for key, count in sorted(self.responses.items()):
            http.add_metric([*values, *key], count)
        yield http
        rejected = CounterMetricFamily(
            f"{self.prefix}:admission_rejections", "Requests that a limit refused (429)", labels=names
        )
        rejected.add_metric(values, sum(count for (*_, status), count in self.responses.items() if status == "429"))
        yield rejected
        for histogram in self._of_requests:
            yield histogram.family(self.labels)

    def _engine_families(self, stats: EngineStats) -> Iterator[Metric]:
        """vLLM's label "engine": the replica's number."""
        for kind, name, what, value_of in ENGINE_FAMILIES:
            family = kind(f"{self.prefix}:{name}", what, labels=[*self.labels, "engine"])
            for number, part in enumerate(stats.parts):
                family.add_metric([*self.labels.values(), str(number)], value_of(part))
            yield family
        waiting = GaugeMetricFamily(
            f"{self.prefix}:num_requests_waiting_by_reason",
            "Requests in the queue, by what they wait for: room in the batch or in the cache",
            labels=[*self.labels, "engine", "reason"],
        )
        for number, part in enumerate(stats.parts):
            waiting.add_metric([*self.labels.values(), str(number), "capacity"], part.num_waiting)
        yield waiting
        labels = self.labels | self.cache
        about = GaugeMetricFamily(
            f"{self.prefix}:cache_config_info", "What the KV cache is; always 1", labels=[*labels, "engine"]
        )
        for number in range(len(stats.parts) if self.cache else 0):
            about.add_metric([*labels.values(), str(number)], 1)
        yield about


def cache_labels(info: Mapping[str, Any], config: EngineConfig) -> dict[str, str]:
    """Of cache_config_info. info: WorkerFacts.info; nothing for an engine without a KV cache."""
    if not info.get("num_blocks"):
        return {}
    told = {
        "block_size": info["block_size"],
        "cache_dtype": config.kv.dtype,
        "num_gpu_blocks": info["num_blocks"],
        "enable_prefix_caching": config.kv.prefix != "none",
        "kv_cache_size_tokens": info["kv_tokens"],
        "kv_cache_max_concurrency": f"{info['kv_tokens'] / info['max_model_len']:.2f}",
    }
    return {name: str(value) for name, value in told.items()}


ENGINE_FAMILIES: tuple[tuple[type[Metric], str, str, Callable[[EngineStats], float]], ...] = (
    (GaugeMetricFamily, "num_requests_running", "Requests in the batch", attrgetter("num_running")),
    (GaugeMetricFamily, "num_requests_waiting", "Requests in the queue", attrgetter("num_waiting")),
    (GaugeMetricFamily, "kv_cache_usage_perc", "KV blocks in use; 1 means all", attrgetter("kv_usage")),
    (GaugeMetricFamily, "num_kv_blocks", "KV blocks in the pool", attrgetter("num_total_blocks")),
    (CounterMetricFamily, "prefix_cache_queries", "Tokens looked up in the prefix cache", attrgetter("prefix_queries")),
    (CounterMetricFamily, "prefix_cache_hits", "Tokens found in the prefix cache", attrgetter("prefix_hits")),
    (CounterMetricFamily, "num_preemptions", "Preemptions", attrgetter("num_preempted")),
    (CounterMetricFamily, "num_stalled_steps", "Steps and calls over engine.step_timeout", attrgetter("num_stalled")),
    (CounterMetricFamily, "prompt_tokens", "Prompt tokens of the requests taken", attrgetter("prompt_tokens")),
    (CounterMetricFamily, "generation_tokens", "Tokens generated", attrgetter("generation_tokens")),
    (CounterMetricFamily, "spec_decode_num_draft_tokens", "Tokens proposed", attrgetter("num_drafted")),
    (CounterMetricFamily, "spec_decode_num_accepted_tokens", "Proposed and accepted", attrgetter("num_accepted")),
)
