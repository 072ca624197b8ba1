"""Several server processes on one port, over one engine: with real clients, signals and kills."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import uuid

import httpx
import psutil
import pytest
from eventually import PATIENCE
from eventually import eventually as wait_for
from lora.adapters import write_adapter
from prometheus_client.parser import text_string_to_metric_families
from serve.test_lifecycle import Process

SMALL = ["--set", "kv.num_blocks=300", "--set", "executor.num_threads=1"]


class Group:
    """The parent and those that it has started."""

    def __init__(self, *args):
        self.server = Process("--api-servers", "2", *SMALL, *args)
        self.parent = psutil.Process(self.server.process.pid)

    def children(self, module):
        found = []
        for process in self.parent.children(recursive=True):
            try:
                if module in process.cmdline():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                pass
        return found

    @property
    def servers(self):
        return self.children("minivllm.serve.front_end")

    @property
    def cores(self):
        return self.children("minivllm.engine.process")

    def connect(self, process, seconds=PATIENCE):
        """A client whose connection is this server's: the kernel chooses, so it asks until it is."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            client = httpx.Client(base_url=self.url, timeout=60)
            client.get("/version")
            port = client._transport._pool.connections[0]._connection._network_stream.get_extra_info("client_addr")[1]
            if any(c.raddr and c.raddr.port == port for c in process.net_connections("tcp")):
                return client
            client.close()
        raise AssertionError("the kernel gave that server no connection")


@pytest.fixture(scope="module")
def started():
    """start(*options) gives the group with these options that runs, or a new one if a test has ended the last."""
    groups: dict[tuple[str, ...], Group] = {}

    def start(*options):
        if options not in groups or groups[options].server.process.poll() is not None:
            groups[options] = Group(*options)
            groups[options].url = groups[options].server.wait_ready()
        return groups[options]

    yield start
    for group in groups.values():
        if group.server.process.poll() is None:
            group.server.end(signal.SIGTERM)


@pytest.fixture
def group(started):
    limit = ["--rate-limit", "1/h", "--rate-burst", "1000"]  # no test comes near, but each answer says what is left
    return started("--set", "engine.restart=true", "--api-key", "secret", "--api-key", "other", *limit)


AUTH = {"authorization": "Bearer secret"}


def stream(client, lines, first, max_tokens=2000):
    body = {"prompt": "x", "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
    try:
        with client.stream("POST", "/v1/completions", json=body, headers=AUTH) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                first.set()
    except httpx.HTTPError as error:
        lines.append(error)
        first.set()


def metric(client, name, **labels):
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = [s for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items()]
    return sum(sample.value for sample in found)


def test_both_answer_the_same_and_share_metrics_and_the_cache(group):
    assert len(group.servers) == 2 and len(group.cores) == 1
    clients = [group.connect(server) for server in group.servers]
    wait_for(lambda: metric(clients[0], "minivllm:num_requests_running") == 0)

    def counted(client):
        names = "request_success_total", "request_prompt_tokens_count", "generation_tokens_total"
        return [metric(client, f"minivllm:{name}") for name in names]

    before = counted(clients[0])
    new = uuid.uuid4().hex * 7  # nothing of it is in the cache
    body = {"prompt": new, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answers = [client.post("/v1/completions", json=body, headers=AUTH).json() for client in clients]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 100, "the same key has one part of the cache"
    body_of_other = clients[0].post("/v1/completions", json=body, headers={"authorization": "Bearer other"}).json()
    assert body_of_other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for client in clients:
        wait_for(lambda client=client: counted(client)[0] == before[0] + 3)
        assert counted(client)[1:] == [before[1] + 3, before[2] + 15]
        assert client.get("/health").json() == {"status": "ok"}


def test_they_count_a_keys_requests_together(group):
    clients = [group.connect(server) for server in group.servers]
    body = {"prompt": "x", "max_tokens": 1}
    told = [client.post("/v1/completions", json=body, headers=AUTH).headers for client in clients * 2]
    left = [int(headers["x-ratelimit-remaining-requests"]) for headers in told]
    assert left == [left[0] - i for i in range(4)]


def test_each_refuses_a_page_that_rebinds_its_name(group):
    for client in [group.connect(server) for server in group.servers]:
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 403


def test_each_says_who_it_is_to_who_looks_at_the_engine(group):
    told = []
    for server in group.servers:
        with group.connect(server).stream("GET", "/debug/live", headers=AUTH) as reply:
            told.append(json.loads(next(line for line in reply.iter_lines() if line.startswith("data: "))[6:]))
    assert {event["server"] for event in told} == {0, 1}
    assert {(event["servers"], event["replica"], event["replicas"]) for event in told} == {(2, 0, 1)}


def test_a_server_that_is_killed_leaves_no_request_behind_and_is_started_again(group):
    doomed, other = group.servers
    victim, witness = group.connect(doomed), group.connect(other)
    before = metric(witness, "minivllm:request_success_total")
    lines, first = [], threading.Event()
    reader = threading.Thread(target=stream, args=(victim, lines, first))
    reader.start()
    assert first.wait(PATIENCE) and "error" not in lines[0]
    wait_for(lambda: metric(witness, "minivllm:num_requests_running") == 1)
    assert witness.get("/load").json() == {"server_load": 1}
    doomed.send_signal(signal.SIGKILL)
    reader.join(PATIENCE)
    wait_for(lambda: witness.get("/load").json() == {"server_load": 0})
    wait_for(lambda: metric(witness, "minivllm:num_requests_running") == 0)
    wait_for(lambda: metric(witness, "minivllm:kv_cache_usage_perc") == 0)
    assert witness.post("/v1/completions", json={"prompt": "y", "max_tokens": 2}, headers=AUTH).status_code == 200
    wait_for(lambda: len(group.servers) == 2 and doomed.pid not in [s.pid for s in group.servers])
    again = next(server for server in group.servers if server.pid != other.pid)
    client = group.connect(again)
    assert client.post("/v1/completions", json={"prompt": "y", "max_tokens": 2}, headers=AUTH).status_code == 200
    wait_for(lambda: metric(client, "minivllm:request_success_total") >= before + 2)


def test_a_core_that_is_killed_ends_streams_everywhere_and_all_servers_find_the_next_one(group):
    clients = [group.connect(server) for server in group.servers]
    streams = [([], threading.Event()) for _ in clients]
    readers = [threading.Thread(target=stream, args=(c, *s)) for c, s in zip(clients, streams, strict=True)]
    for reader in readers:
        reader.start()
    assert all(first.wait(PATIENCE) for _, first in streams)
    (core,) = group.cores
    core.send_signal(signal.SIGKILL)
    for reader in readers:
        reader.join(PATIENCE)
    for lines, _ in streams:
        told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
        assert told["error"]["code"] == "engine_dead"
    for server in group.servers:
        client = group.connect(server)
        wait_for(lambda client=client: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json={"prompt": "y", "max_tokens": 2}, headers=AUTH).status_code == 200


def test_a_signal_tells_the_streams_and_leaves_no_process(group):
    pids = [process.pid for process in (*group.servers, *group.cores)]
    assert len(pids) == 3
    clients = [group.connect(server) for server in group.servers]
    streams = [([], threading.Event()) for _ in clients]
    readers = [threading.Thread(target=stream, args=(c, *s)) for c, s in zip(clients, streams, strict=True)]
    for reader in readers:
        reader.start()
    assert all(first.wait(PATIENCE) for _, first in streams)
    code, out, err, _ = group.server.end(signal.SIGTERM)
    for reader in readers:
        reader.join(PATIENCE)
    assert code == 0
    assert "Traceback" not in out + err, err
    for lines, _ in streams:
        told = [json.loads(line[6:]) for line in lines if isinstance(line, str) and line.startswith("data: {")][-1]
        assert told["error"]["code"] == "server_shutting_down"
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "a", 1, 4)
    return folder


@pytest.fixture
def replicated(started, adapters):
    return started("--replicas", "2", "--set", "engine.router=round_robin", "--lora-dir", str(adapters))


def test_an_adapter_that_one_server_loads_is_known_to_all_on_every_replica(replicated):
    one, two = (replicated.connect(server) for server in replicated.servers)
    reply = one.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "a"})
    assert reply.status_code == 200, reply.text

    def names(client):
        return [card["id"] for card in client.get("/v1/models").json()["data"]]

    wait_for(lambda: "a" in names(two))
    body = {"model": "a", "prompt": "x", "max_tokens": 5, "temperature": 0}
    texts = {client.post("/v1/completions", json=body).json()["choices"][0]["text"] for client in (one, two) * 2}
    assert len(texts) == 1
    per_engine = [metric(one, "minivllm:generation_tokens_total", engine=str(i)) for i in range(2)]
    assert all(per_engine), "each replica has served"
    assert two.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 200
    wait_for(lambda: "a" not in names(one))


@pytest.fixture
def slow_group():
    """A step of this model is long enough to be looked at; a tiny one is done before a starved process has looked."""
    group = Group("--model", "dummy:smollm2-135m", "--replicas", "2", "--set", "engine.router=round_robin")
    group.url = group.server.wait_ready()
    yield group
    group.server.end(signal.SIGTERM)


def test_a_replica_that_is_killed_ends_its_streams_with_an_event_and_no_others(slow_group):
    group = slow_group
    clients = [group.connect(group.servers[0]) for _ in range(2)]  # each with its connection, to one router
    client = group.connect(group.servers[0])
    streams = [([], threading.Event()) for _ in clients]
    readers = [threading.Thread(target=stream, args=(c, *s, 400)) for c, s in zip(clients, streams, strict=True)]
    for reader in readers:
        reader.start()

    def running():
        return [metric(client, "minivllm:num_requests_running", engine=str(i)) for i in range(2)]

    wait_for(lambda: all(first.is_set() for _, first in streams) and running() == [1, 1])
    group.cores[0].kill()
    wait_for(lambda: any(not reader.is_alive() for reader in readers))
    assert client.get("/health").json() == {"status": "degraded"}
    for reader in readers:
        reader.join(PATIENCE)
    ends = [json.loads([line for line in lines if line.startswith("data: {")][-1][6:]) for lines, _ in streams]
    told = sorted(end["error"]["code"] if "error" in end else end["choices"][0]["finish_reason"] for end in ends)
    assert told == ["length", "replica_dead"]
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    wait_for(lambda: client.get("/health").json() == {"status": "ok"})


def test_the_parents_death_ends_all_of_them(replicated):
    pids = [process.pid for process in (*replicated.servers, *replicated.cores)]
    assert len(pids) == 4
    assert re.search(r"engine.replicas +2", replicated.server.output)
    replicated.server.process.kill()
    replicated.server.process.communicate()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.mark.parametrize(
    "args, told",
    [
        (["--api-servers", "0"], "--api-servers 0: must be at least 1"),
        (["--api-servers", "2", "--set", "engine.core=inproc"], "engine.core=process"),
        (["--replicas", "2", "--set", "engine.core=inproc"], "engine.core=process"),
        (["--replicas", "2", "--task", "embed", "--set", "kv.prefix=radix"], "kv.prefix"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(args, told):
    command = [sys.executable, "-m", "minivllm.serve", "--model", "dummy:tiny", "--port", "0", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1 and told in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_the_port_of_another_server_is_refused_before_anything_is_loaded(group_port):
    command = [sys.executable, "-m", "minivllm.serve", "--model", "dummy:tiny", "--api-servers", "2"]
    done = subprocess.run([*command, "--port", str(group_port)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 1 and "in use" in done.stderr


@pytest.fixture
def group_port():
    import socket

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]
