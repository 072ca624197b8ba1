"""Whatever a client's work does, it ends with its process, within its limits, and the next one gets another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from minivllm.sandbox import Limits, Sandbox, TooMuch, WorkFailed
from minivllm.wanted import Unwanted

LIMITS = Limits(seconds=60, megabytes=256)  # no test waits for these
SHORT = Limits(seconds=0.5, megabytes=256)  # which an echo needs none of


@pytest.fixture
def make():
    made = []

    def sandbox(limits=LIMITS, setup=b"s"):
        made.append(Sandbox("sandboxed", setup, limits))
        return made[-1]

    yield sandbox
    for one in made:
        one.close()


def works(sandbox) -> bool:
    return sandbox.run(b"task") == b"s task by %d" % sandbox.pid


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_child_is_started_by_its_first_task_prepared_once_and_kept(make):
    sandbox = make()
    assert sandbox.pid is None
    assert works(sandbox)
    pid = sandbox.pid
    assert works(sandbox) and sandbox.pid == pid
    assert sandbox.run(b"print") == b"s print by %d" % pid
    sandbox.close()
    assert is_gone(pid)
    with pytest.raises(Unwanted):
        sandbox.run(b"task")


@pytest.mark.parametrize("task", [b"for ever", b"for ever, in C"])
def test_what_runs_too_long_is_killed_and_replaced(make, task):
    sandbox = make(SHORT)
    assert works(sandbox)
    pid = sandbox.pid
    with pytest.raises(TooMuch, match=r"over 0\.5 s"):
        sandbox.run(task)
    assert is_gone(pid)
    assert works(sandbox)


@pytest.mark.parametrize("task", [b"memory", b"memory, slowly"])
def test_what_takes_too_much_memory_is_killed_and_replaced(make, task):
    sandbox = make()
    with pytest.raises(TooMuch, match="memory"):
        sandbox.run(task)
    assert works(sandbox)


def test_what_crashes_takes_nothing_with_it(make):
    sandbox = make()
    with pytest.raises(TooMuch, match=f"signal {signal.SIGABRT.value}"):
        sandbox.run(b"crash")
    assert works(sandbox)


def test_what_nobody_waits_for_any_more_is_killed(make):
    sandbox, wanted = make(), threading.Event()
    assert works(sandbox)
    pid = sandbox.pid
    wanted.set()
    asked = []

    def is_wanted() -> bool:
        asked.append(wanted.is_set())
        if len(asked) == 3:  # it is at work
            wanted.clear()
        return wanted.is_set()

    with pytest.raises(Unwanted):
        sandbox.run(b"for ever, in C", is_wanted)
    assert is_gone(pid)
    assert works(sandbox)


def test_what_raises_is_told_and_keeps_its_process(make):
    sandbox = make()
    with pytest.raises(WorkFailed, match="ValueError: a defect"):
        sandbox.run(b"raise")
    assert works(sandbox)
    with pytest.raises(WorkFailed, match="cannot be prepared"):
        make(setup=b"broken").run(b"task")


def test_closing_ends_a_child_at_work(make):
    sandbox = make()
    assert works(sandbox)
    pid, raised = sandbox.pid, []

    def run():
        try:
            sandbox.run(b"for ever")
        except (TooMuch, Unwanted) as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    sandbox.close()
    thread.join(10)
    assert raised and is_gone(pid)


PARENT = """
import sys, threading
from minivllm.sandbox import Limits, Sandbox
sandbox = Sandbox("sandboxed", b"s", Limits(60, 256))
thread = threading.Thread(target=sandbox.run, args=(b"task",))
thread.start()
thread.join()  # the child outlives the thread that asked for it
sandbox.run(b"task")
print(sandbox.pid, flush=True)
sandbox.run(b"for ever, in C")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_at_work_dies_with_its_parent_however_that_ends():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=env) as parent:
        pid = int(parent.stdout.readline())
        child = psutil.Process(pid)
        parent.kill()
    psutil.wait_procs([child], timeout=30)
    assert is_gone(pid)


def test_an_answer_in_parts_comes_as_it_is_made_and_who_leaves_it_ends_the_child(make):
    sandbox = make()
    numbers = [part[100_000:] for part in sandbox.stream(b"parts") if part]
    assert numbers == [b"%d" % number for number in range(1000)]
    assert works(sandbox)
    pid = sandbox.pid
    left = sandbox.stream(b"parts")
    assert next(left)[100_000:] == b"0"
    left.close()
    assert is_gone(pid) and works(sandbox)
