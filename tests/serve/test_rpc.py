"""gRPC over a real channel: the same answers as HTTP, and what happens to a call that ends early."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from eventually import PATIENCE
from steps import held_after

from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.metrics import Metrics
from minivllm.errors import ConfigError
from minivllm.serve.app import create_app
from minivllm.serve.connections import ConnectionLimits
from minivllm.serve.deadline import Deadlines
from minivllm.serve.errors import ApiError
from minivllm.serve.keys import Keys
from minivllm.serve.limits import Limits
from minivllm.serve.proxies import TrustedProxies
from minivllm.serve.rate_limit import RateLimit, RateLimiter
from minivllm.serve.rpc import available, schema
from minivllm.serve.rpc.schema import SERVICE, message
from minivllm.serve.rpc.server import GrpcServer, address_of, let_in
from minivllm.serve.server import Server

grpc = pytest.importorskip("grpc")
health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2")
health_pb2_grpc = pytest.importorskip("grpc_health.v1.health_pb2_grpc")

TINY = {"kv.num_blocks": 300, "executor.num_threads": 1, "model.dtype": "float32"}
FOLDER = Path(schema.__file__).parent


class Running:
    """An application over a real engine that answers HTTP and gRPC, in a thread."""

    def __init__(self, **options):
        import socket

        self.engine, ready = AsyncLLM("dummy:tiny", overrides=TINY), threading.Event()
        self.app = create_app(self.engine, Metrics("tiny"), ["tiny"], **options)
        self.grpc = GrpcServer(self.app, "127.0.0.1", 0)
        self.server = Server(self.app, ready.set, [self.grpc.running()])
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.run_on, args=(listener,))
        self.thread.start()
        assert ready.wait(PATIENCE)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.grpc.port}")
        self.generate = self.channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=message("GenerateResponse").FromString,
        )

    def stop(self):
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        self.channel.close()
        assert not self.thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="module")
def running():
    running = Running()
    yield running
    running.stop()


def ask(text=None, tokens=None, structured=None, model="", stream=False, **sampling):
    request = message("GenerateRequest")(stream=stream, model=model)
    if text is not None:
        request.text = text
    if tokens is not None:
        request.tokens.ids.extend(tokens)
    for name, value in sampling.items():
        field = getattr(request.sampling, name)
        field.extend(value) if isinstance(value, list) else setattr(request.sampling, name, value)
    for name, value in (structured or {}).items():
        if name == "choice":
            request.structured.choice.texts.extend(value)
        else:
            setattr(request.structured, name, value)
    return request


def failure(call):
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


SAMPLED = {"max_tokens": 12, "temperature": 0.7, "seed": 5, "ignore_eos": True}


def test_the_answer_is_that_of_http_streamed_or_whole(running):
    body = {"prompt": "Once upon", **SAMPLED, "logprobs": 1, "return_token_ids": True}
    (wanted,) = httpx.post(f"{running.url}/v1/completions", json=body, timeout=30).json()["choices"]
    (whole,) = running.generate(ask("Once upon", logprobs=1, **SAMPLED))
    (out,) = whole.outputs
    assert (out.text, list(out.token_ids)) == (wanted["text"], wanted["token_ids"])
    assert list(out.logprobs) == pytest.approx(wanted["logprobs"]["token_logprobs"], abs=1e-6)
    assert out.finish_reason == "length" and whole.usage.completion_tokens == 12
    parts = list(running.generate(ask("Once upon", stream=True, **SAMPLED)))
    assert len(parts) > 3 and "".join(part.outputs[0].text for part in parts) == wanted["text"]
    assert [part.HasField("usage") for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len({part.id for part in parts}) == 1


def test_tokens_choices_and_structure(running):
    several = list(running.generate(ask(tokens=[1, 2, 3], stream=True, n=3, **SAMPLED)))
    assert {out.index for part in several for out in part.outputs} == {0, 1, 2}
    (whole,) = running.generate(ask(tokens=[1, 2, 3], n=3, **SAMPLED))
    texts = [out.text for out in whole.outputs]
    assert texts == ["".join(o.text for part in several for o in part.outputs if o.index == i) for i in range(3)]
    assert several[-1].usage == whole.usage and whole.usage.prompt_tokens == 3
    for structured, allowed in (({"choice": ["yes", "no"]}, ("yes", "no")), ({"regex": "ab"}, ("ab",))):
        (held,) = running.generate(ask("x", structured=structured, max_tokens=20))
        assert held.outputs[0].text in allowed


@pytest.mark.parametrize(
    "request_, code, told",
    [
        (ask(), "INVALID_ARGUMENT", "prompt is missing"),
        (ask("x", temperature=-1.0), "INVALID_ARGUMENT", "temperature"),
        (ask("x", structured={"regex": "("}), "INVALID_ARGUMENT", "regex"),
        (ask("x", stream=True, structured={"json": "{"}), "INVALID_ARGUMENT", "json"),
        (ask("x", model="other"), "NOT_FOUND", "other"),
        (ask(tokens=[1] * 5000), "INVALID_ARGUMENT", "context"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_refused_with_its_code(running, request_, code, told):
    found, details = failure(running.generate(request_))
    assert found.name == code and told in details


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_call_that_ends_early_frees_its_requests(running, eventually, how):
    long = ask("x", stream=True, max_tokens=2000, ignore_eos=True)
    with held_after(running.engine, 3) as go_on:
        call = running.generate(long, timeout=1.0 if how == "deadline" else None)
        if how == "cancel":
            next(call)
            assert running.engine.stats.num_running == 1
            call.cancel()
        assert failure(call)[0].name == {"cancel": "CANCELLED", "deadline": "DEADLINE_EXCEEDED"}[how]
        go_on.set()
    eventually(lambda: running.engine.stats.num_running == 0 and running.engine.stats.kv_usage == 0)
    assert running.app.state.service.num_open == 0


def test_metrics_count_calls_as_requests(running):
    before = running.app.state.service.metrics.finished["length"]
    list(running.generate(ask("x", **SAMPLED)))
    assert running.app.state.service.metrics.finished["length"] == before + 1


def test_health(running, eventually):
    stub = health_pb2_grpc.HealthStub(running.channel)
    for service in ("", SERVICE):
        status = stub.Check(health_pb2.HealthCheckRequest(service=service)).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    running.engine._stalls[0] = "hangs"
    try:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        eventually(lambda: stub.Check(request).status == health_pb2.HealthCheckResponse.NOT_SERVING)
    finally:
        running.engine._stalls.clear()
    with pytest.raises(grpc.RpcError):
        stub.Check(health_pb2.HealthCheckRequest(service="other"))


def test_keys_and_limits_are_those_of_http():
    running = Running(api_keys=["secret"], rate_limit=RateLimit(1 / 3600, 2))
    try:
        assert failure(running.generate(ask("x")))[0].name == "UNAUTHENTICATED"
        wrong = [("authorization", "Bearer other")]
        assert failure(running.generate(ask("x"), metadata=wrong))[0].name == "UNAUTHENTICATED"
        for metadata in ([("authorization", "Bearer secret")], [("x-api-key", "secret")]):
            assert list(running.generate(ask("x", max_tokens=2), metadata=metadata))
        code, told = failure(running.generate(ask("x"), metadata=[("x-api-key", "secret")]))
        assert code.name == "RESOURCE_EXHAUSTED" and "try again" in told
        http = httpx.post(f"{running.url}/v1/completions", json={"prompt": "x"}, headers={"x-api-key": "secret"})
        assert http.status_code == 429, "one bucket for both"
    finally:
        running.stop()


def test_a_call_that_takes_longer_than_the_server_allows_ends():
    late = threading.Event()

    async def sleep(seconds):
        while not late.is_set():
            await asyncio.sleep(0.005)

    running = Running(deadlines=Deadlines(30.0, sleep=sleep))
    try:
        call = running.generate(ask("x", stream=True, max_tokens=2000, ignore_eos=True))
        next(call)
        late.set()
        code, told = failure(call)
        assert (code.name, told) == ("DEADLINE_EXCEEDED", "the request was not done within 30 s (--request-timeout)")
    finally:
        running.stop()


def test_a_server_that_ends_tells_its_calls():
    running = Running()
    call = running.generate(ask("x", stream=True, max_tokens=2000, ignore_eos=True))
    next(call)
    stopping = threading.Thread(target=running.stop)
    stopping.start()
    code, told = failure(call)
    stopping.join(PATIENCE)
    assert (code.name, told) == ("UNAVAILABLE", "the server is shutting down")


def test_the_compiled_form_is_that_of_the_proto(tmp_path):
    pytest.importorskip("grpc_tools")
    out = tmp_path / "generate.desc"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(FOLDER), "--descriptor_set_out", str(out)]
    subprocess.run([*command, "generate.proto"], check=True, cwd=FOLDER)
    assert out.read_bytes() == (FOLDER / "generate.desc").read_bytes(), "run the command that schema.py names"


def test_without_the_extra_it_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(available, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "minivllm\[grpc\]"'):
        available.check()


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(running):
    command = [sys.executable, "-m", "minivllm.serve", "--model", "dummy:tiny", "--port", "0", "--grpc-port"]
    done = subprocess.run([*command, str(running.grpc.port)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 1 and "in use" in done.stderr and "Loading" not in done.stdout


@pytest.mark.parametrize(("trusted", "wanted"), [([], [True, False]), (["127.0.0.1"], [True, True])])
def test_a_trusted_proxy_says_for_whom_it_calls(trusted, wanted):
    service = SimpleNamespace(limits=Limits(RateLimiter(RateLimit(1e-9, 1))))
    state = SimpleNamespace(keys=Keys(), service=service, proxies=TrustedProxies(trusted))
    told = []
    for client in ("192.0.2.1", "192.0.2.2"):
        try:
            told.append(bool(let_in(state, {"x-forwarded-for": client}, "ipv4:127.0.0.1:5000")))
        except ApiError:
            told.append(False)
    assert told == wanted


def test_connections_are_bounded_as_those_of_http(fake_engine):
    app = create_app(fake_engine, Metrics("fake"), ["fake"], connection_limits=ConnectionLimits(2, 2))
    server = GrpcServer(app, "127.0.0.1", 0)

    async def main():
        app.state.closing = asyncio.get_running_loop().create_future()
        told = []
        async with server.running():
            for _ in range(4):
                reader, _ = held = await asyncio.open_connection("127.0.0.1", server.port)
                connections.append(held)
                told.append(bool(await reader.read(100)))  # HTTP/2's settings, or the end
        return told

    connections = []
    assert asyncio.run(main()) == [True, True, False, False]


def test_no_page_gets_an_answer_from_its_port(running):
    """Which is why no name is checked there (browsers.py): what a browser speaks without TLS is not understood."""
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"http://127.0.0.1:{running.grpc.port}/{SERVICE}/Generate", json={}, timeout=20)


@pytest.mark.parametrize(
    "peer, address", [("ipv4:127.0.0.1:5000", "127.0.0.1"), ("ipv6:%5B::1%5D:5000", "::1"), ("ipv6:[::1]:80", "::1")]
)
def test_a_peer_is_known_by_its_address(peer, address):
    assert address_of(peer) == address
