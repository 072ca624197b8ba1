"""The server behind the nginx and the Caddy of deploy/: what comes through, and what does not. Only their addresses
and certificates are others here."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from serve import certificates
from serve.conftest import FakeEngine, eventually, serving

from minivllm.serve import command, hosts
from minivllm.serve.proxies import TrustedProxies

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
NAME = "llm.example.org"
STREAM = {"prompt": "x", "stream": True}
NGINX = """
daemon off;
master_process off;
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


def with_ours(file: str, ours: dict[str, str]) -> str:
    """A file of deploy/, with what is of this machine in the place of what stands there."""
    text = (DEPLOY / file).read_text()
    for there, here in ours.items():
        assert text.count(f"{there}") == 1, there
        text = text.replace(there, here)
    return text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def nginx(folder: Path, port: int, server: str) -> list[str]:
    cert, key = certificates.make(folder)
    ours = {
        "server 127.0.0.1:8000;": f"server {server};",
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/ssl/minivllm/cert.pem": str(cert),
        "/etc/ssl/minivllm/key.pem": str(key),
    }
    (folder / "site.conf").write_text(with_ours("nginx.conf", ours))
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder))
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]


def caddy(folder: Path, port: int, server: str) -> list[str]:
    """Without TLS, which would need a name that the world knows."""
    ours = {
        "{\n\tservers {": "{\n\tadmin off\n\tauto_https off\n\tservers {",
        f"\n{NAME} {{": f"\nhttp://:{port} {{\n\tbind 127.0.0.1",
        "reverse_proxy 127.0.0.1:8000": f"reverse_proxy {server}",
    }
    (folder / "Caddyfile").write_text(with_ours("Caddyfile", ours))
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@pytest.fixture(scope="module", params=[nginx, caddy], ids=lambda start: start.__name__)
def behind(request, tmp_path_factory):
    """(engine, url of the proxy, port, how it is reached)."""
    name = request.param.__name__
    if shutil.which(name) is None:
        pytest.skip(f"needs {name} (Debian: apt install {name})")
    folder, port, engine = tmp_path_factory.mktemp(name), free_port(), FakeEngine()
    options = {"proxies": TrustedProxies(["127.0.0.1"]), "host_names": hosts.names([NAME], "127.0.0.1", "127.0.0.1")}
    with serving(engine, **options) as url:
        started = request.param(folder, port, url.removeprefix("http://"))
        environment = os.environ | {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
        with open(folder / "log", "w") as log, subprocess.Popen(started, stderr=log, env=environment) as proxy:
            try:
                scheme = "https" if name == "nginx" else "http"
                eventually(lambda: proxy.poll() is not None or is_open(port), 20)
                assert proxy.poll() is None, (folder / "log").read_text()
                yield SimpleNamespace(engine=engine, name=name, port=port, url=f"{scheme}://127.0.0.1:{port}")
            finally:
                proxy.kill()  # Caddy would wait for its clients


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def client(behind):
    """As somebody who knows the server's name."""
    eventually(lambda: behind.engine.num_open == 0)  # of the test before
    behind.engine.reset()
    with client_from(behind) as client:
        yield client


def client_from(behind, address: str = "127.0.0.1", name: str = NAME) -> httpx.Client:
    transport = httpx.HTTPTransport(local_address=address, verify=False)
    return httpx.Client(transport=transport, base_url=behind.url, headers={"host": name}, timeout=20)


def test_an_answer_and_an_error_come_through(client):
    assert client.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"] == "abc"
    assert client.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
    assert client.get("/").headers["content-type"].startswith("text/html")


def test_a_token_comes_as_soon_as_there_is_one(behind, client):
    hold = threading.Event()
    behind.engine.script = ["a", hold, "b"]
    with client.stream("POST", "/v1/completions", json=STREAM) as reply:
        lines = (line[6:] for line in reply.iter_lines() if line)
        assert json.loads(next(lines))["choices"][0]["text"] == "a", "while the rest does not exist"
        hold.set()
        assert list(lines)[-1] == "[DONE]"
    hold.clear()
    with client.stream("POST", "/api/generate", json={"prompt": "x", "model": "fake", "raw": True}) as reply:
        lines = reply.iter_lines()  # of JSON objects, not events
        assert json.loads(next(lines))["response"] == "a"
        hold.set()
        assert json.loads(list(lines)[-1])["done"]


def test_a_client_that_leaves_ends_its_request(behind, client):
    behind.engine.script = ["a", threading.Event()]
    with client.stream("POST", "/v1/completions", json=STREAM) as reply:
        lines = reply.iter_lines()  # whose end would close the connection
        next(lines)
        assert behind.engine.num_open == 1
    eventually(lambda: behind.engine.num_open == 0)


def test_the_log_names_the_client_whatever_it_says_of_itself(behind, client, caplog):
    caplog.set_level(logging.INFO, "minivllm.serve.requests")
    with client_from(behind, "127.0.0.2") as other:
        other.get("/version", headers={"x-forwarded-for": "9.9.9.9, x:y"})
    client.get("/version", headers={"x-forwarded-for": "9.9.9.9"})
    told = [record.fields["client"] for record in caplog.records if hasattr(record, "fields")]
    assert told == ["127.0.0.2", "127.0.0.1"]


def test_another_name_is_refused(behind):
    with client_from(behind, name="evil.example") as client:
        assert client.get("/v1/models").status_code == 403


def test_a_body_over_the_limit_is_refused_before_the_server_sees_it(behind, client):
    reply = client.post("/v1/completions", content=b" " * (17 << 20), headers={"content-type": "application/json"})
    assert reply.status_code == 413 and behind.engine.calls == []


def test_an_address_has_so_many_requests_at_a_time_and_others_are_served(behind, client):
    if behind.name != "nginx":
        pytest.skip("Caddy has no such limit")
    hold = threading.Event()
    behind.engine.script = ["a", hold, "b"]
    with contextlib.ExitStack() as stack, client_from(behind, "127.0.0.2") as other:
        stack.callback(hold.set)
        for _ in range(64):
            one = stack.enter_context(client_from(behind))
            stack.enter_context(one.stream("POST", "/v1/completions", json=STREAM))
        assert client.get("/version").status_code == 429
        assert other.get("/version").status_code == 200


def test_tls_is_nginxs(behind):
    if behind.name != "nginx":
        pytest.skip("without TLS here")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", behind.port), 20) as plain, context.wrap_socket(plain) as wrapped:
        assert wrapped.version() in ("TLSv1.2", "TLSv1.3")


@pytest.mark.parametrize("file", ["nginx.conf", "Caddyfile"])
def test_the_command_that_it_names_is_one(file):
    (line,) = [line for line in (DEPLOY / file).read_text().splitlines() if "minivllm serve" in line]
    args = command.parser("minivllm serve").parse_args(line.partition("serve ")[2].split())
    assert args.allowed_host == [NAME] and args.trusted_proxy == [args.host]
