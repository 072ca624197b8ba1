"""A server as a process, and clients that talk to it in bytes: what they send is what arrives, right or wrong."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import h11
import httpx
import psutil
from eventually import PATIENCE

LONG = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}
# int8, whose kernels are ours: for dense products oneDNN keeps code for each shape that it has seen, hundreds of MB
# once batches have had every size (bench/dense_memory.py). That is no leak of ours, but it hides what would be one.
SMALL = ["--set", "kv.num_blocks=2048", "--set", "executor.num_threads=1", "--quantization", "int8"]
SMALL += ["--log-level", "warning", "--allowed-host", "x"]


class Served:
    """`python -m minivllm.serve --model dummy:tiny` with these options, ready."""

    def __init__(self, *args: str):
        command = [sys.executable, "-m", "minivllm.serve", "--model", "dummy:tiny", "--port", "0", *SMALL, *args]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ready = next((line for line in self.process.stdout if line.startswith("Ready")), "")
        assert ready, f"the server has not started: exit code {self.process.wait()}"
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.url = re.search(r"(http://\S+)/v1", ready)[1]
        self.port = int(self.url.rpartition(":")[2])
        self.ps = psutil.Process(self.process.pid)

    def core(self) -> psutil.Process:
        """The engine core's process."""
        (core,) = [child for child in self.ps.children(recursive=True) if "minivllm.engine.process" in child.cmdline()]
        return core

    def cpu_seconds(self) -> float:
        """What its own process has had of the processor, in all threads: a clock that no neighbour makes go on."""
        return sum(self.ps.cpu_times()[:2])

    def cpu_seconds_of_all(self) -> float:
        """And its children, those that have ended too."""
        return sum(sum(process.cpu_times()[:4]) for process in (self.ps, *self.ps.children(recursive=True)))

    def rss(self) -> int:
        """Bytes, of all its processes."""
        return sum(process.memory_info().rss for process in (self.ps, *self.ps.children(recursive=True)))

    def state(self) -> dict[str, int]:
        """What it holds: see serve/debug.py, and the gauges of /metrics."""
        state = httpx.get(f"{self.url}/debug/process", timeout=PATIENCE).json()
        del state["rss_bytes"]
        return state | {name: self.metric(name) for name in ("num_requests_running", "num_requests_waiting")} | {
            "blocks": self.metric("kv_cache_usage_perc"), "children": len(self.ps.children(recursive=True)),
        }  # fmt: skip

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        return float(re.search(rf"^minivllm:{name}{{.*}} (.*)$", text, re.M)[1])

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE)

    def serves(self) -> bool:
        return self.post(prompt="x", max_tokens=2).status_code == 200

    def stop(self) -> None:
        self.process.terminate()
        try:
            assert self.process.wait(PATIENCE) == 0
        finally:
            self.process.kill()
            self.process.wait()


@contextmanager
def served(*args: str):
    server = Served(*args)
    children = server.ps.children(recursive=True)
    try:
        yield server
        children = server.ps.children(recursive=True)
    finally:
        server.stop()
    psutil.wait_procs(children, timeout=PATIENCE)
    assert not [child for child in children if child.is_running()], "a process has outlived the server"


# ---------------------------------------------------------------------------------------- bytes


class Answer(NamedTuple):
    status: int  # 0: the connection ended without one
    body: bytes
    whole: bool  # it ended as its own headers say

    @property
    def events(self) -> list[Any]:
        """Of a stream, without [DONE]."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def error(self) -> dict[str, Any] | None:
        """Of an error answer, or of the event that ends a stream."""
        data = json.loads(self.body) if self.body.startswith(b"{") else (self.events or [{}])[-1]
        return data.get("error")


def parse(data: bytes) -> Answer:
    """The first answer in what a server has sent. Raises h11.RemoteProtocolError for what is not HTTP."""
    if not data:
        return Answer(0, b"", False)
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    status, body = 0, b""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            if status:
                return Answer(status, body, False)
            raise
        if event is h11.NEED_DATA:
            connection.receive_data(b"")  # it has closed
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return Answer(status, body, True)
        elif isinstance(event, h11.ConnectionClosed):
            return Answer(status, body, False)


def request(body: Any, path: str = "/v1/completions", headers: str = "") -> bytes:
    """One POST; body: bytes as they are, or anything as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n{headers}"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data


def exchange(port: int, data: bytes, seconds: float = PATIENCE) -> Answer:
    """Send these bytes, then read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as client:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has answered, and does not want the rest
            client.sendall(data)
        return parse(read_all(client))


def read_all(client: socket.socket) -> bytes:
    data = b""
    try:
        while piece := client.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


async def ask(port: int, body: Any, path: str = "/v1/completions") -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(body, path))
    try:
        return parse(await reader.read())
    except ConnectionResetError:
        return Answer(0, b"", False)
    finally:
        writer.close()


def leave_rudely(client: socket.socket) -> None:
    """Close with a reset instead of an end."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
