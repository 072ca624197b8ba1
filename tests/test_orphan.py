"""No child outlives its parent, whatever it is at: not even one that never gives Python's lock back, or is stopped."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm import child, orphan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child's lifeline is all there is")

PARENT = """
import time
from minivllm import child
started = child.start("test_orphan", "{does}")
child.send_bytes(started, b"x")
time.sleep(3600)
"""


def wait() -> None:
    for _ in range(2):
        signal.pause()


def ask_late(asks: Callable[[], None] = orphan.go_on) -> None:
    time.sleep(0.5)
    asks()


DOES = {
    "waits": wait,
    "asks late and waits": wait,
    "holds the lock": lambda: re.match("(a+)+b", "a" * 64),  # for ages
}


def main(does: str) -> None:
    child.read_bytes()
    if does == "asks late and waits":
        orphan.go_on = ask_late
    child.end_with_parent()
    signal.signal(signal.SIGUSR1, lambda *_: print(signal.getitimer(signal.ITIMER_REAL)[0], flush=True))
    print(os.getpid(), flush=True)
    DOES[does]()


@pytest.mark.parametrize(
    ("does", "is_stopped"), [("waits", True), ("asks late and waits", True), ("holds the lock", False)]
)
def test_a_child_is_gone_soon_after_its_parent_was_killed(does, is_stopped):
    script = PARENT.format(does=does)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        end = os.pidfd_open(pid)
        try:
            if is_stopped:
                os.kill(pid, signal.SIGSTOP)
            parent.kill()
            assert select.select([end], [], [], 60)[0]
        finally:
            parent.kill()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(end, signal.SIGKILL)
            os.close(end)


def test_a_child_outlives_the_thread_that_asked_for_it():
    """To the kernel that one is the parent, if it has forked it."""
    started = []

    def ask():
        process = child.start("test_orphan", "waits", stdout=subprocess.PIPE)
        child.send_bytes(process, b"x")
        assert int(process.stdout.readline()) == process.pid  # the kernel has been asked
        started.append(process)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    while Path(f"/proc/self/task/{asking.native_id}").exists():
        pass
    with started[0] as process:
        process.send_signal(signal.SIGUSR1)
        assert float(process.stdout.readline()) == 0, "no alarm runs"
        process.kill()


if __name__ == "__main__":
    main(sys.argv[1])
