"""Metrics: what each number counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineStats
from minivllm.engine.messages import Report
from minivllm.engine.metrics import Histogram, Metrics, cache_labels
from minivllm.engine.output import RequestMetrics
from minivllm.plan import Delta
from minivllm.request import EngineRequest, SamplingParams


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def metrics(clock):
    metrics = Metrics("m", clock=lambda: clock.now)
    metrics.stats = EngineStats()
    return metrics


def value(metrics, name, prefix="minivllm", **labels):
    families = text_string_to_metric_families(metrics.render().decode())
    found = [
        s for f in families for s in f.samples if s.name == f"{prefix}:{name}" and labels.items() <= s.labels.items()
    ]
    (sample,) = found
    assert sample.labels["model_name"] == "m"
    return sample.value


def step(metrics, deltas, joins=()):
    changed = [Delta(*delta) for delta in deltas.values()]
    metrics.on_report(Report(changed, metrics.stats, list(joins), len(deltas), {"execute": 0.0}))


def test_a_histogram_counts_a_value_in_its_bucket_and_all_above():
    histogram = Histogram("h", "what", [1.0, 2.0])
    for value_, weight in ((1.0, 1), (1.5, 3), (9.0, 2)):
        histogram.observe(value_, weight)
    buckets = [s.value for s in histogram.family({"a": "b"}).samples if s.name == "h_bucket"]
    assert buckets == [1, 4, 6]
    assert histogram.sum == 1 + 4.5 + 18


def test_itl_is_the_time_between_two_tokens_of_a_request(metrics, clock):
    for req in "ab":
        metrics.on_add(EngineRequest(req, [1], SamplingParams()))
    step(metrics, {"a": ("a", [1])})
    clock.now += 0.05
    step(metrics, {"a": ("a", [1]), "b": ("b", [1])})
    clock.now += 0.05
    step(metrics, {"a": ("a", [1], "stop"), "b": ("b", [1], "length")})
    assert value(metrics, "inter_token_latency_seconds_count") == 3
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.15)


def test_queue_time_is_from_arrival_to_the_first_step(metrics, clock):
    metrics.on_add(EngineRequest("a", [1], SamplingParams()))
    clock.now += 2
    step(metrics, {"a": ("a", [1])}, joins=["a"])
    clock.now += 2
    step(metrics, {"a": ("a", [1])}, joins=["a"])  # resumed after a preemption
    assert value(metrics, "request_queue_time_seconds_count") == 1
    assert value(metrics, "request_queue_time_seconds_sum") == 2


def test_nothing_is_kept_of_a_request_that_has_ended(metrics):
    for req in "abc":
        metrics.on_add(EngineRequest(req, [1], SamplingParams()))
    step(metrics, {"a": ("a", [1], "stop"), "b": ("b", [1])}, joins=["a", "b"])
    metrics.on_abort(["b", "c"])
    step(metrics, {"b": ("b", [1])})  # it was under way
    assert not metrics._queued and not metrics._last_token


def test_a_finished_request_gives_ttft_tpot_and_end_to_end(metrics):
    times = RequestMetrics(10.0, scheduled_time=10.125, first_token_time=10.5, last_token_time=11.5, num_joins=3)
    metrics.on_request_end("stop", times, 7, 11, n=2, max_tokens=20)
    metrics.on_request_end("stop", times, 7, 11)
    metrics.on_request_end("abort")
    times.num_choices = 3
    one = Metrics("m")
    one.on_request_end("stop", times, 7, 11)
    assert value(one, "request_num_preemptions_sum") == 0 and value(one, "request_params_max_tokens_count") == 0
    assert [value(metrics, f"request_{part}_time_seconds_sum") for part in ("prefill", "decode", "inference")] == [
        2 * 0.375, 2 * 1.0, 2 * 1.375
    ]  # fmt: skip
    assert value(metrics, "request_num_preemptions_sum") == 4 and value(metrics, "request_params_n_sum") == 3
    assert value(metrics, "request_params_max_tokens_sum") == 20
    metrics = one
    metrics.on_request_end("abort")
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert value(metrics, "e2e_request_latency_seconds_sum") == 1.5
    assert value(metrics, "request_prompt_tokens_sum") == 7
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "request_success_total", finished_reason="abort") == 1
    assert value(metrics, "request_success_total", finished_reason="length") == 0


def test_gauges_are_read_from_the_engine_at_the_scrape(metrics):
    metrics.stats.num_running, metrics.stats.num_total_blocks, metrics.stats.num_free_blocks = 3, 10, 4
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "kv_cache_usage_perc") == pytest.approx(0.6)


def test_who_waits_and_what_was_refused(metrics):
    metrics.stats.num_waiting = 5
    assert value(metrics, "num_requests_waiting_by_reason", reason="capacity", engine="0") == 5
    for status in (200, 429, 429):
        metrics.on_response("POST", "/v1/completions", status)
    assert value(metrics, "admission_rejections_total") == 2


def test_the_cache_is_told_where_there_is_one(metrics):
    config = EngineConfig.build("v1", {"kv.prefix": "none"})
    assert "cache_config_info{" not in metrics.render().decode() and cache_labels({"num_blocks": 0}, config) == {}
    info = {"num_blocks": 100, "block_size": 16, "kv_tokens": 1600, "max_model_len": 640}
    metrics.cache = cache_labels(info, config)
    told = {"kv_cache_size_tokens": "1600", "kv_cache_max_concurrency": "2.50", "enable_prefix_caching": "False"}
    assert value(metrics, "cache_config_info", block_size="16", num_gpu_blocks="100", **told) == 1


def test_all_names_stand_below_the_prefix():
    theirs, ours = Metrics("m", prefix="vllm"), Metrics("m")
    for metrics in (theirs, ours):
        metrics.stats = EngineStats()
        metrics.on_response("GET", "/health", 200)
        metrics.on_request_end("stop")
    assert theirs.render() == ours.render().replace(b"minivllm:", b"vllm:")
    theirs.others = lambda: [theirs.snapshot()]
    assert value(theirs, "request_success_total", "vllm", finished_reason="stop") == 2


def test_two_servers_in_a_process_count_apart():
    one, other = Metrics("m"), Metrics("m")
    one.on_request_end("stop")
    assert value(other, "request_success_total", finished_reason="stop") == 0
