"""`python ARGS` with torch there already: processes that are forked from one that has imported it, and nothing else.

Importing torch takes two seconds of a core, in each of a hundred processes whose start is not what is tested. They get
all else as from the command line: arguments, environment, folder, pipes, a `__main__` and an interpreter's end. Where
the start, the signals or the end of a process are what is tested, it is started in earnest.

`run` stands for subprocess.run, `Process` for what minivllm/child.py starts. Elsewhere than on Linux both are those.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parent.parent

# ---------------------------------------------------------------------------------------- the one that is forked


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request until nobody is left to make one. Returns in the forked processes, with their request."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is not for this process
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    tellers: dict[int, int] = {}  # pid -> where its end is told
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            while tellers:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                tell = tellers.pop(pid)
                os.write(tell, f"{os.waitstatus_to_exitcode(status)}\n".encode())
                os.close(tell)
        if requests not in ready:
            continue
        sent, fds, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not sent:  # whoever asked has ended, and waits for none of these any more
            for pid in tellers:
                os.kill(pid, signal.SIGTERM)
            os._exit(0)
        if pid := os.fork():
            *_, tell = fds
            os.write(tell, f"{pid}\n".encode())
            tellers[pid] = tell
            for fd in fds[:3]:
                os.close(fd)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        requests.close()
        for fd in (ended, wake, fds[3], *tellers.values()):
            os.close(fd)
        for place, fd in enumerate(fds[:3]):
            os.dup2(fd, place)
            os.close(fd)
        return json.loads(sent)


def become(request: dict[str, Any], base: list[str]) -> None:
    """What the interpreter does between its start and the program's first line, and then the program."""
    import random

    import numpy
    import torch

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["blocked"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, request["blocked"])
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    random.seed()
    numpy.random.seed()
    if threads := os.environ.get("OMP_NUM_THREADS"):  # which OpenMP has read in another process
        torch.set_num_threads(int(threads))
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first, *rest = request["args"]
    if first == "-m":
        sys.argv = rest
        sys.path[:] = [os.getcwd(), *more, *base]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path[:] = [str(Path(first).resolve().parent), *more, *base]
        runpy.run_path(first, run_name="__main__")


# ---------------------------------------------------------------------------------------- those who ask


class Server:
    """The process that is forked, of this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests, self._lock = ours, threading.Lock()
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env)
        theirs.close()
        atexit.register(self._close)

    def _close(self) -> None:
        self._requests.close()
        self._process.wait()

    def fork(self, request: dict[str, Any], fds: Sequence[int]) -> int:
        """-> a pipe with two lines: the process's id now, its exit code at its end."""
        told, tell = os.pipe()
        with self._lock:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [*fds, tell])
        os.close(tell)
        return told


_server: Server | None = None
_making = threading.Lock()


def server() -> Server:
    global _server
    with _making:
        _server = _server or Server()
    return _server


class Process:
    """Of subprocess.Popen what minivllm/child.py's users use."""

    def __init__(
        self,
        args: Sequence[str],
        stdin: int | None = None,  # a file descriptor, as below; None: subprocess.PIPE
        stdout: int = 1,
        stderr: int = 2,
        env: dict[str, str] | None = None,
        cwd: str | Path | None = None,
        blocked: Sequence[int] = (),
    ):
        self.args, self.returncode, self.stdin = args, None, None
        request = {"args": list(args), "env": dict(os.environ if env is None else env), "blocked": list(blocked)}
        request["cwd"] = str(cwd or os.getcwd())
        theirs = stdin
        if stdin is None:
            theirs, ours = os.pipe()
            self.stdin = open(ours, "wb")  # noqa: SIM115 - lives as long as this object
        sys.stdout.flush()
        self._told = open(server().fork(request, (theirs, stdout, stderr)), "rb")  # noqa: SIM115
        if stdin is None:
            os.close(theirs)
        self.pid = int(self._told.readline())

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._told.readline() or -signal.SIGKILL)
            self._told.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run(
    *args: str,
    env: dict[str, str] | None = None,
    cwd: str | Path = ROOT,
    timeout: float = 250.0,
    stderr: int = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """`python ARGS` to its end; ARGS: -m and a module, or a script. What it writes is captured; stderr:
    subprocess.PIPE, or STDOUT for both in one."""
    if sys.platform != "linux":
        pipes = {"stdout": subprocess.PIPE, "stderr": stderr}
        return subprocess.run([sys.executable, *args], env=env, cwd=cwd, text=True, timeout=timeout, **pipes)
    with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        both = stderr == subprocess.STDOUT
        process = Process(args, nothing.fileno(), out.fileno(), (out if both else err).fileno(), env, cwd)
        try:
            process.wait(timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(args, process.returncode, out.read(), None if both else err.read())


def main() -> NoReturn | None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    base = list(sys.path)
    import gc

    import torch  # noqa: F401 - for those to come

    gc.collect()
    gc.freeze()
    become(serve(requests), base)


if __name__ == "__main__":
    main()
