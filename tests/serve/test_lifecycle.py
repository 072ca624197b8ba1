"""The server as a process: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import httpx
import psutil
import pytest
from eventually import PATIENCE, once_of
from starlette.applications import Starlette

from minivllm.serve import server as module


class Process:
    def __init__(self, *args, **options):
        """options: Popen's."""
        command = [sys.executable, "-m", "minivllm.serve", "--model", "dummy:tiny", "--port", "0", *args]
        # A file: a pipe that nobody reads meanwhile is full after some hundred lines of the log, and the server stands.
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        files = {"stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(command, **files, text=True, start_new_session=True, **options)
        self.output = ""

    def wait_ready(self):
        for line in self.process.stdout:
            self.output += line
            if found := re.search(r"Ready in .* (http://\S+)/v1", line):
                return found[1]
        raise AssertionError(self.output + self.logged())

    def logged(self):
        """What is on its standard error so far."""
        return os.pread(self.log.fileno(), 2**30, 0).decode()

    def end(self, number=signal.SIGINT):
        """(exit code, stdout, stderr, seconds it took to stop). All its processes get the signal, as from a terminal
        or from systemd."""
        begin = time.perf_counter()
        os.killpg(self.process.pid, number)
        out, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, self.output + out, self.logged(), time.perf_counter() - begin


@pytest.fixture
def start():
    started = []

    def start(*args, **options):
        started.append(Process(*args, **options))
        return started[-1]

    yield start
    for process in started:
        if process.process.poll() is None:
            process.process.kill()
            process.process.communicate()


def test_start_ends_in_a_table_of_choices_and_a_line_with_the_url(start):
    server = start("--set", "kv.num_blocks=64", "--served-model-name", "small", "other")
    url = server.wait_ready()
    lines = server.output.splitlines()
    assert lines[0] == "Loading dummy:tiny ..."
    for name in ("URL", "model", "attention backend", "dtype", "KV blocks", "model.device", "model.max_model_len"):
        assert any(line.startswith(name) for line in lines), name
    assert "64" in next(line for line in lines if line.startswith("KV blocks"))
    assert "as configured" in next(line for line in lines if line.startswith("KV blocks"))
    assert [m["id"] for m in httpx.get(f"{url}/v1/models").json()["data"]] == ["small", "other"]
    assert httpx.post(f"{url}/v1/completions", json={"model": "other", "prompt": "x"}).json()["model"] == "small"
    server.end()


AT_EXIT = """
import atexit, gc, os, pathlib
tell = lambda: (pathlib.Path(__file__).parent / f"{os.getpid()}.frozen").write_text(str(gc.get_freeze_count()))
atexit.register(tell)
"""


@pytest.mark.parametrize("front_ends", [1, 2])
def test_pythons_collector_never_walks_what_was_there_at_the_start(start, front_ends, tmp_path):
    """Of the server's processes and of its engine core: each has imported tens of thousands of objects."""
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    server = start("--api-servers", str(front_ends), env=os.environ | {"PYTHONPATH": str(tmp_path)})
    server.wait_ready()
    assert server.end(signal.SIGTERM)[0] == 0
    counts = [int(path.read_text()) for path in tmp_path.glob("*.frozen")]
    assert sum(count > 50_000 for count in counts) == 1 + front_ends, counts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_at_once_and_tells_the_streams(start, number):
    """uvicorn's own waits are 0.2 s, the rest is the end of two interpreters on a busy machine."""
    assert once_of(3, lambda: seconds_to_stop(start(), number) < 4)


def seconds_to_stop(server, number):
    """Of a server with a stream, which is told."""
    url = server.wait_ready()
    lines = []
    first = threading.Event()

    def stream():
        body = {"prompt": "x", "stream": True, "max_tokens": 2000, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                first.set()

    reader = threading.Thread(target=stream)
    reader.start()
    assert first.wait(PATIENCE)
    code, out, err, seconds = server.end(number)
    reader.join(PATIENCE)
    assert code == 0
    assert "Traceback" not in out + err and "starting it again" not in err
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
    assert told["error"]["code"] == "server_shutting_down"
    assert lines[-2] == "data: [DONE]"
    return seconds


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.2, 0.3, 0.45])
def test_an_interrupt_while_loading_ends_at_once_without_a_traceback(start, seconds):
    """Python swallows a KeyboardInterrupt that is raised in one of importlib's callbacks: the server loaded on."""
    server = start()
    assert server.process.stdout.readline().startswith("Loading")
    time.sleep(seconds)
    code, out, err, _ = server.end()
    assert code == 130
    assert "Traceback" not in out + err and "interrupted" in err


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.15, 0.4])
@pytest.mark.parametrize("more", [[], ["--replicas", "2"], ["--api-servers", "2"]], ids=" ".join)
def test_ctrl_c_while_cores_start_is_one_word_and_leaves_no_file(start, short_folder, more, seconds):
    """A core whose interpreter is just starting is signalled too."""
    server = start(*more, env=os.environ | {"TMPDIR": str(short_folder)})
    process = psutil.Process(server.process.pid)
    while not process.children():
        time.sleep(0.002)
    time.sleep(seconds)
    code, out, err, _ = server.end()  # which waits until the last of them has closed its standard error
    assert (code, err) == (130, "interrupted\n")
    assert list(short_folder.iterdir()) == []


def test_ctrl_c_twice_in_a_row_is_one_and_a_later_one_ends_at_once(monkeypatch):
    server, now, ended = module.Server(Starlette()), [10.0], []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module.os, "_exit", ended.append)
    for later in (0.0, 0.1, 0.3):  # a wrapper passes on what the terminal has sent already
        now[0] += later
        server.handle_exit(signal.SIGINT, None)
        assert server.should_exit and not server.force_exit and not ended
    now[0] += 0.2
    server.handle_exit(signal.SIGTERM, None)
    assert not ended
    server.handle_exit(signal.SIGINT, None)
    assert ended == [130]


def test_a_trace_of_a_served_run_can_be_exported(start, tmp_path):
    path = tmp_path / "run.jsonl"
    server = start("--trace", str(path))
    httpx.post(f"{server.wait_ready()}/v1/completions", json={"prompt": "x", "max_tokens": 3})
    assert server.end()[0] == 0
    assert json.loads(path.read_text().splitlines()[0])["schema"] == "minivllm.trace/1"
    command = [sys.executable, "-m", "minivllm", "trace", "export", str(path), str(tmp_path / "run.json")]
    assert "events" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_chat_in_process_talks_and_an_interrupt_stops_the_answer_only():
    command = [sys.executable, "-u", "-m", "minivllm", "chat", "--model", "dummy:tiny", "--max-tokens", "2000"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, "--temperature", "1"], **pipes, text=True, bufsize=0)
    try:
        for _ in range(3):  # random weights may end an answer at once; then the interrupt has come too late
            process.stdin.write("hello\n")
        process.stdin.flush()
        seen = ""
        while "> " not in seen or len(seen) < 120:
            seen += process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("/quit\n", timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "Talking to dummy:tiny" in seen


def test_a_model_that_does_not_exist_is_one_message(start):
    server = start("--model", "./no-such-folder")
    out, _ = server.process.communicate(timeout=PATIENCE)
    err = server.logged()
    assert server.process.returncode == 1
    assert "no-such-folder" in err and err.startswith("error: ")
    assert "Traceback" not in err
