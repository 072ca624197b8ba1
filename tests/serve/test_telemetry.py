"""Spans of requests: as a collector gets them, with the client's trace around them, and none of a prompt in them."""

from __future__ import annotations

import http.server
import sys
import threading
from types import SimpleNamespace

import httpx
import pytest

from minivllm.engine.async_llm import AsyncLLM
from minivllm.errors import ConfigError
from minivllm.serve import telemetry

sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TINY = {"kv.num_blocks": 200, "kv.block_size": 8, "executor.num_threads": 1, "model.dtype": "float32"}
SAID = "a secret that nobody shall log"


@pytest.fixture(scope="module")
def traced(serving):
    memory = in_memory.InMemorySpanExporter()
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    tracing = telemetry.Tracing(provider)
    with serving(AsyncLLM("dummy:tiny", overrides=TINY), names=("tiny",), tracing=tracing) as url:
        yield SimpleNamespace(url=url, memory=memory, tracing=tracing)


@pytest.fixture
def ask(traced, eventually):
    def ask(path="/v1/completions", headers=None, num_spans=1, **fields):
        traced.memory.clear()
        body = {"prompt": SAID, "max_tokens": 6, "ignore_eos": True, "seed": 1, **fields}
        reply = httpx.post(f"{traced.url}{path}", json=body, headers=headers, timeout=30)
        eventually(lambda: len(traced.memory.get_finished_spans()) == num_spans)
        return reply, traced.memory.get_finished_spans()

    return ask


def test_a_span_has_vllms_attributes_and_the_conventions(ask):
    reply, (span,) = ask(temperature=0.5, top_p=0.9)
    found, usage = dict(span.attributes), reply.json()["usage"]
    assert span.name == "llm_request" and span.kind.name == "SERVER" and span.status.is_ok
    assert found["gen_ai.request.id"] == f"{reply.json()['id']}-0"
    for name, wanted in {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 1,
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.response.finish_reasons": ("length",),
    }.items():
        assert found[name] == wanted, name
    latency = {name.rpartition(".")[2]: value for name, value in found.items() if ".latency." in name}
    parts = [latency[f"time_in_{part}"] for part in ("queue", "model_prefill", "model_decode")]
    assert all(part >= 0 for part in parts) and sum(parts) == pytest.approx(latency["e2e"], abs=1e-3)
    assert latency["time_to_first_token"] == pytest.approx(parts[0] + parts[1], abs=1e-3)
    assert (span.end_time - span.start_time) / 1e9 >= latency["e2e"]
    assert SAID not in str(found)


def test_the_clients_trace_goes_on(ask):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    _, (span,) = ask(headers=headers)
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("vendor") == "1"
    for headers in (None, {"traceparent": "nonsense"}):
        _, (alone,) = ask(headers=headers)
        assert alone.parent is None and f"{alone.context.trace_id:032x}" != TRACE


def test_a_span_for_each_prompt_whatever_its_choices(ask):
    _, spans = ask(prompt=["a", "b"], n=3, num_spans=2)
    assert {span.attributes["gen_ai.usage.completion_tokens"] for span in spans} == {18}
    assert {span.attributes["gen_ai.usage.num_sequences"] for span in spans} == {3}
    assert all(span.attributes["gen_ai.latency.time_in_queue"] >= 0 for span in spans)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SAID}], "max_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": SAID}], "max_tokens": 4, "model": "tiny"}),
        ("/v1/responses", {"input": SAID, "max_output_tokens": 4}),
    ],
)
def test_every_endpoint_that_generates_has_spans(traced, eventually, path, body):
    traced.memory.clear()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    reply = httpx.post(f"{traced.url}{path}", json=body, headers=headers, timeout=30)
    assert reply.status_code == 200, reply.text
    eventually(lambda: traced.memory.get_finished_spans())
    (span,) = traced.memory.get_finished_spans()
    assert span.attributes["gen_ai.operation.name"] == "chat" and f"{span.context.trace_id:032x}" == TRACE


def test_a_client_that_leaves_ends_its_span_as_an_error(traced, eventually):
    traced.memory.clear()
    body = {"prompt": "x", "stream": True, "max_tokens": 1500, "ignore_eos": True}
    with httpx.stream("POST", f"{traced.url}/v1/completions", json=body, timeout=30) as reply:
        next(reply.iter_lines())
    eventually(lambda: traced.memory.get_finished_spans())
    (span,) = traced.memory.get_finished_spans()
    assert span.attributes["error.type"] == "abort" and not span.status.is_ok


def test_what_is_refused_has_no_span(traced):
    traced.memory.clear()
    bad = {"prompt": "x", "structured_outputs": {"regex": "("}}
    assert httpx.post(f"{traced.url}/v1/completions", json=bad, timeout=30).status_code == 400
    assert not traced.memory.get_finished_spans()


def test_a_collector_gets_them_over_http(serving, eventually):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            import gzip

            data = self.rfile.read(int(self.headers["content-length"]))
            data = gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data
            got.append((self.path, ExportTraceServiceRequest.FromString(data)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    telemetry.check(endpoint)
    with serving(AsyncLLM("dummy:tiny", overrides=TINY), names=("tiny",), tracing=telemetry.start(endpoint)) as url:
        httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=30)
    collector.shutdown()  # the server has ended, and sent what it had
    ((path, request),) = got
    (resource,) = request.resource_spans
    assert path == "/v1/traces"
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "minivllm"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["llm_request"]


def test_a_collector_that_is_gone_keeps_no_server_from_ending(monkeypatch, caplog):
    monkeypatch.setattr(telemetry, "FLUSH_SECONDS", 0.05)
    hang = threading.Event()
    telemetry.Tracing(SimpleNamespace(get_tracer=lambda name: None, shutdown=lambda: hang.wait(10))).close()
    assert "does not answer" in caplog.text
    hang.set()


def test_without_the_extra_it_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, telemetry.EXPORTER, None)
    with pytest.raises(ConfigError, match=r'pip install "minivllm\[otel\]"'):
        telemetry.check("http://127.0.0.1:4318/v1/traces")


@pytest.mark.parametrize("wrong", ["localhost:4317", "grpc://host:4317", "http://", ""])
def test_an_endpoint_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigError, match="such as http"):
        telemetry.check(wrong)
